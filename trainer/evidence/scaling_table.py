"""What ``lockstep bench scaling`` has found: where the time goes, the JSON and the table.

Of a step that takes longer than its fair share of the step on one replica

- waiting is by how much the slowest process computes longer than the mean of all,
- exchange is what the whole step takes longer than the slowest process computes: what of it is not hidden,
- compute is the rest: it takes longer than on one replica, as it does where replicas share cores or memory.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from trainer.evidence.output import short_time
from trainer.evidence.timing import Machine, slowest

Times = dict[str, list[float]]
"""The seconds of "step", "compute" and "exchange" in one process, repeat by repeat."""


class Point(NamedTuple):
    """The first devices of the first nodes."""

    nodes: int
    devices_per_node: int

    @property
    def replicas(self) -> int:
        return self.nodes * self.devices_per_node


class Row(NamedTuple):
    """What was found at one number of replicas; ``lost_to_x`` are shares of the step, and add up to 1 - efficiency.

    compute_seconds:  of one process by itself, the mean over the processes.
    waiting_seconds:  the slowest process's compute less the mean; None where one process cannot tell.
    exchange_seconds: what the step takes besides; one replica exchanges nothing.
    exchange_alone_seconds: an exchange with nothing beside it.
    """

    replicas: int
    nodes: int
    devices_per_node: int
    processes: int
    global_batch: int
    step_seconds: float
    examples_per_second: float
    efficiency: float
    compute_seconds: float
    waiting_seconds: float | None
    exchange_seconds: float
    exchange_alone_seconds: float
    lost_to_exchange: float
    lost_to_waiting: float | None
    lost_to_compute: float


def row(point: Point, batch: int, everyone: Sequence[Times], single: Row | None) -> Row:
    """What the times of the processes that took part amount to; ``single``: the row of one replica, unless this is."""
    step = slowest([times["step"] for times in everyone])
    computes = [statistics.median(times["compute"]) for times in everyone]
    mean, longest = statistics.fmean(computes), max(computes)
    waiting = longest - mean if len(everyone) > 1 else None
    exchange = 0.0 if single is None else max(step - longest, 0.0)
    speed = batch / step
    efficiency = 1.0 if single is None else speed / (point.replicas * single.examples_per_second)
    lost_to_waiting = None if waiting is None else waiting / step
    return Row(
        replicas=point.replicas,
        nodes=point.nodes,
        devices_per_node=point.devices_per_node,
        processes=len(everyone),
        global_batch=batch,
        step_seconds=step,
        examples_per_second=speed,
        efficiency=efficiency,
        compute_seconds=mean,
        waiting_seconds=waiting,
        exchange_seconds=exchange,
        exchange_alone_seconds=slowest([times["exchange"] for times in everyone]),
        lost_to_exchange=exchange / step,
        lost_to_waiting=lost_to_waiting,
        lost_to_compute=1 - efficiency - exchange / step - (lost_to_waiting or 0.0),
    )


def as_json(where: Machine, rows: Sequence[Row], fixed_batch: bool) -> dict[str, Any]:
    """All that was measured, for people and scripts."""
    return {
        "machine": {**where._asdict(), "shares_cores": where.shares_cores},
        "fixed": "global batch" if fixed_batch else "batch per replica",
        "rows": [found._asdict() for found in rows],
    }


def table(rows: Sequence[Row], where: Machine, fixed_batch: bool) -> Iterator[Any]:
    """What is shown of the rows."""
    yield where.describe()
    yield f"the {'global batch' if fixed_batch else 'batch per replica'} is the same in every row"
    shown = Table()
    headings = ("replicas", "processes", "batch", "step", "examples/s", "efficiency", "lost to\nexchange")
    for heading in (*headings, "lost to\nwaiting", "lost to\ncompute", "exchange\nalone"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for found in rows:
        shown.add_row(
            f"{found.replicas} = {found.nodes} x {found.devices_per_node}",
            str(found.processes),
            f"{found.global_batch:,}",
            short_time(found.step_seconds),
            f"{found.examples_per_second:,.0f}",
            *map(_percent, (found.efficiency, found.lost_to_exchange, found.lost_to_waiting, found.lost_to_compute)),
            short_time(found.exchange_alone_seconds),
        )
    yield shown


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
