"""How far a run has come, read from its directory alone; no device is touched."""

import json
from pathlib import Path
from typing import Any

from trainer import config_file, metrics
from trainer.checkpoint import catalog
from trainer.config import Config
from trainer.errors import InputRefused
from trainer.rundir import RunDir, last_attempt


def describe(run_dir: RunDir) -> dict[str, Any]:
    """The run's name, progress and newest rows; its outcome and exit code are null while an attempt goes on."""
    config = saved_settings(run_dir)
    rows = metrics.read(run_dir.metrics) if run_dir.metrics.is_file() else []
    newest = {row["kind"]: row for row in rows}
    attempt = last_attempt(run_dir.path)
    verdict_file = run_dir.attempt_dir(attempt) / "verdict.json"
    verdict = read_verdict(verdict_file) if verdict_file.is_file() else {}
    return {
        "name": config.run.name,
        "step": newest["train"]["step"] if "train" in newest else 0,
        "num_steps": config.run.num_steps,
        "attempt": attempt,
        "outcome": verdict.get("outcome"),
        "exit_code": verdict.get("exit_code"),
        "message": verdict.get("message"),
        "train": newest.get("train"),
        "eval": newest.get("eval"),
        "checkpoint": saved.step if (saved := catalog.newest(config, run_dir)) else None,
    }


def saved_settings(run_dir: RunDir) -> Config:
    """The settings that the run wrote.

    Raises:
        InputRefused: they cannot be read.
    """
    return config_file.load_saved(run_dir.config)


def read_verdict(path: Path) -> dict[str, Any]:
    """The verdict in the file ``path``.

    Raises:
        InputRefused: it holds none.
    """
    try:
        verdict = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        verdict = None
    if not isinstance(verdict, dict):
        raise InputRefused(f"{path} is damaged: it is not a JSON object")
    return verdict
