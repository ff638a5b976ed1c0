"""Signals that ask a run for an early end, heeded from the first moment on, while the program still imports the rest.

The first of our modules that the command line loads, so it loads next to nothing itself.
"""

import os
import signal
import time
from types import FrameType
from typing import Any

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for an early end, of the agent or of a worker."""
PREEMPTED = 75
"""``errors.ExitCode.PREEMPTED``; a test holds the two together."""

_NOTED: list[tuple[int, float]] = []


def heed(handler: Any) -> dict[int, Any]:
    """Has ``handler`` called for each signal of HEEDED, and returns what was before.

    One that is ignored, as under nohup, stays ignored. Only a main thread can.
    """
    heeded = [number for number in HEEDED if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def leave(number: int, frame: FrameType | None) -> None:
    """A handler that ends the program: no run has begun, so there is nothing to save."""
    try:
        os.write(2, f"lockstep: ended by {signal.Signals(number).name} before the run began\n".encode())
    finally:  # also where nobody reads it
        os._exit(PREEMPTED)


def note(number: int, frame: FrameType | None) -> None:
    """A handler that keeps the signal for the agent, which is about to start."""
    _NOTED.append((number, time.monotonic()))


def begin() -> None:
    """To be called before a run leaves its first trace: from here on a signal is the agent's to answer."""
    for number in HEEDED:
        if signal.getsignal(number) is leave:
            signal.signal(number, note)


def taken() -> list[tuple[int, float]]:
    """The signals noted so far, each with its time (monotonic seconds); the next call returns later ones only."""
    noted = _NOTED[:]
    del _NOTED[: len(noted)]
    return noted


def give_back() -> None:
    """Gives the signals back to Python, for a run without an agent; ends the program if one has come by now."""
    for number in HEEDED:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(number) in (leave, note, signal.SIG_DFL):
            signal.signal(number, default)
    for number, _ in taken():
        leave(number, None)


def ignore_from_now_on() -> None:
    """The outcome stands: no signal that comes while the program leaves changes its exit code any more."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
