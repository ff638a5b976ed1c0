"""Exit codes, and the exceptions that carry them.

An exception here is for the *user's* benefit: its message is one line that says what was given, what is allowed and
what to change, and it is printed without a traceback. Anything else that escapes is a fault of the program (code 1).
"""

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """What a run's exit code means; ``worth_retrying`` says whether a scheduler should start it again."""

    COMPLETED = 0
    PROGRAM_FAULT = 1
    SETTINGS_REFUSED = 2
    INPUT_REFUSED = 3
    HALTED = 4
    STUCK = 5
    DIED = 6
    CHECK_FAILED = 7
    PREEMPTED = 75

    @property
    def worth_retrying(self) -> bool:
        return self in (ExitCode.STUCK, ExitCode.DIED, ExitCode.PREEMPTED)


class LockstepError(Exception):
    """A refusal or a verdict that is explained in one line; ``exit_code`` is the code the run ends with."""

    exit_code = ExitCode.PROGRAM_FAULT


class SettingsRefused(LockstepError, ValueError):
    """Settings or command line that cannot be accepted (code 2)."""

    exit_code = ExitCode.SETTINGS_REFUSED


class InputRefused(LockstepError, ValueError):
    """Data, a checkpoint or a run directory that cannot be used (code 3)."""

    exit_code = ExitCode.INPUT_REFUSED


class Halted(LockstepError):
    """The numbers cannot be trusted any more: non-finite, or replicas that differ (code 4)."""

    exit_code = ExitCode.HALTED


class Preempted(LockstepError):
    """The run was asked to end early, and has saved where it stands (code 75)."""

    exit_code = ExitCode.PREEMPTED


def no_such(setting: str, path: str, kind: str = "file") -> InputRefused:
    """The refusal of a path that a setting gives and that is not there; it tells where was looked."""
    looked_for = Path(path).expanduser()
    where = ""
    if not looked_for.is_absolute():
        where = f"; a relative path counts from the current directory, so {Path.cwd() / looked_for} was looked for"
    return InputRefused(f"{setting} = {path!r}: there is no such {kind}{where}")
