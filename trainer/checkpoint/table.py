"""What ``lockstep checkpoint list`` and ``verify`` tell of a run's checkpoints. Needs no JAX."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from trainer import metrics
from trainer.checkpoint import catalog
from trainer.config import Config
from trainer.display import mib, number
from trainer.rundir import RunDir

Row = dict[str, Any]


def rows(config: Config, run_dir: RunDir, *, checksums: bool) -> list[Row]:
    """A row for each checkpoint of the run, the oldest first, every value one that JSON holds.

    checksums: read every byte; else sizes are compared.
    """
    evaluations = metrics.read(run_dir.metrics, "eval") if run_dir.metrics.is_file() else []
    metric = config.checkpoint.best_metric
    scores = catalog.scores_of(evaluations, metric)
    directory = catalog.location(catalog.directory_of(config, run_dir))
    return [_row(entry, metric, scores) for entry in reversed(catalog.entries(directory, checksums=checksums))]


def is_sound(found: Sequence[Row]) -> bool:
    """Whether nothing is wrong with any of them. That a run went back to an older one is not."""
    return all(row["status"] in (catalog.GOOD, catalog.FORSAKEN) for row in found)


def table(found: Sequence[Row], metric: str) -> Table:
    """The rows for people."""
    shown = Table("step", "status", "size", metric, "completed", box=None)
    shown.add_column("what is wrong", overflow="fold")
    for row in found:
        seconds, value = row["completed_seconds"], row["metrics"].get(metric)
        when = "" if seconds is None else f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
        size = "" if row["num_bytes"] is None else mib(row["num_bytes"])
        shown.add_row(
            str(row["step"]), row["status"], size, "" if value is None else number(value), when, row["problem"]
        )
    return shown


def _row(entry: catalog.Entry, metric: str, scores: Mapping[int, float | None]) -> Row:
    manifest = entry.manifest
    score = catalog.score_at(entry.step, scores)
    return {
        "step": entry.step,
        "status": entry.status,
        "problem": entry.problem,
        "path": str(entry.path),
        "num_bytes": manifest and manifest.num_bytes,
        "completed_seconds": manifest and manifest.seconds,
        "run_id": manifest and manifest.run_id,
        "format_version": manifest and manifest.format_version,
        "metrics": {} if score is None else {metric: score},
    }
