"""The run directory: where everything that a run leaves behind is found, and when it may be written.

    config.toml  metrics.jsonl  checkpoints/  attempts/K/logs/rank-N.log  attempts/K/verdict.json  verdict.json

Needs no JAX, so that the agent and ``lockstep status`` start at once.
"""

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import InputRefused, SettingsRefused

OUR_FILES = ("config.toml", "metrics.jsonl", "verdict.json", "findings.json", "trace.json", "report.html")
OUR_DIRECTORIES = ("checkpoints", "attempts")
BEFORE_THE_FIRST_STEP = frozenset({"attempts", "verdict.json", "checkpoints"})
"""What an attempt leaves that was refused before it had written its settings; that is no run yet, if the last of them
is empty."""


@dataclass(frozen=True)
class RunDir:
    """The paths of one run. Making one touches nothing on the disk; ``open`` does."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    def attempt_dir(self, attempt: int) -> Path:
        return self.path / "attempts" / str(attempt)

    def log(self, attempt: int, rank: int) -> Path:
        return self.attempt_dir(attempt) / "logs" / f"rank-{rank}.log"

    def write_config(self, text: str) -> None:
        """Writes the resolved settings, whole or not at all."""
        write_text(self.config, text)

    @classmethod
    def existing(cls, path: Path) -> "RunDir":
        """The run that ``path`` holds.

        Raises:
            InputRefused: it holds none.
        """
        run_dir = cls(Path(path))
        if not run_dir.config.is_file():
            raise InputRefused(f"{path} is not a run directory: it has no config.toml")
        return run_dir

    @classmethod
    def open(cls, path: Path, resume: bool = False, overwrite: bool = False) -> tuple["RunDir", int]:
        """Makes ``path`` ready for an attempt, and returns it with the attempt's number (1, 2, …).

        resume:    go on with the run in ``path`` if there is one, and start otherwise.
        overwrite: remove the run in ``path`` first; only what a run writes is removed, and links are not followed.

        Raises:
            SettingsRefused: resume and overwrite together.
            InputRefused:    ``path`` holds a run and neither was asked for, or holds something else, or cannot be
                             written.
        """
        if resume and overwrite:
            raise SettingsRefused("--resume and --overwrite exclude each other: go on with the run, or remove it?")
        run_dir = cls(Path(path))
        try:
            run_dir.path.mkdir(parents=True, exist_ok=True)
            refuse_foreign(run_dir.path, resume, overwrite)
            if overwrite:
                remove_run(run_dir.path)
            attempt = last_attempt(run_dir.path) + 1
            run_dir.log(attempt, 0).parent.mkdir(parents=True)
        except OSError as error:
            raise InputRefused(
                f"run directory {path} cannot be written ({error.strerror}): choose another with --run-dir"
            ) from error
        return run_dir, attempt


def default_run_dir(name: str) -> Path:
    """Where a run goes that was given no directory."""
    return Path("runs") / name


def refuse_foreign(path: Path, resume: bool, overwrite: bool) -> None:
    """Refuses a directory that holds a run unless one of the two is set, and always one that holds something else."""
    names = {entry.name for entry in path.iterdir()}
    if names <= BEFORE_THE_FIRST_STEP and not any(path.glob("checkpoints/*")):
        return
    if not is_run(path, names, thoroughly=overwrite):
        raise InputRefused(f"{path} is not empty and is not a run directory: choose another with --run-dir")
    if not (resume or overwrite):
        raise InputRefused(
            f"{path} holds a run already: --resume goes on with it, --overwrite removes it, "
            "--run-dir or run.name puts the new one elsewhere"
        )


def is_run(path: Path, names: Collection[str], thoroughly: bool) -> bool:
    """Whether the directory is a run's. ``config.toml`` is a common name, so deleting asks for ``attempts`` too."""
    return "config.toml" in names and (not thoroughly or real_directory(path / "attempts"))


def remove_run(path: Path) -> None:
    """Removes what a run writes from ``path``, and nothing else. Of a link only the link itself goes."""
    for name in OUR_FILES:
        (path / name).unlink(missing_ok=True)
    for name in OUR_DIRECTORIES:
        target = path / name
        if real_directory(target):
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def real_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def last_attempt(path: Path) -> int:
    """The number of the newest attempt in the run directory ``path``; 0 if there is none."""
    attempts = path / "attempts"
    if not attempts.is_dir():
        return 0
    return max((int(entry.name) for entry in attempts.iterdir() if entry.name.isdecimal()), default=0)


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` at once: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, obj: Any) -> None:
    """Replaces ``path`` by ``obj`` as strict JSON, at once.

    Raises:
        ValueError: ``obj`` holds a NaN or an infinity, which JSON does not know.
    """
    write_text(path, json.dumps(obj, indent=2, allow_nan=False) + "\n")
