"""How an attempt ended, who caused it, and what to do about it."""

import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint import catalog
from trainer.checkpoint.manifest import is_local
from trainer.config import Config
from trainer.errors import ExitCode, InputRefused
from trainer.launch.signals import HEEDED
from trainer.resilience import wording
from trainer.resilience.policy import RankView, Stuck, at_step
from trainer.resilience.preemption import Ask
from trainer.rundir import RunDir, write_json

DIED_WITH_US = tuple(-number for number in HEEDED)
"""Return codes of workers that were sent the same signal as the agent, before they could heed it."""


@dataclass(frozen=True)
class Failure:
    """The end of one worker that was not asked to end.

    seconds:       when, on the host's monotonic clock.
    explained:     whether ``message`` tells the user everything.
    returncode:    the process's, None if it reported the failure itself.
    noticed_after: seconds until the agent knew; of a process that died, since it was last seen alive.
    """

    rank: int
    seconds: float
    exit_code: int
    message: str
    explained: bool
    returncode: int | None = None
    noticed_after: float | None = None


class Saved(NamedTuple):
    """A checkpoint that is complete."""

    step: int
    path: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt.

    culprits:             the ranks that caused it; none if it completed or was ended from outside.
    failure:              of the worker that caused it, if one ended by itself.
    last_checkpoint:      what the next attempt can go on from.
    seconds_to_detection: from the cause until the agent knew.
    advice:               what to do next.
    """

    exit_code: ExitCode
    message: str
    culprits: tuple[RankView, ...] = ()
    failure: Failure | None = None
    last_checkpoint: Saved | None = None
    seconds_to_detection: float | None = None
    advice: str = ""

    def as_json(self, attempt: int) -> dict[str, Any]:
        """What verdict.json holds."""
        return {
            "outcome": self.exit_code.name.lower(),
            "exit_code": int(self.exit_code),
            "attempt": attempt,
            "culprits": [
                {"rank": view.rank, "host": view.host, "phase": view.marks.phase, "step": at_step(view.marks)}
                for view in self.culprits
            ],
            "message": self.message,
            "last_checkpoint": self.last_checkpoint._asdict() if self.last_checkpoint else None,
            "seconds_to_detection": self.seconds_to_detection,
            "next": self.advice,
        }


def tell(message: str) -> None:
    """Prints ``message`` on stderr, every line of it marked as ours."""
    for line in message.splitlines():
        say(f"lockstep: {line}")


def say(text: str) -> None:
    """Prints ``text`` on stderr. That nobody reads it is no reason to fail."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def places(run_dir: RunDir, attempt: int) -> tuple[Path, Path]:
    """Where the verdict on the last attempt belongs: with that attempt, and with the run."""
    return run_dir.attempt_dir(attempt) / "verdict.json", run_dir.verdict


def record(verdict: Mapping[str, Any], paths: Iterable[Path]) -> None:
    """Writes a verdict in ``as_json``'s form to ``paths``. A directory that is gone or full is no reason to fail."""
    for path in paths:
        with suppress(OSError):
            write_json(path, verdict)


def newest_checkpoint(config: Config, run_dir: RunDir, marked: int = 0) -> Saved | None:
    """The run's newest complete checkpoint.

    An object store is not asked, for that may take long or need what an agent does not have: there it is the one of
    the step that a worker has ``marked``, None before any has.
    """
    directory = config.checkpoint.directory
    if not is_local(directory):
        return Saved(marked, f"{directory.rstrip('/')}/{marked}") if marked else None
    with suppress(OSError, InputRefused):
        if entry := catalog.newest(config, run_dir):
            return Saved(entry.step, str(entry.path))
    return None


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


def judge(views: Sequence[RankView], failures: Sequence[Failure], stuck: Stuck | None, ask: Ask | None) -> Verdict:
    """The verdict on an attempt that neither completed nor saved what it was asked to save.

    What came first wins. But a scheduler signals all processes of a job at once, so a worker may die of it first.

    failures: all that were seen.
    stuck:    why the agent ended the run, if that was it.
    ask:      the first signal that asked for an end, if any.
    """
    if ask is not None:
        failures = [f for f in failures if f.seconds < ask.seconds and f.returncode not in DIED_WITH_US]
        if not failures:
            return Verdict(ExitCode.PREEMPTED, f"ended by {ask.signal} to {ask.to}")
    if failures:
        first = cause(failures)
        culprit = tuple(view for view in views if view.rank == first.rank)
        code = ExitCode(first.exit_code)
        return Verdict(code, first.message, culprit, first, seconds_to_detection=first.noticed_after)
    if stuck is not None:
        return Verdict(ExitCode.STUCK, wording.stuck(stuck), stuck.culprits, seconds_to_detection=stuck.seconds)
    return Verdict(ExitCode.COMPLETED, "completed")


def advice(code: ExitCode, saved: Saved | None) -> str:
    """What to do after an attempt that ended with ``code``, with ``saved`` as its newest checkpoint."""
    # Also without a checkpoint: the directory may hold a run already.
    again = f"start it again with --resume{f': it goes on from step {saved.step}' if saved else ''}"
    match code:
        case ExitCode.COMPLETED:
            return "nothing"
        case ExitCode.PROGRAM_FAULT:
            return f"read the traceback in the culprit's log, mend the program, and {again}"
        case ExitCode.SETTINGS_REFUSED | ExitCode.INPUT_REFUSED:
            return "change what the message names, and start it again"
        case ExitCode.HALTED:
            return f"find out what the message names; then {again}"
        case ExitCode.STUCK:
            return f"read the stacks in the logs of the attempt, or raise the limit if it was only slow; then {again}"
        case _:
            return again
