"""Who is stuck, and where to stop: decided on made-up marks and an injected clock."""

import pytest

from trainer.config import Timeouts
from trainer.errors import ExitCode
from trainer.launch.restarts import decide
from trainer.resilience import wording
from trainer.resilience.policy import RankView, at_step, find_stuck, limits
from trainer.resilience.preemption import Ask, Plan, advance, last_step
from trainer.resilience.progress import HOLD, PHASES, RUN, Marks

LIMITS = limits(
    Timeouts(
        init_seconds=50.0,
        compile_seconds=40.0,
        step_seconds=20.0,
        data_seconds=15.0,
        eval_seconds=100.0,
        checkpoint_seconds=60.0,
        shutdown_seconds=10.0,
    )
)


def at(rank: int, phase: str, dispatched: int = 0, moved: float = 0.0, **more) -> RankView:
    """A rank on host h<rank>; ``more`` are fields of the marks or of the view."""
    of_view = {key: more.pop(key) for key in ("done", "stopped") if key in more}
    more = {"ticks": 1, **more}
    return RankView(rank, f"h{rank}", Marks(phase=phase, dispatched=dispatched, moved=moved, **more), **of_view)  # pyright: ignore[reportArgumentType]


WAITING = {"awaited": 5, "completed": 4}

STUCK = {  # name: (views, the time at which it is found, culprits, message)
    "one never enters a step": (
        [at(0, "step", 6, 1.0, **WAITING), at(1, "step", 4, 0.0, ticks=0), at(2, "step", 6, 1.0, **WAITING)],
        20.0,
        [1],
        "rank 1 (host h1) never entered step 5; ranks 0, 2 waited 19 s in the exchange (timeouts.step_seconds = 20)",
    ),
    "stopped": (
        [at(0, "step", 6, **WAITING), at(1, "step", 4, stopped=True)],
        20.0,
        [1],
        "rank 1 (host h1) never entered step 5; rank 0 waited 20 s in the exchange; rank 1 had been stopped (SIGSTOP, "
        "state T) (timeouts.step_seconds = 20)",
    ),
    "all wait in the same step": (
        [at(0, "step", 6, **WAITING), at(1, "step", 6, 3.0, **WAITING)],
        23.0,
        [0, 1],
        "ranks 0, 1 all stood still in step 5 for 20 s: which is at fault cannot be told (timeouts.step_seconds = 20)",
    ),
    "alone": (
        [at(0, "step", 6, **WAITING)],
        20.0,
        [0],
        "rank 0 (host h0) never came to the end of step 5 (timeouts.step_seconds = 20)",
    ),
    "others wait in the evaluation": (
        [at(0, "eval", 4, ticks=3), at(1, "eval", 4, ticks=0)],
        100.0,
        [1],
        "rank 1 (host h1) was stuck in the evaluation after step 4 for 100 s; rank 0 waited 100 s in the evaluation "
        "after step 4 (timeouts.eval_seconds = 100)",
    ),
    "one still compiles": (
        [at(0, "step", 2, 5.0, awaited=1), at(1, "compile")],
        40.0,
        [1],
        "rank 1 (host h1) was stuck while compiling the step for 40 s; rank 0 waited 35 s in the exchange "
        "(timeouts.compile_seconds = 40)",
    ),
    "one never joins": (
        [at(0, "init"), at(1, "init", ticks=0)],
        50.0,
        [1],
        "rank 1 (host h1) was stuck during start-up for 50 s; rank 0 waited 50 s during start-up "
        "(timeouts.init_seconds = 50)",
    ),
    "one saves for ever": (
        [at(0, "checkpoint", 4), at(1, "step", 6, **WAITING)],
        60.0,
        [0],
        "rank 0 (host h0) was stuck in the save after step 4 for 60 s; rank 1 waited 60 s in the exchange "
        "(timeouts.checkpoint_seconds = 60)",
    ),
    "one gets no data, though another is in a long phase": (
        [at(0, "eval", 4), at(1, "data", 5)],
        15.0,
        [1],
        "rank 1 (host h1) was stuck while reading the batch of step 6 for 15 s; rank 0 waited 15 s in the evaluation "
        "after step 4 (timeouts.data_seconds = 15)",
    ),
    "one does not leave": (
        [at(0, "shutdown", 8, done=True), at(1, "shutdown", 8)],
        10.0,
        [1],
        "rank 1 (host h1) was stuck during shutdown after step 8 for 10 s (timeouts.shutdown_seconds = 10)",
    ),
}


@pytest.mark.parametrize("name", STUCK)
def test_who_is_stuck_is_found_just_after_the_limit_and_named(name):
    views, time, culprits, message = STUCK[name]
    assert find_stuck(views, LIMITS, time - 0.01) is None
    assert find_stuck(views, LIMITS, time) is None
    found = find_stuck(views, LIMITS, time + 0.01)
    assert found is not None
    assert [view.rank for view in found.culprits] == culprits
    assert wording.stuck(found) == message


@pytest.mark.parametrize(
    "views",
    [
        [at(0, "eval", 4), at(1, "step", 6, **WAITING)],  # a job of rank 0 alone, longer than the step's limit
        [at(0, "compile"), at(1, "step", 2, awaited=1)],
        [at(0, "step", 4, 30.0), at(1, "step", 6, **WAITING)],  # late, but on its way
        [at(0, "step", 6, done=True)],
        [],
    ],
)
def test_who_waits_for_one_that_is_within_its_limit_is_excused(views):
    assert find_stuck(views, LIMITS, 39.0) is None


@pytest.mark.parametrize("phase", PHASES)
def test_every_limit_takes_effect(phase):
    allowed = limits(Timeouts.model_validate({f"{phase}_seconds": 0.5}))
    assert find_stuck([at(0, phase, 3)], allowed, 0.4) is None
    assert find_stuck([at(0, phase, 3)], allowed, 0.6) is not None


@pytest.mark.parametrize(("phase", "step"), [("init", None), ("data", 5), ("step", 5), ("eval", 4), ("shutdown", 4)])
def test_the_step_that_a_rank_is_busy_with(phase, step):
    assert at_step(at(0, phase, 4).marks) == step


TERM = Ask("SIGTERM", 10.0)
TRAINING = [at(0, "step", 5, first=3), at(1, "step", 6, first=3)]


def test_all_hold_and_then_run_on_to_the_largest_step_that_any_may_have_entered():
    plan = advance(Plan(), [], TRAINING, 5.0, 60.0)
    assert plan.command == RUN
    plan = advance(plan, [TERM], TRAINING, 10.0, 60.0)
    assert plan.command == HOLD
    assert advance(plan, [TERM], TRAINING, 10.05, 60.0).command == HOLD
    assert advance(plan, [TERM], TRAINING, 10.2, 60.0).command == 7
    held = [at(0, "step", 5, first=3), at(1, "step", 6, first=3, held=True)]
    plan = advance(plan, [TERM], held, 10.2, 60.0)
    assert plan == Plan(6, 10.2)
    again = [TERM, Ask("SIGTERM", 11.0), Ask("SIGUSR1", 30.0), Ask("SIGTERM", 31.0, "rank 1")]
    assert advance(plan, again, TRAINING, 40.0, 60.0) == plan


@pytest.mark.parametrize(
    ("views", "step"),
    [
        ([at(0, "init"), at(1, "compile")], None),
        ([at(0, "checkpoint"), at(1, "checkpoint")], None),  # reading it
        ([at(0, "step", 3, first=3), at(1, "compile", 3, first=3)], None),
        ([at(0, "step", 1), at(1, "compile", 0)], 2),
        ([at(0, "eval", 4), at(1, "eval", 4)], 4),  # they look before the next step
        ([at(0, "checkpoint", 4), at(1, "step", 4)], 5),
        ([at(0, "data", 4, held=True), at(1, "step", 4, held=True)], 4),
        ([at(0, "shutdown", 8), at(1, "shutdown", 8)], 8),
    ],
)
def test_the_step_to_stop_at_depends_on_where_they_are(views, step):
    assert last_step(views) == step


def test_the_end_comes_with_the_grace_period_or_when_there_is_nothing_to_save():
    plan = advance(Plan(HOLD, 10.0), [TERM], [at(0, "compile")], 10.2, 60.0)
    assert plan.ends == "no step had been taken"
    plan = advance(Plan(7, 10.2), [TERM], TRAINING, 70.1, 60.0)
    assert plan.ends == "the 60 s of timeouts.grace_seconds ended before the save did"


@pytest.mark.parametrize(
    ("later", "cut"),
    [
        ([Ask("SIGINT", 11.9)], False),
        ([Ask("SIGINT", 11.9), Ask("SIGINT", 12.1)], True),
        ([Ask("SIGINT", 12.1, "rank 0")], False),
        ([Ask("SIGTERM", 12.1)], False),
    ],
)
def test_only_a_second_ctrl_c_ends_at_once(later, cut):
    plan = advance(Plan(7, 10.2), [Ask("SIGINT", 10.0), *later], TRAINING, 13.0, 60.0)
    assert bool(plan.ends) == cut


@pytest.mark.parametrize(
    ("code", "checkpoints", "max_restarts", "go"),
    [
        (ExitCode.DIED, [None, None], 1, True),
        (ExitCode.STUCK, [None, 2], 1, True),
        (ExitCode.STUCK, [None, 2], 0, False),
        (ExitCode.STUCK, [None, 2, 4], 1, False),
        (ExitCode.PROGRAM_FAULT, [None, 2], 1, False),
        (ExitCode.PREEMPTED, [None, 2], 1, False),
        (ExitCode.COMPLETED, [None, 2], 1, False),
        (ExitCode.DIED, [None, None, None], 9, True),
        (ExitCode.DIED, [None, None, None, None], 9, False),
        (ExitCode.DIED, [2, 2, 2, 2], 9, False),
        (ExitCode.DIED, [2, 2, 2, 4, 4, 4], 9, True),
    ],
)
def test_restarts_go_on_as_long_as_there_is_progress(code, checkpoints, max_restarts, go):
    assert decide(code, checkpoints, max_restarts).go == go
