"""tokens: your own token ids, memory-mapped from a ``.npy`` file or a raw ``.bin`` one."""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from trainer.data.source import EMPTY, Source, Split, TokenWindows
from trainer.data.splits import TestFraction, split_file
from trainer.errors import InputRefused, SettingsRefused

TokenType = Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]

_LARGEST_VOCABULARY = 2**31 - 1


def tokens(
    *,
    split: Split,
    path: str,
    seq_len: Annotated[int, Field(gt=0)],
    test_path: str | None = None,
    test_fraction: TestFraction = 0.0,
    dtype: TokenType | None = None,
    vocab_size: Annotated[int, Field(gt=0, le=_LARGEST_VOCABULARY)] = _LARGEST_VOCABULARY,
) -> Source:
    """Returns windows of ``seq_len + 1`` tokens: ``tokens`` int32 (seq_len + 1,).

    The test split is ``test_path``, another file, or the last ``test_fraction`` of the tokens in ``path``.

    dtype:      of a raw file, little-endian; a .npy file says it itself.
    vocab_size: tokens outside range(vocab_size) are refused when they are read.

    Raises InputRefused: a missing or damaged file, or one with less than one window. SettingsRefused: dtype is missing.
    """
    file = split_file(split, path, test_path, test_fraction)
    if file is None:
        return EMPTY
    stream = _open(file, dtype)
    if test_fraction > 0:
        num_train = len(stream) - round(len(stream) * test_fraction)
        stream = stream[:num_train] if split == "train" else stream[num_train:]
    if len(stream) <= seq_len:
        raise InputRefused(
            f"{file}: the {split} split has {len(stream)} tokens, fewer than one window of"
            f" data.args.seq_len + 1 = {seq_len + 1}; lower seq_len or give more"
        )
    return TokenWindows(stream, seq_len, vocab_size, origin=str(file))


def _open(file: Path, dtype: TokenType | None) -> np.ndarray:
    """Maps the tokens into memory: integers (num_tokens,)."""
    return _open_npy(file, dtype) if file.suffix == ".npy" else _open_raw(file, dtype)


def _open_npy(file: Path, dtype: TokenType | None) -> np.ndarray:
    try:
        stream = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputRefused(f"{file} is no readable .npy file: {error}") from error
    if not isinstance(stream, np.ndarray) or stream.ndim != 1 or stream.dtype.kind not in "iu":
        found = f"{stream.dtype} of shape {stream.shape}" if isinstance(stream, np.ndarray) else "an archive"
        raise InputRefused(f"{file} holds {found}; tokens are one row of integers")
    if dtype is not None and stream.dtype != np.dtype(dtype):
        raise SettingsRefused(f"data.args.dtype = {dtype!r}, but {file} says {stream.dtype}: leave dtype out")
    return stream


def _open_raw(file: Path, dtype: TokenType | None) -> np.ndarray:
    if dtype is None:
        raise SettingsRefused(f"data.args.dtype is needed for the raw file {file}, such as dtype = 'uint16'")
    num_bytes, item = file.stat().st_size, np.dtype(dtype).newbyteorder("<")
    if num_bytes == 0 or num_bytes % item.itemsize:
        raise InputRefused(f"{file} has {num_bytes} bytes, which is no whole number of {dtype}; is it damaged?")
    return np.memmap(file, item, mode="r")
