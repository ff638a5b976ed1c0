"""Why a worker that could not say so itself has ended."""

import re
import signal
from pathlib import Path

TAIL_BYTES = 200_000


def log_tail(path: Path, num_bytes: int = TAIL_BYTES) -> str:
    """The end of a log, as text; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(text: str, count: int = 20) -> str:
    return "\n".join(text.splitlines()[-count:])


def explain_abort(log: str) -> str | None:
    """One line for the user if XLA refused XLA_FLAGS, which it does by ending the process; None otherwise.

    >>> explain_abort("F1 2 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_fo=1")
    'XLA_FLAGS: this version of XLA knows no flag --xla_fo=1; correct or remove it'
    """
    if match := re.search(r"Unknown flags? in XLA_FLAGS: (.+)", log):
        return f"XLA_FLAGS: this version of XLA knows no flag {match[1].strip()}; correct or remove it"
    if match := re.search(r"Couldn't interpret value (.*) for flag (\w+)", log):
        return f"XLA_FLAGS: --{match[2]} does not take the value {match[1]!r}"
    if match := re.search(r'Could not open file "(.*)" to read flags for environment variable "XLA_FLAGS"', log):
        return f"XLA_FLAGS = {match[1]!r} is neither a list of flags, each beginning with '--', nor a file that exists"
    return None


def describe_exit(returncode: int) -> str:
    """How a process ended that left no word, from ``Popen.returncode``.

    >>> describe_exit(-9)
    'was killed by SIGKILL (by hand, or by the kernel for want of memory)'
    """
    if returncode >= 0:
        return f"ended without a word, with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    reason = " (by hand, or by the kernel for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{reason}"
