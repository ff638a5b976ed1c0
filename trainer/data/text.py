"""text: the source files of Python's own standard library as bytes, a real corpus on every machine.

It is some 11 MB and differs between Python versions, not between machines with the same one.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from trainer.data.source import Source, Split, TokenWindows
from trainer.errors import InputRefused

_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
"""Folders that are large and no library code, or that not every installation has."""

_GENERATED = ("_sysconfigdata", "config-")
"""Beginnings of names of what a build writes for its machine."""

_FILE_END = b"\0"


def text(
    *,
    split: Split,
    seq_len: Annotated[int, Field(gt=0)],
    max_bytes: Annotated[int, Field(gt=0)] | None = None,
) -> Source:
    """Returns windows of ``seq_len + 1`` bytes: ``tokens`` int32 (seq_len + 1,) in 0..255.

    The split is fixed by file, by a hash of its name: about one file in ten is for testing. A zero byte ends each file.

    max_bytes: take only the first so many bytes of the split.

    Raises InputRefused if this Python comes without its sources, or if they are shorter than one window.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [name for name in _source_files(root) if _is_test(name) == (split == "test")]
    stream = np.frombuffer(b"".join((root / name).read_bytes() + _FILE_END for name in files), np.uint8)[:max_bytes]
    if len(stream) <= seq_len:
        raise InputRefused(
            f"the {split} split of text has {len(stream)} bytes (from {root}), fewer than one window of"
            f" data.args.seq_len + 1 = {seq_len + 1}; lower seq_len or raise max_bytes"
        )
    return TokenWindows(stream, seq_len, vocab_size=256, origin="text")


def _source_files(root: Path) -> list[str]:
    """The names of the library's source files relative to ``root``, sorted."""
    return sorted(_walk(root))


def _walk(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT and not name.startswith(_GENERATED)]
        for name in names:
            if name.endswith(".py") and not name.startswith(_GENERATED):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_test(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 10 == 0
