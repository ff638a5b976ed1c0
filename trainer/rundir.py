"""The run directory: where everything that a run leaves behind is found, and when it may be written.

    config.toml  run_id  metrics.jsonl  checkpoints/  attempts/K/logs/rank-N.log  attempts/K/verdict.json  verdict.json

Needs no JAX, so that the agent and ``lockstep status`` start at once.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import InputRefused, SettingsRefused

OUR_FILES = ("config.toml", "metrics.jsonl", "verdict.json", "findings.json", "trace.json", "report.html", "run_id")
OUR_DIRECTORIES = ("checkpoints", "attempts")
LOCK = ".lock"
REPLACED = ".replaced"
"""Where the run that ``--overwrite`` replaces waits until nothing can be refused any more."""
REMOVED = ".removed"
"""What is being deleted."""
BEFORE_THE_FIRST_STEP = frozenset({"attempts", "verdict.json", "run_id", "checkpoints", LOCK, REPLACED, REMOVED})
"""What an attempt leaves that was refused before it had written its settings; that is no run yet, if the last of them
is empty."""

_HELD: list[int] = []
"""File descriptors of the locks that this process holds until it ends."""


@dataclass(frozen=True)
class RunDir:
    """The paths of one run. Making one touches nothing on the disk; ``open`` does."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def last_config(self) -> Path:
        """``config``; where an attempt that was to replace the run was killed, that of the run which will be back."""
        replaced = self.path / REPLACED / "config.toml"
        return replaced if not self.config.is_file() and replaced.is_file() else self.config

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def id(self) -> str:
        """What ties checkpoints to this run wherever they lie: random letters and digits, "" before the first start."""
        try:
            return (self.path / "run_id").read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""

    def write_id(self, run_id: str) -> None:
        """Writes the run's ``id``, whole or not at all."""
        write_text(self.path / "run_id", run_id + "\n")

    def attempt_dir(self, attempt: int) -> Path:
        return self.path / "attempts" / str(attempt)

    def log(self, attempt: int, rank: int) -> Path:
        return self.attempt_dir(attempt) / "logs" / f"rank-{rank}.log"

    def write_config(self, text: str) -> None:
        """Writes the resolved settings, whole or not at all. A run that this one replaces is deleted with that."""
        write_text(self.config, text)
        replaced, removed = self.path / REPLACED, self.path / REMOVED
        if real_directory(replaced):
            os.replace(replaced, removed)  # at once, for half a run must not be put back
            shutil.rmtree(removed, ignore_errors=True)

    def restore_replaced(self, attempt: int) -> int:
        """Puts back the run that ``attempt`` was to replace, if it did not come that far; else does nothing.

        Returns the number of the attempt from now on: it comes after those of the run that is back.
        """
        replaced = self.path / REPLACED
        if not real_directory(replaced):
            return attempt
        if real_directory(replaced / "attempts") and real_directory(self.path / "attempts"):
            for number in range(1, last_attempt(self.path) + 1):
                if (self.path / "attempts" / str(number)).is_dir():
                    attempt = last_attempt(replaced) + 1
                    os.replace(self.path / "attempts" / str(number), replaced / "attempts" / str(attempt))
        for entry in list(replaced.iterdir()):
            remove(self.path / entry.name)
            os.replace(entry, self.path / entry.name)
        replaced.rmdir()
        return attempt

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
        """``claim`` and ``begin_attempt`` in one: the run directory, and the attempt's number (1, 2, …)."""
        run_dir = cls.claim(path, resume, overwrite)
        return run_dir, run_dir.begin_attempt(overwrite)

    @classmethod
    def claim(cls, path: Path, resume: bool = False, overwrite: bool = False) -> "RunDir":
        """The run directory ``path``, made if need be, and this process's alone until it ends.

        resume:    go on with the run in ``path`` if there is one, and start otherwise.
        overwrite: a run in ``path`` may be replaced.

        Raises:
            SettingsRefused: resume and overwrite together.
            InputRefused:    ``path`` holds a run and neither was asked for, or holds something else, or is in use, or
                             cannot be written.
        """
        if resume and overwrite:
            raise SettingsRefused("--resume and --overwrite exclude each other: go on with the run, or remove it?")
        run_dir = cls(Path(path))
        try:
            run_dir.path.mkdir(parents=True, exist_ok=True)
            refuse_foreign(run_dir.path, resume, overwrite)
            hold(run_dir.path)
            refuse_foreign(run_dir.path, resume, overwrite)  # another may have begun before it was held
            run_dir.restore_replaced(0)
        except OSError as error:
            raise unwritable(path, error) from error
        return run_dir

    def begin_attempt(self, overwrite: bool = False) -> int:
        """Makes the next attempt's directory, and returns its number.

        overwrite: set the run that is here aside. ``write_config`` deletes it, ``restore_replaced`` puts it back. Only
                   what a run writes is taken, and links are not followed.
        """
        try:
            if overwrite:
                set_aside(self.path)
            attempt = last_attempt(self.path) + 1
            self.log(attempt, 0).parent.mkdir(parents=True)
            self.verdict.unlink(missing_ok=True)  # it was the last attempt's
        except OSError as error:
            raise unwritable(self.path, error) from error
        return attempt


def default_run_dir(name: str) -> Path:
    """Where a run goes that was given no directory."""
    return Path("runs") / name


def unwritable(path: Path, error: OSError) -> InputRefused:
    return InputRefused(f"run directory {path} cannot be written ({error.strerror}): choose another with --run-dir")


def hold(path: Path) -> None:
    """Locks the run directory ``path`` for this process until it ends, however it ends.

    Where the file system knows no locks, nothing is held.

    Raises:
        InputRefused: another process holds it.
    """
    lock = path / LOCK
    if lock.exists() and any(os.path.samestat(lock.stat(), os.fstat(fd)) for fd in _HELD):
        return
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 20).decode(errors="replace").strip()
        os.close(fd)
        raise InputRefused(f"{path} is in use by process {holder or 'unknown'}: wait for its end, or end it") from None
    except OSError:
        os.close(fd)
        return
    _HELD.append(fd)
    with suppress(OSError):  # who holds it is only told
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def refuse_foreign(path: Path, resume: bool, overwrite: bool) -> None:
    """Refuses a directory that holds a run unless one of the two is set, and always one that holds something else."""
    replaced = path / REPLACED
    aside = {entry.name for entry in replaced.iterdir()} if real_directory(replaced) else set()
    names = {entry.name for entry in path.iterdir()} | aside  # an attempt that was killed has not put it back
    if names <= BEFORE_THE_FIRST_STEP and not any([*path.glob("checkpoints/*"), *replaced.glob("checkpoints/*")]):
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
    return "config.toml" in names and (
        not thoroughly or real_directory(path / "attempts") or real_directory(path / REPLACED / "attempts")
    )


def set_aside(path: Path) -> None:
    """Moves what a run writes from ``path`` to ``path``/.replaced, and nothing else. Of a link only the link goes."""
    remove(path / REMOVED)
    (path / REPLACED).mkdir()
    for name in (*OUR_FILES, *OUR_DIRECTORIES):
        with suppress(FileNotFoundError):
            os.replace(path / name, path / REPLACED / name)


def remove(path: Path) -> None:
    """Removes a file, a link (not what it points to) or a directory, if there is one."""
    if real_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
