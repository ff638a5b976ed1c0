"""What a person sees of a run: a banner, then progress, then a summary. Presentation only.

On a terminal progress is one live line; anywhere else (a log file, a pipe) it is one plain line a row, never wrapped
and without escape codes.
"""

import io
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

NOT_METRICS = frozenset(
    ("kind", "step", "num_updates", "epoch", "attempt", "examples", "non_finite", "example_ids", "param_digest")
)
"""Keys of an evaluation's row that are not metrics."""


class Facts(NamedTuple):
    """What the banner tells about a run before its first step. Batches are counted in examples."""

    name: str
    model: str
    num_params: int
    global_batch: int
    process_batch: int
    replica_batch: int
    virtual_replica_batch: int
    num_virtual_replicas: int
    platform: str
    device_kind: str
    num_nodes: int
    devices_per_node: int
    num_processes: int
    algorithm: str
    exchanged_bytes: int
    """Bytes of the gradient that each replica contributes in a step."""
    num_steps: int
    num_epochs: float
    optimizer: str
    schedule: str
    run_directory: str
    attempt: int = 1
    resumed_step: int | None = None


class Summary(NamedTuple):
    """What the closing summary tells. ``final`` and ``best`` map metric names to values; ``best`` may be empty."""

    num_steps: int
    seconds: float
    step_seconds: float
    examples_per_second: float
    final: Mapping[str, float | None]
    best: Mapping[str, float | None]
    checkpoint: str | None
    metrics_path: str


def number(value: Any) -> str:
    """A metric in four significant digits; what is missing or not finite is called so.

    >>> [number(x) for x in (0.123456, 1234567.0, 3, None, float("inf"))]
    ['0.1235', '1.235e+06', '3', 'non-finite', 'non-finite']
    """
    if value is None or not math.isfinite(value):
        return "non-finite"
    return str(value) if isinstance(value, int) else f"{float(value):.4g}"


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds, down to the second.

    >>> clock(3725.4), clock(59.6)
    ('1:02:05', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it.

    >>> duration(0.01234), duration(12.34), duration(123.4)
    ('12.3 ms', '12.3 s', '2:03')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def mib(num_bytes: int) -> str:
    """Bytes as MiB.

    >>> mib(3 * 2**19), mib(12345)
    ('1.5 MiB', '0.012 MiB')
    """
    size = num_bytes / 2**20
    return f"{size:,.1f} MiB" if size >= 1 else f"{size:.2g} MiB"


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "node"), plural(1797, "example"), plural(2, "process")
    ('1 node', '1,797 examples', '2 processes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def banner(facts: Facts) -> Text:
    """The start banner: a title, and one labelled line for each thing to check before the run is left alone."""
    num_devices = facts.num_nodes * facts.devices_per_node
    batch = (
        f"{facts.global_batch:,} global = {plural(facts.num_processes, 'process')} x {facts.process_batch:,}"
        f" = {plural(num_devices, 'replica')} x {facts.replica_batch:,}"
        f" = {plural(facts.num_virtual_replicas, 'virtual replica')} x {facts.virtual_replica_batch:,}"
    )
    resumed = "" if facts.resumed_step is None else f", resumed from step {facts.resumed_step:,}"
    lines = {
        "model": f"{facts.model}, {facts.num_params:,} parameters",
        "batch": batch,
        "devices": f"{num_devices} x {facts.device_kind} ({facts.platform}) = "
        f"{plural(facts.num_nodes, 'node')} x {facts.devices_per_node} local",
        "exchange": f"{facts.algorithm}, {mib(facts.exchanged_bytes)} per replica and step",
        "length": f"{plural(facts.num_steps, 'step')} = {facts.num_epochs:.4g} epochs",
        "optimizer": f"{facts.optimizer}, {facts.schedule}",
        "run": f"{facts.run_directory}, attempt {facts.attempt}{resumed}",
    }
    return _labelled(facts.name, lines)


def _labelled(title: str, lines: Mapping[str, str]) -> Text:
    width = max(map(len, lines)) + 2
    rows = [Text.assemble("\n  ", (label.ljust(width), "dim"), value) for label, value in lines.items()]
    return Text.assemble((title, "bold"), *rows)


def _metrics(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())


class Display:
    """Shows one run of ``num_steps`` steps on ``console``.

    Use it as a context manager, or call ``close``: the live line ends, and the terminal is as it was, also after an
    exception. The cursor is never hidden, so that even a killed process leaves the terminal usable.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._live: Progress | None = None
        self._compile_seconds: float | None = None
        """Until the first row is shown."""

    def banner(self, facts: Facts) -> None:
        """The start banner."""
        self._print(banner(facts))

    def compiled(self, seconds: float, memory_bytes: int | None) -> None:
        """The step is compiled: the seconds that took, and the device memory it needs where that is known."""
        self._compile_seconds = seconds
        memory = "" if memory_bytes is None else f", {mib(memory_bytes)} of memory per device"
        self.note(f"compiled in {duration(seconds)}{memory}")

    def row(self, row: Mapping[str, Any]) -> None:
        """Progress, from a row of kind ``train``: loss, rate, and time left at the rate of this row.

        The row of the first step after ``compiled`` has no rate: that step warms up. Its time is told with compilation.
        """
        compile_seconds, self._compile_seconds = self._compile_seconds, None
        shown = {key: row[key] for key in ("loss", "accuracy") if key in row}
        text = f"step {row['step']}/{self._num_steps}  {_metrics(shown)}"
        details = f"grad_norm {number(row['grad_norm'])}"
        if compile_seconds is not None:
            self.note(f"first step, with compilation: {duration(compile_seconds + row['step_seconds'])}")
        else:
            left_seconds = (self._num_steps - row["step"]) * row["step_seconds"]
            text += f"  {row['examples_per_second']:,.0f} examples/s  {clock(left_seconds)} left"
            details += f", {duration(row['step_seconds'])} a step"
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._update(row["step"], text)
        else:
            self._print(Text(f"{text}  ({details})"))

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """An evaluation's metrics, from a row of kind ``eval``."""
        values = {key: value for key, value in row.items() if key not in NOT_METRICS}
        examples = plural(row["examples"], "example")
        self._print(Text(f"step {row['step']}  evaluation on {examples}: {_metrics(values)}", style="cyan"))

    def saved(self, step: int, seconds: float) -> None:
        """The checkpoint of ``step`` is complete, so many seconds after its save began."""
        self.note(f"step {step}  checkpoint saved in {duration(seconds)}")

    def note(self, text: str) -> None:
        """A line worth knowing."""
        self._print(Text(text, style="dim"))

    def warning(self, text: str) -> None:
        """A line worth acting on."""
        self._print(Text(f"warning: {text}", style="yellow"))

    def summary(self, summary: Summary) -> None:
        """The end: what came out, how long it took, and where it is."""
        self.close()
        best = {"best": _metrics(summary.best)} if summary.best else {}
        lines = {
            "final": _metrics(summary.final) or "no metrics",
            **best,
            "time": f"{duration(summary.seconds)} in all, {duration(summary.step_seconds)} a step, "
            f"{summary.examples_per_second:,.0f} examples/s",
            "checkpoint": summary.checkpoint or "none",
            "metrics": summary.metrics_path,
        }
        self._print(_labelled(f"done after {plural(summary.num_steps, 'step')}", lines))

    def close(self) -> None:
        """Ends the live line; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, text: Text) -> None:
        # soft_wrap: a log's lines stay whole, so that grep finds them.
        self._console.print(text, soft_wrap=True)

    def _update(self, step: int, text: str) -> None:
        live = self._live or self._start_live()
        live.update(live.task_ids[0], completed=step, description=text, refresh=True)

    def _start_live(self) -> Progress:
        columns = (BarColumn(bar_width=12), TextColumn("{task.description}", markup=False))
        # No refresh thread: the line changes only with a row, and the step's thread has the core to itself.
        self._live = Progress(*columns, console=self._console, auto_refresh=False)
        self._live.add_task("", total=self._num_steps)
        self._live.start()
        self._console.show_cursor(True)
        return self._live


class NullDisplay(Display):
    """Shows nothing: for every rank but 0."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), quiet=True), num_steps=0)
