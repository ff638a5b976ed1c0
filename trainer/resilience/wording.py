"""What people are told about ranks: who, where, in which phase, since when."""

from collections.abc import Sequence

from trainer.resilience.policy import RankView, Stuck, at_step
from trainer.resilience.progress import Marks


def who(view: RankView) -> str:
    """A rank and its host."""
    return f"rank {view.rank} (host {view.host})"


def ranks(views: Sequence[RankView]) -> str:
    """Several ranks, without their hosts.

    >>> ranks([RankView(0, "a", Marks()), RankView(2, "b", Marks())]), ranks([RankView(1, "a", Marks())])
    ('ranks 0, 2', 'rank 1')
    """
    numbers = ", ".join(str(view.rank) for view in views)
    return f"rank{'s' if len(views) > 1 else ''} {numbers}"


def where(marks: Marks) -> str:
    """What a rank was in.

    >>> where(Marks("eval", dispatched=4)), where(Marks("step", dispatched=4))
    ('in the evaluation after step 4', 'in step 5')
    """
    step = at_step(marks)
    after = f" after step {step}" if step else ""
    return {
        "init": "during start-up",
        "compile": "while compiling the step",
        "data": f"while reading the batch of step {step}",
        "step": f"in step {step}",
        "checkpoint": f"in the save{after}" if step else "while reading the checkpoint",
        "eval": f"in the evaluation{after}",
        "shutdown": f"during shutdown{after}",
    }[marks.phase]


def stuck(found: Stuck) -> str:
    """The message of a run that had to be ended because it did not go on."""
    setting = f"timeouts.{found.phase}_seconds = {found.limit_seconds:g}"
    parts = [_culprits(found), *_waits(found)]
    if stopped := [view for view in found.culprits if view.stopped]:
        parts.append(f"{ranks(stopped)} had been stopped (SIGSTOP, state T)")
    return f"{'; '.join(parts)} ({setting})"


def _culprits(found: Stuck) -> str:
    culprit, *others = found.culprits
    marks = culprit.marks
    if others:
        names = ranks(found.culprits)
        return f"{names} all stood still {where(marks)} for {found.seconds:.0f} s: which is at fault cannot be told"
    name, step = who(culprit), at_step(marks)
    if marks.phase == "step" and not marks.awaited:
        return f"{name} never entered step {step}"
    if marks.phase == "step":
        return f"{name} never came to the end of step {step}"
    return f"{name} was stuck {where(marks)} for {found.seconds:.0f} s"


def _waits(found: Stuck) -> list[str]:
    """What those did that were not at fault, who did the same together."""
    groups: dict[str, list[RankView]] = {}
    for view in found.waiting:
        marks = view.marks
        place = "in the exchange" if marks.phase == "step" and marks.awaited else where(marks)
        groups.setdefault(place, []).append(view)
    now = found.seconds + max(view.marks.moved for view in found.culprits)
    return [
        f"{ranks(views)} waited {now - max(view.marks.moved for view in views):.0f} s {place}"
        for place, views in groups.items()
    ]
