"""How all ranks that were asked to end agree on one step, save it, and end in time: a pure function of marks and time.

All are told to hold. A rank that stands between two steps then enters no other; one that is in the midst of a step, and
had looked just before, may enter one more, and none can go further. So that many steps all can reach, and are told to.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trainer.resilience.policy import RankView
from trainer.resilience.progress import HOLD, RUN

HOLD_SECONDS = 0.1
"""From the command to hold until the marks are read: every rank that was about to enter a step has done so by then."""
SECOND_CTRL_C_SECONDS = 2.0
"""A second Ctrl-C counts this long after the first; schedulers and shells may send several at once."""


class Ask(NamedTuple):
    """A signal that asked the run to end: its name, when it came (monotonic), and whom it was sent to."""

    signal: str
    seconds: float
    to: str = "the agent"


class Plan(NamedTuple):
    """What the ranks have been told, since when; ``ends`` says why nothing is waited for any longer."""

    command: int = RUN
    since: float = 0.0
    ends: str = ""


def advance(plan: Plan, asks: Sequence[Ask], views: Sequence[RankView], now: float, grace_seconds: float) -> Plan:
    """The plan from now on."""
    if not asks or plan.ends:
        return plan
    if is_impatient(asks):
        return plan._replace(ends="a second Ctrl-C cut the save short")
    if now > asks[0].seconds + grace_seconds:
        return plan._replace(ends=f"the {grace_seconds:g} s of timeouts.grace_seconds ended before the save did")
    if plan.command == RUN:
        return Plan(HOLD, now)
    if plan.command == HOLD and now >= plan.since + HOLD_SECONDS:
        step = last_step(views)
        return plan._replace(ends="no step had been taken") if step is None else Plan(step, now)
    return plan


def last_step(views: Sequence[RankView]) -> int | None:
    """The step that no rank that holds goes beyond, and that all can reach; None if none has entered a step."""
    if all(view.marks.dispatched == view.marks.first for view in views):
        return None
    return max(_furthest(view) for view in views)


def is_impatient(asks: Sequence[Ask]) -> bool:
    """Whether somebody pressed Ctrl-C again, having waited a while."""
    first: dict[str, float] = {}
    for ask in asks:
        if ask.signal == "SIGINT" and ask.seconds >= first.setdefault(ask.to, ask.seconds) + SECOND_CTRL_C_SECONDS:
            return True
    return False


def _furthest(view: RankView) -> int:
    """The last step that this rank may enter if it is left holding."""
    marks = view.marks
    between_steps = marks.held or marks.phase in ("checkpoint", "eval", "shutdown")
    return marks.dispatched if between_steps and marks.dispatched > marks.first else marks.dispatched + 1
