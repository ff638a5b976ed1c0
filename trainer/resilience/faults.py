"""Failures that are staged on purpose (``debug.faults``), so that anyone can prove on their own cluster what is caught.

Each strikes as its phase begins: before the step is dispatched, before the batch is read, before anything is saved.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from trainer.config import Fault, PhaseName

ONCE = ("init", "compile", "shutdown")
"""Phases that have no step."""


class StagedError(RuntimeError):
    """The exception of the kind ``raise``."""


def of(faults: Sequence[Fault], rank: int, attempt: int) -> tuple[Fault, ...]:
    """Those of ``faults`` that are meant for this rank in this attempt."""
    return tuple(fault for fault in faults if fault.rank == rank and fault.attempt in (0, attempt))


def striker(faults: Sequence[Fault], rank: int, attempt: int) -> Callable[[PhaseName, int], None]:
    """What ``Progress.on_enter`` calls so that ``faults`` strike: each once, a delay each time, nan elsewhere."""
    waiting = [fault for fault in of(faults, rank, attempt) if fault.kind != "nan"]

    def on_enter(phase: PhaseName, step: int) -> None:
        for fault in [fault for fault in waiting if fault.phase == phase]:
            if step >= fault.step or phase in ONCE:
                if fault.kind != "delay":
                    waiting.remove(fault)
                strike(fault)

    return on_enter


def spoils(faults: Sequence[Fault], rank: int, attempt: int, step: int) -> bool:
    """Whether a nan is to be in this rank's contribution to ``step``."""
    return any(
        fault.kind == "nan" and fault.step <= step < fault.step + fault.num_steps for fault in of(faults, rank, attempt)
    )


def strike(fault: Fault) -> None:
    """Does to this process what ``fault`` says."""
    print(f"debug.faults: {fault.kind} in phase {fault.phase} now", flush=True)
    _STRIKES[fault.kind](fault)


def _raise(fault: Fault) -> None:
    raise StagedError(f"staged by debug.faults in phase {fault.phase}")


def _sleep(fault: Fault) -> None:
    time.sleep(fault.seconds)
    while not fault.seconds:
        time.sleep(3600)


def _spin(fault: Fault) -> None:
    deque(repeat(None), maxlen=0)  # never ends, never leaves C, and never lets go of the interpreter lock


_STRIKES: dict[str, Callable[[Fault], Any]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "sleep": _sleep,
    "spin": _spin,
    "delay": lambda fault: time.sleep(fault.seconds),
}
