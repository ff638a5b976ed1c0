"""How far a run has come, read from its directory alone; no device is touched."""

import json
from typing import Any

from trainer import config_file, metrics
from trainer.rundir import RunDir, last_attempt


def describe(run_dir: RunDir) -> dict[str, Any]:
    """The run's name, progress and newest rows; its outcome and exit code are null while an attempt goes on."""
    config = config_file.load(run_dir.config)
    rows = metrics.read(run_dir.metrics) if run_dir.metrics.is_file() else []
    newest = {row["kind"]: row for row in rows}
    attempt = last_attempt(run_dir.path)
    verdict_file = run_dir.attempt_dir(attempt) / "verdict.json"
    verdict = json.loads(verdict_file.read_text()) if verdict_file.is_file() else {}
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
    }
