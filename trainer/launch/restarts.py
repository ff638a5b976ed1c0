"""Whether the workers are started again after an attempt that failed: a pure function of what came of all attempts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from trainer.errors import ExitCode

MOST_WITHOUT_PROGRESS = 3
"""So many attempts in a row that left no newer checkpoint are enough."""


class Again(NamedTuple):
    """Whether to start again, and what to say about it; nothing to say if it was never to be."""

    go: bool
    why: str = ""


def decide(code: ExitCode, checkpoints: Sequence[int | None], max_restarts: int) -> Again:
    """Whether to start again after an attempt that ended with ``code``.

    checkpoints: the newest step that was saved, None for none: before the first attempt, and after each.

    >>> decide(ExitCode.DIED, [None, None, 4], max_restarts=2)
    Again(go=True, why='starting again from step 4 (restart 2 of 2)')
    """
    if code not in (ExitCode.STUCK, ExitCode.DIED) or max_restarts == 0:
        return Again(False)
    restart, newest = len(checkpoints) - 1, checkpoints[-1]
    if restart > max_restarts:
        return Again(False, f"--max-restarts {max_restarts} is used up")
    if num_without_progress(checkpoints) >= MOST_WITHOUT_PROGRESS:
        return Again(False, f"{MOST_WITHOUT_PROGRESS} attempts in a row left no newer checkpoint: not starting again")
    origin = "the beginning" if newest is None else f"step {newest}"
    return Again(True, f"starting again from {origin} (restart {restart} of {max_restarts})")


def num_without_progress(checkpoints: Sequence[int | None]) -> int:
    """How many of the last attempts left no checkpoint newer than was there before them.

    >>> num_without_progress([None, None, 2, 2, 2])
    2
    """
    count = 0
    for before, after in reversed(list(pairwise(checkpoints))):
        if after is not None and (before is None or after > before):
            break
        count += 1
    return count
