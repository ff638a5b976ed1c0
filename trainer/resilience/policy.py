"""Who is stuck: a pure function of the marks of all ranks and of the time.

Ranks wait for each other, so one that stands still need not be at fault. At fault is the rank that is furthest behind:
it has dispatched the fewest steps, or, of the same step, it is in the earliest phase. As long as that one is within its
phase's limit, those that wait for it are excused. Reading data waits for nobody, so there each rank answers for itself.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.config import PhaseName, Timeouts
from trainer.resilience.progress import PHASES, Marks

Limits = Mapping[PhaseName, float]


class RankView(NamedTuple):
    """What is known of one rank, wherever its host is, at one moment.

    marks:   its last marks; ``marks.moved`` on the same clock as the time that they are judged at.
    done:    whether it needs no watching any more: it has reported its end, or is gone.
    stopped: whether its process is stopped (state T).
    """

    rank: int
    host: str
    marks: Marks
    done: bool = False
    stopped: bool = False


class Stuck(NamedTuple):
    """A run that will not go on.

    culprits: the ranks that are furthest behind; several if it cannot be told which of them is at fault.
    waiting:  the others.
    seconds:  since the culprits' last mark.
    limit_seconds: what they were allowed.
    """

    culprits: tuple[RankView, ...]
    waiting: tuple[RankView, ...]
    seconds: float
    limit_seconds: float

    @property
    def phase(self) -> PhaseName:
        return self.culprits[0].marks.phase


def limits(timeouts: Timeouts) -> Limits:
    """How long each phase may take, in seconds.

    >>> limits(Timeouts(step_seconds=20.0))["step"]
    20.0
    """
    return {phase: getattr(timeouts, f"{phase}_seconds") for phase in PHASES}


def position(marks: Marks) -> tuple[int, int, int]:
    """How far a rank has come; a rank waits only for others that have come less far, or as far."""
    return marks.dispatched, PHASES.index(marks.phase), marks.ticks


def at_step(marks: Marks) -> int | None:
    """The step that a rank is busy with; None where there is none.

    >>> at_step(Marks("step", dispatched=4)), at_step(Marks("step", dispatched=6, awaited=5)), at_step(Marks("init"))
    (5, 5, None)
    """
    match marks.phase:
        case "init" | "compile":
            return None
        case "step":
            return marks.awaited or marks.dispatched + 1
        case "data":
            return marks.dispatched + 1
        case _:
            return marks.dispatched or None


def find_stuck(views: Sequence[RankView], allowed: Limits, now: float) -> Stuck | None:
    """The ranks for whose sake the run has to end, or None if all is well.

    now: on the clock of the marks, in seconds.
    """
    watched = [view for view in views if not view.done]
    if not watched:
        return None
    furthest_behind = min(position(view.marks) for view in watched)
    last = [view for view in watched if position(view.marks) == furthest_behind]
    alone = [[view] for view in watched if view.marks.phase == "data"]
    for culprits in (last, *alone):
        seconds = now - max(view.marks.moved for view in culprits)
        limit = allowed[culprits[0].marks.phase]
        if seconds > limit:
            waiting = tuple(view for view in watched if view not in culprits)
            return Stuck(tuple(culprits), waiting, seconds, limit)
    return None
