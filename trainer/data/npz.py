"""npz: your own examples as the named arrays of a NumPy archive (``numpy.savez``)."""

import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainer.data.source import EMPTY, ArraySource, Source, Split
from trainer.data.splits import TestFraction, held_out, split_file
from trainer.errors import InputRefused

DAMAGE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)
"""What NumPy raises for an archive that is damaged, is none, or holds Python objects."""


def npz(*, split: Split, path: str, test_path: str | None = None, test_fraction: TestFraction = 0.0) -> Source:
    """Returns examples with the archive's arrays under their own names; the first dim of each counts examples.

    The test split is ``test_path``, another archive, or the fixed random part ``test_fraction`` of ``path``.

    Raises InputRefused: a missing or damaged file, arrays of Python objects, or of different lengths.
    """
    file = split_file(split, path, test_path, test_fraction)
    if file is None:
        return EMPTY
    arrays = _read(file)
    if test_fraction > 0:
        chosen = held_out(len(next(iter(arrays.values()))), test_fraction, split)
        arrays = {name: array[chosen] for name, array in arrays.items()}
    return ArraySource(arrays)


def load_archive(file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns the named arrays of a NumPy archive; raises one of ``DAMAGE`` if it is none, or holds Python objects."""
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise ValueError("it is one array without a name; write it with numpy.savez(file, name=array)")
    with loaded:
        return {name: loaded[name] for name in loaded.files}


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        with file.open("rb") as content:  # Given a path, NumPy would leave a damaged file open.
            arrays = load_archive(content)
    except DAMAGE as error:
        raise InputRefused(f"{file} is no readable .npz archive of plain arrays: {error}") from error
    lengths = {name: len(array) if array.ndim else "no dims" for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or "no dims" in lengths.values():
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise InputRefused(
            f"{file}: the first dim of every array must count the examples, but has {told or 'no array'}"
        )
    return arrays
