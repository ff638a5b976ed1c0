"""Reading batches ahead of the device, and what a batch consists of.

A batch holds the source's arrays, stacked, and besides
``weight``      float32 (rows,): 1 for a real example, 0 for padding;
``example_id``  int32 (rows,): the example's index within its split, -1 for padding.
"""

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import grain
import numpy as np

from trainer.data.source import RESERVED_NAMES, Example, Source
from trainer.errors import InputRefused

Batch = dict[str, np.ndarray]

_NARROWED = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}
"""64-bit types become these, because that is what JAX by default would make of them."""


class Batches(Iterator[Batch]):
    """``read(index)`` for ``index`` in ``range(start, stop)``, run ahead of the consumer by threads.

    Reading begins at once. ``close``, or leaving a ``with`` block, or reaching the end, drops what was read ahead and
    ends the threads as soon as the batches that they are reading are done; it does not wait for them.
    """

    def __init__(
        self, read: Callable[[int], Batch], start: int, stop: int, *, num_threads: int, prefetch_batches: int
    ) -> None:
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch_batches)
        self._iterator = iter(grain.MapDataset.range(start, stop).map(read).to_iter_dataset(options))
        self._iterator.start_prefetch()
        self._is_exhausted = False

    def __next__(self) -> Batch:
        if self._is_exhausted:
            raise StopIteration
        try:
            return next(self._iterator)
        except StopIteration:
            self._is_exhausted = True
            self.close()
            raise

    def close(self) -> None:
        """Ends the threads; may be called twice. Afterwards ``next`` raises ValueError."""
        self._iterator.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_example(source: Source, index: int) -> Example:
    """Returns one example with its values as arrays. Raises InputRefused if it can't be read or is no example."""
    try:
        example = source[index]
    except OSError as error:
        raise InputRefused(f"example {index} of {type(source).__name__} cannot be read: {error}") from error
    if not isinstance(example, Mapping):
        raise InputRefused(f"{type(source).__name__} gave {type(example).__name__} for example {index}, not a dict")
    return {name: np.asarray(value) for name, value in example.items()}


def read_filler(source: Source) -> Example:
    """Returns example 0, which stands in padded rows and fixes names, shapes and dtypes for all others.

    Raises InputRefused if it holds anything that can't become a batch.
    """
    filler = read_example(source, 0)
    if clash := sorted(RESERVED_NAMES & filler.keys()):
        raise InputRefused(f"{type(source).__name__} has an array named {clash[0]!r}, which the loader adds itself")
    for name, value in filler.items():
        if value.dtype.kind in "OSUMm" or value.dtype.names:
            raise InputRefused(f"array {name!r} of {type(source).__name__} has dtype {value.dtype}: give it numbers")
    return filler


def read_batch(source: Source, filler: Example, example_ids: np.ndarray) -> Batch:
    """Returns the batch of ``example_ids``, int (rows,), in that order; -1 gives a row of padding.

    Raises InputRefused if an example does not have the names, shapes and dtypes of ``filler``.
    """
    examples = [filler if i < 0 else _like(filler, read_example(source, i), i) for i in example_ids.tolist()]
    batch = {name: _narrowed(name, np.stack([example[name] for example in examples])) for name in filler}
    batch["weight"] = (example_ids >= 0).astype(np.float32)
    batch["example_id"] = example_ids.astype(np.int32)
    return batch


def padded_ids(positions: np.ndarray, num_examples: int) -> np.ndarray:
    """Returns ``positions`` with -1 in place of those past the end.

    >>> padded_ids(np.array([1, 2, 3]), 2).tolist()
    [1, -1, -1]
    """
    return np.where(positions < num_examples, positions, -1)


def check_rows(rows: slice, global_batch: int) -> range:
    """Returns the rows as a range. They must be a contiguous, non-empty part of the global batch (ValueError)."""
    chosen = range(global_batch)[rows]
    if not chosen or chosen.step != 1:
        raise ValueError(f"rows = {rows} is no contiguous, non-empty part of range({global_batch})")
    return chosen


def _like(filler: Example, example: Example, index: int) -> Example:
    if example.keys() != filler.keys():
        raise InputRefused(f"example {index} has arrays {sorted(example)}, but example 0 has {sorted(filler)}")
    for name, first in filler.items():
        value = example[name]
        if value.shape != first.shape or value.dtype != first.dtype:
            raise InputRefused(
                f"array {name!r} of example {index} is {value.dtype} of shape {value.shape},"
                f" but that of example 0 is {first.dtype} of shape {first.shape}; all must be alike"
            )
    return example


def _narrowed(name: str, values: np.ndarray) -> np.ndarray:
    narrow = _NARROWED.get(values.dtype.name)
    if narrow is None:
        return values
    if values.dtype.kind in "iu" and values.size:
        limits = np.iinfo(narrow)
        if values.min() < limits.min or values.max() > limits.max:
            raise InputRefused(
                f"array {name!r} has a value outside {limits.min} to {limits.max} (it becomes {narrow.__name__})"
            )
    with np.errstate(over="ignore"):  # A float beyond float32 becomes infinite, which the step reports.
        return values.astype(narrow)
