"""arrayrecord: your own examples in ArrayRecord files, for data that is too large for memory."""

import glob
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import grain

from trainer.data.npz import DAMAGE, load_archive
from trainer.data.source import EMPTY, Example, Source, Split
from trainer.errors import InputRefused, SettingsRefused, no_such
from trainer.import_path import load

Paths = str | tuple[str, ...]
"""A file, or a pattern such as 'data/train-*.arrayrecord', or several of these."""


def arrayrecord(*, split: Split, path: Paths, test_path: Paths | None = None, decode: str | None = None) -> Source:
    """Returns the examples that the records hold, in the order of the sorted files.

    decode: import path of a function that makes an example, a dict of arrays, from a record's bytes. Without it a
            record is a NumPy archive (``numpy.savez`` into an ``io.BytesIO``).

    Raises InputRefused: no file, or a damaged one; when read, a record that is no archive.
    """
    if split == "test" and test_path is None:
        return EMPTY
    train, test = _files(path, "path"), _files(test_path, "test_path") if test_path is not None else []
    if shared := sorted(set(train) & set(test)):
        raise SettingsRefused(f"{shared[0]} is in both data.args.path and data.args.test_path: nothing is held out")
    files = train if split == "train" else test
    decoder = archive if decode is None else load(decode, "data.args.decode")
    try:
        opened = grain.sources.ArrayRecordDataSource(files)
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        raise InputRefused(f"{_told(files)}: no readable ArrayRecord: {' '.join(str(error).split())}") from error
    return Records(cast(Sequence[bytes], opened), decoder)  # It is one, though its types don't say so.


@dataclass(frozen=True)
class Records:
    """Records and how to decode them."""

    records: Sequence[bytes]
    decode: Callable[[bytes], Example]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int, /) -> Example:
        try:
            record = self.records[index]
        except (OSError, RuntimeError, ValueError, IndexError) as error:
            raise InputRefused(f"record {index} is damaged: {' '.join(str(error).split())}") from error
        try:
            return self.decode(record)
        except InputRefused as error:
            raise InputRefused(f"record {index}: {error}") from error


def archive(record: bytes) -> Example:
    """Returns the arrays of a NumPy archive. Raises InputRefused if it is none, or holds Python objects."""
    try:
        return load_archive(io.BytesIO(record))
    except DAMAGE as error:
        raise InputRefused(f"no readable .npz archive of plain arrays; set data.args.decode? ({error})") from error


def _files(paths: Paths, key: str) -> list[str]:
    patterns = [paths] if isinstance(paths, str) else paths
    files: list[str] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern))
        if not found:
            raise no_such(f"data.args.{key}", pattern)
        files += found
    return files


def _told(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
