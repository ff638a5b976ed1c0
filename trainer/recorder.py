"""The recorder: reads each step's report, judges it, and writes and shows the rows that are due.

A report is read one step late, while the device is busy with the next step, so that reading never stalls it.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from trainer.config import Optimizer
from trainer.display import Display
from trainer.errors import Halted
from trainer.metrics import MetricsWriter, Row, mean
from trainer.report import PackedReport, Report, read
from trainer.resilience import progress


def judge(report: Report, settings: Optimizer, ranks: np.ndarray) -> None:
    """Ends the run if a step's numbers cannot be trusted.

    Args:
        report: a step's report, on the host.
        settings: what to do about a non-finite step.
        ranks: the process of each replica.

    Raises:
        Halted: a non-finite contribution or sum under ``halt``, or one skip too many under ``skip``.
    """
    if report.consecutive_skips == 0:
        return
    replicas = np.flatnonzero(report.non_finite)
    weight = float(report.metrics["loss"][1])
    if not 0 <= weight < math.inf:
        what = f"the task's weight of the batch of step {report.step} is {weight}, which is no number of examples"
    elif replicas.size:
        names = ", ".join(f"rank {rank}" for rank in sorted(set(ranks[replicas].tolist())))
        what = f"non-finite loss or gradient in step {report.step}, from {names} (replicas {replicas.tolist()})"
    else:
        what = f"non-finite sum of gradients in step {report.step}, though each contribution was finite"
    if settings.non_finite == "halt":
        raise Halted(f"{what}; the parameters are as before it. To leave such steps out: optimizer.non_finite = 'skip'")
    if report.consecutive_skips > settings.max_consecutive_skips:
        raise Halted(
            f"{what}; {report.consecutive_skips} steps in a row were skipped, which is more than "
            f"optimizer.max_consecutive_skips = {settings.max_consecutive_skips}"
        )


class Pace:
    """Time spent in steps, without what hooks took; as a whole and since the last reading."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._num_steps = self._num_examples = 0
        self._total_seconds, self._total_steps, self._total_examples = 0.0, 0, 0

    def count(self, num_examples: int) -> None:
        """Counts a step that is done."""
        self._num_steps += 1
        self._num_examples += num_examples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time inside out of account."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin

    def read(self) -> tuple[float, float]:
        """(seconds a step, examples a second) since the last reading."""
        now = time.perf_counter()
        seconds, steps, examples = now - self._since, self._num_steps, self._num_examples
        self._total_seconds += seconds
        self._total_steps += steps
        self._total_examples += examples
        self._since, self._num_steps, self._num_examples = now, 0, 0
        return seconds / max(steps, 1), examples / seconds

    def total(self) -> tuple[float, float]:
        """(seconds a step, examples a second) over all readings."""
        return self._total_seconds / max(self._total_steps, 1), self._total_examples / max(self._total_seconds, 1e-9)


class Recorder:
    """Reads reports one step late: judges them, and writes and shows the rows that are due."""

    def __init__(
        self,
        *,
        writer: MetricsWriter | None,
        display: Display,
        optimizer: Optimizer,
        ranks: np.ndarray,
        is_due: Callable[[int], bool],
        constant: Callable[[int], Row],
        wire_bytes: Callable[[int], Row] = lambda num_updates: {},
    ) -> None:
        """
        Args:
            writer: where rows go; None on all ranks but 0.
            display: where people see them.
            optimizer: the settings that say what to do about non-finite steps.
            ranks: the process of each replica.
            is_due: whether the row of a step is wanted.
            constant: what is known of a step without running it (its epoch and attempt).
            wire_bytes: what an exchange after so many updates sends.
        """
        self._writer, self._display, self._optimizer = writer, display, optimizer
        self._ranks, self._is_due, self._constant, self._wire_bytes = ranks, is_due, constant, wire_bytes
        self._pending: tuple[int, PackedReport, Row] | None = None
        self.pace = Pace()
        self.last_row: Row = {}

    def push(self, step: int, report: PackedReport) -> None:
        """Takes a step's report as soon as the step is dispatched, and reads the one before."""
        before, self._pending = self._pending, (step, report, {})
        if before is not None:
            self._read(*before)

    def annotate(self, **values: Any) -> None:
        """Adds to the row of the step that was pushed last, and makes that row due."""
        assert self._pending is not None
        self._pending[2].update(values)

    def flush(self) -> None:
        """Waits for the step that was pushed last and reads its report."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read(*pending)

    def _read(self, step: int, report: PackedReport, notes: Row) -> None:
        with progress.current().awaiting(step):
            values = read(report)
        self.pace.count(int(values.examples))
        skipped = values.consecutive_skips > 0
        if skipped or notes or values.example_ids is not None or self._is_due(step):
            self._write(step, values, notes | ({"skipped": True} if skipped else {}))
        judge(values, self._optimizer, self._ranks)

    def _write(self, step: int, report: Report, notes: Row) -> None:
        step_seconds, examples_per_second = self.pace.read()
        row = {
            "kind": "train",
            "step": step,
            "num_updates": int(report.num_updates),
            **self._constant(step),
            **{name: mean(total, weight) for name, (total, weight) in report.metrics.items()},
            "learning_rate": float(report.learning_rate),
            "grad_norm": float(report.grad_norm),
            "examples": int(report.examples),
            "step_seconds": step_seconds,
            "examples_per_second": examples_per_second,
            "num_contributions": self._ranks.size if report.applied else 0,
            **self._wire_bytes(int(report.num_updates) - int(report.applied)),
            **notes,
        }
        if report.example_ids is not None:
            row["example_ids"] = report.example_ids[report.example_ids >= 0].tolist()
        self.last_row = row
        if self._writer is not None:
            self._writer.write(row)
        self._display.row(row)
