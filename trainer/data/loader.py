"""Batches as a function of (seed, step), and the batches of an evaluation.

Training runs through epochs. The order within an epoch is a function of (seed, epoch) alone, so it is the same for
every number of processes; each process reads its own rows of each global batch. A batch never spans two epochs: the
last one of an epoch is filled up with padding of weight 0.
"""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trainer.data.batches import Batch, Batches, check_rows, padded_ids, read_batch, read_filler
from trainer.data.order import shuffled
from trainer.data.source import Example, Source
from trainer.errors import InputRefused

_NUM_WITNESSES = 256
"""So many ids of an epoch's order are hashed to tell whether another loader has the same order."""

_REMEDIES = {
    "seed": "run.seed must stay as it was",
    "global_batch": "data.global_batch must stay as it was",
    "num_examples": "resume with the data that the run was started on",
    "order": "the run was started with a version of Lockstep that orders examples differently",
}


def num_batches_per_epoch(num_examples: int, global_batch: int) -> int:
    """Returns how many global batches an epoch has, a short last one included.

    >>> num_batches_per_epoch(10, 4)
    3
    """
    return -(-num_examples // global_batch)


@dataclass(frozen=True, eq=False)
class Loader:
    """This process's share of the training batches.

    source:           the training split.
    seed:             orders the examples, together with the epoch.
    global_batch:     examples in one step, over all processes.
    rows:             which rows of the global batch this process reads: contiguous, within range(global_batch).
    num_threads:      threads that read; each reads a batch at a time.
    prefetch_batches: batches that are kept ready.

    Raises InputRefused if there are fewer examples than ``global_batch``, or if example 0 can't become a batch.
    """

    source: Source
    _: KW_ONLY
    seed: int
    global_batch: int
    rows: slice
    num_threads: int
    prefetch_batches: int
    _filler: Example = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_rows(self.rows, self.global_batch)
        if self.num_examples < self.global_batch:
            raise InputRefused(
                f"{self.num_examples} training examples are fewer than data.global_batch = {self.global_batch};"
                " lower data.global_batch, or give more data"
            )
        if self.num_examples > np.iinfo(np.int32).max:
            raise InputRefused(f"{self.num_examples} training examples are more than an int32 id can count")
        object.__setattr__(self, "_filler", read_filler(self.source))

    @property
    def num_examples(self) -> int:
        return len(self.source)

    @property
    def batches_per_epoch(self) -> int:
        return num_batches_per_epoch(self.num_examples, self.global_batch)

    def iterate(self, start_step: int) -> Batches:
        """Returns the batches of steps ``start_step + 1``, ``start_step + 2``, ... without end.

        Reads nothing of what comes before. Close the result, or use it in a ``with`` block.
        """
        return Batches(
            self.read,
            start_step,
            sys.maxsize,
            num_threads=self.num_threads,
            prefetch_batches=self.prefetch_batches,
        )

    def read(self, batch_index: int) -> Batch:
        """Returns this process's rows of batch ``batch_index``, counted from 0 over all epochs."""
        return read_batch(self.source, self._filler, self.example_ids(batch_index)[self.rows])

    def example_ids(self, batch_index: int) -> np.ndarray:
        """Returns the ids of the whole global batch: int64 (global_batch,), -1 for padding."""
        epoch, batch = divmod(batch_index, self.batches_per_epoch)
        positions = batch * self.global_batch + np.arange(self.global_batch)
        ids = padded_ids(positions, self.num_examples)
        ids[ids >= 0] = shuffled(ids[ids >= 0], self.num_examples, self.seed, epoch)
        return ids

    def epoch(self, step: int) -> int:
        """Returns the epoch, from 0, of the batch that is consumed as step ``step`` (the first step is 1)."""
        return max(step - 1, 0) // self.batches_per_epoch

    def state(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint at step ``step`` needs to know of the data; it can be written as JSON."""
        return {
            "next_batch": step,
            "seed": self.seed,
            "num_examples": self.num_examples,
            "global_batch": self.global_batch,
            "order": self._witness(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises InputRefused unless ``state`` is of a loader that gives the same batches as this one."""
        step = state.get("next_batch")
        if not isinstance(step, int) or step < 0:
            raise InputRefused(f"the checkpoint's data state has next_batch = {step!r}, which is no number of batches")
        for name, here in self.state(step).items():
            there = state.get(name)
            if there != here:
                raise InputRefused(
                    f"the checkpoint's data state has {name} = {there!r}, but this run has {here!r}: {_REMEDIES[name]}"
                )

    def _witness(self) -> str:
        """A digest of the start of the orders of epochs 0 and 1, which another way of ordering would not share."""
        positions = np.arange(min(self.num_examples, _NUM_WITNESSES))
        orders = [shuffled(positions, self.num_examples, self.seed, epoch) for epoch in (0, 1)]
        return hashlib.sha256(np.stack(orders).astype("<i8").tobytes()).hexdigest()[:16]


def evaluation_batches(
    source: Source, global_batch: int, rows: slice, *, num_threads: int = 2, prefetch_batches: int = 4
) -> Batches:
    """Returns this process's rows of batches that run once through ``source`` in its own order.

    Every example is counted exactly once over all processes; the last batch is padded. Close the result, or use it in a
    ``with`` block. Raises InputRefused if there is nothing to evaluate.
    """
    check_rows(rows, global_batch)
    num_examples = len(source)
    if num_examples == 0:
        raise InputRefused(
            "the test split has no examples, so nothing can be evaluated; give test data in data.args,"
            " such as test_path or test_fraction, where the source has them"
        )
    read = partial(_read_in_sequence, source, read_filler(source), num_examples, global_batch, rows)
    num_batches = num_batches_per_epoch(num_examples, global_batch)
    return Batches(read, 0, num_batches, num_threads=num_threads, prefetch_batches=prefetch_batches)


def _read_in_sequence(
    source: Source, filler: Example, num_examples: int, global_batch: int, rows: slice, batch_index: int
) -> Batch:
    positions = batch_index * global_batch + np.arange(global_batch)[rows]
    return read_batch(source, filler, padded_ids(positions, num_examples))
