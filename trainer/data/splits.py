"""Which part of a user's files is for training and which for testing.

Test data is either given apart (``test_path``), or a fixed part of all (``test_fraction``), or there is none.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from trainer.data.source import Split
from trainer.errors import SettingsRefused, no_such

TestFraction = Annotated[float, Field(ge=0, lt=1)]
"""The part of the examples that is held out for testing; 0: none."""


def existing(path: str, key: str, *, is_folder: bool = False) -> Path:
    """Returns ``path``, relative to the current directory, if it is a file (or a folder). Raises InputRefused else."""
    place = Path(path).expanduser()
    if not (place.is_dir() if is_folder else place.is_file()):
        raise no_such(f"data.args.{key}", path, "folder" if is_folder else "file")
    return place


def split_file(split: Split, path: str, test_path: str | None, test_fraction: float = 0.0) -> Path | None:
    """Returns the file that ``split`` is in, or None for the test split if there is no test data.

    Raises SettingsRefused if test data is given in both ways or is the training file; InputRefused if there is no file.
    """
    if test_path is not None and test_fraction > 0:
        raise SettingsRefused("data.args.test_path and data.args.test_fraction exclude each other: give one of them")
    train = existing(path, "path")
    if test_path is None:
        return train if split == "train" or test_fraction > 0 else None
    test = existing(test_path, "test_path")
    if test.samefile(train):
        raise SettingsRefused("data.args.test_path is the same file as data.args.path, so nothing would be held out")
    return train if split == "train" else test


def held_out(num_examples: int, test_fraction: float, split: Split) -> np.ndarray:
    """Returns the ids of ``split``, ascending, out of range(num_examples): a fixed random choice.

    The test split gets ``round(num_examples * test_fraction)`` examples.
    """
    num_test = round(num_examples * test_fraction)
    order = np.random.RandomState(0).permutation(num_examples)  # Its stream is frozen for good.
    return np.sort(order[:num_test] if split == "test" else order[num_test:])
