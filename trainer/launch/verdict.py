"""How an attempt ended, and who caused it."""

import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.errors import ExitCode
from trainer.rundir import RunDir, write_json

DIED_WITH_US = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGUSR1)


@dataclass(frozen=True)
class Failure:
    """The end of one worker that was not asked to end.

    seconds:    when, on the host's monotonic clock.
    explained:  whether ``message`` tells the user everything.
    returncode: the process's, None if it reported the failure itself.
    """

    rank: int
    seconds: float
    exit_code: int
    message: str
    explained: bool
    returncode: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt. ``failure`` is its cause, None if it completed or was ended from outside."""

    exit_code: ExitCode
    message: str
    failure: Failure | None = None

    def as_json(self, attempt: int) -> dict[str, Any]:
        culprits = [self.failure.rank] if self.failure else []
        host = socket.gethostname()
        return {
            "outcome": self.exit_code.name.lower(),
            "exit_code": int(self.exit_code),
            "attempt": attempt,
            "culprits": [{"rank": rank, "host": host, "phase": None, "step": None} for rank in culprits],
            "message": self.message,
        }


def tell(message: str) -> None:
    """Prints ``message`` on stderr, every line of it marked as ours."""
    for line in message.splitlines():
        say(f"lockstep: {line}")


def say(text: str) -> None:
    """Prints ``text`` on stderr. That nobody reads it is no reason to fail."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def record(verdict: Verdict, run_dir: RunDir, attempt: int) -> None:
    """Writes verdict.json, of the attempt and of the run. A directory that is gone or full is no reason to fail."""
    for directory in (run_dir.attempt_dir(attempt), run_dir.path):
        with suppress(OSError):
            write_json(directory / "verdict.json", verdict.as_json(attempt))


def is_consequence(failure: Failure) -> bool:
    """Whether the failure is of a kind that the end of *another* worker brings about.

    A collective whose peer is gone raises in Python, and JAX aborts the process when its coordinator is gone. A refusal
    that names its reason, or death by any other signal, has its cause in the worker itself.
    """
    if failure.returncode is None:
        return failure.exit_code == ExitCode.PROGRAM_FAULT and not failure.explained
    return failure.returncode == -signal.SIGABRT and not failure.explained


def cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others followed from: the earliest that is no consequence, or else the earliest."""
    return min(failures, key=lambda failure: (is_consequence(failure), failure.seconds))


def judge(failures: Sequence[Failure], ended_by: tuple[str, float] | None) -> Verdict:
    """The verdict, from all failures seen and the signal (name and time) that the agent itself was sent, if any.

    What came first wins; but a scheduler signals all processes of a job at once, so a worker may die of it first.
    """
    if ended_by is not None:
        name, seconds = ended_by
        failures = [f for f in failures if f.seconds < seconds and f.returncode not in DIED_WITH_US]
        if not failures:
            return Verdict(ExitCode.DIED, f"ended by {name}")
    if not failures:
        return Verdict(ExitCode.COMPLETED, "completed")
    first = cause(failures)
    return Verdict(ExitCode(first.exit_code), first.message, first)
