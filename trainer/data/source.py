"""What a data source must offer, and the two kinds that most sources are made of.

A source is a sequence of examples of one split. It is read by several threads at once, in any order, so an example must
depend on its index alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from trainer.errors import InputRefused

Split = Literal["train", "test"]

Example = dict[str, np.ndarray]
"""Named arrays (or NumPy scalars) of one example, without a batch dim."""

FAULT = "__fault__"
"""Name of the optional rows that are added to the loss: NaN there is how a non-finite contribution is staged."""

RESERVED_NAMES = frozenset({"weight", "example_id", FAULT})
"""Names that are added to a batch, which no source may have."""


@runtime_checkable
class Source(Protocol):
    """Random access to the examples of one split, all with the same names, shapes and dtypes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True)
class ArraySource:
    """Examples that lie in arrays whose first dim counts them."""

    arrays: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return min((len(array) for array in self.arrays.values()), default=0)

    def __getitem__(self, index: int, /) -> Example:
        return {name: array[index] for name, array in self.arrays.items()}


@dataclass(frozen=True)
class TokenWindows:
    """Windows of ``seq_len + 1`` tokens, ``seq_len`` apart: each token but the first is predicted exactly once.

    stream:     integers (num_tokens,), possibly memory-mapped; the last windowful that is not full is left out.
    vocab_size: tokens must lie in range(vocab_size). A window that holds another one is refused when it is read.
    origin:     what to call the stream in messages.

    Examples are ``{"tokens": int32 (seq_len + 1,)}``.
    """

    stream: np.ndarray
    seq_len: int
    vocab_size: int
    origin: str

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.seq_len

    def __getitem__(self, index: int, /) -> Example:
        start = index * self.seq_len
        window = np.asarray(self.stream[start : start + self.seq_len + 1])
        low, high = window.min(), window.max()
        if low < 0 or high >= self.vocab_size:
            raise InputRefused(
                f"{self.origin}: tokens {start} to {start + self.seq_len} range from {low} to {high},"
                f" outside 0 to {self.vocab_size - 1}; correct the file, or data.args.dtype or vocab_size"
            )
        return {"tokens": window.astype(np.int32)}


EMPTY = ArraySource({})
"""The test split of data that has none. Evaluation refuses it."""
