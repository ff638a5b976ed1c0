"""Runs that are asked to end, in every phase and through any process: all save one step and end in time with code 75,
and what goes on afterwards is the unbroken run, bit for bit. Likewise after a kill, with restarts."""

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from scenario import Result, Run, is_alive, run

from trainer import metrics

PACE = '{kind="delay", rank=0, step=1, seconds=0.3}'
"""Makes the steps long enough for a signal to come between them."""
WAIT_FOR_IT = '{kind="sleep", rank=0, step=4, seconds=20.0}'
"""Lets a run that a signal should have ended by then wait for it, where the machine is slow to send it."""


def paced(*faults: str) -> list[str]:
    return [f"debug.faults=[{', '.join([PACE, *faults])}]"]


def digests(result: Result) -> list[tuple[int, str]]:
    return [(row["step"], row["param_digest"]) for row in metrics.read(result.path / "metrics.jsonl", "train")]


def unbroken(path: Path) -> Result:
    return run(path, 2)


def in_a_step(path: Path, targets=(1,), number=signal.SIGUSR1, processes=2) -> tuple[Result, Result]:
    """Signals while steps are taken; then goes on."""
    first = Run(path, processes, settings=paced(WAIT_FOR_IT))
    assert first.wait_for(first.recorded(step=1))
    first.signal(number, targets)
    stopped = first.finish(since=time.monotonic())
    return stopped, run(path, processes, ["--resume"])


def in_a_phase(path: Path, phase: str, targets=("agent",), number=signal.SIGTERM) -> Result:
    """Signals while rank 1 is in ``phase`` for a while, and again and again."""
    step = {"eval": 3, "checkpoint": 2}.get(phase, 1)
    sleep = f'{{kind="sleep", rank=1, phase="{phase}", step={step}, seconds=5.0}}'
    held = Run(path, 2, settings=paced(sleep))
    assert held.wait_for(held.logged("sleep in phase", rank=1))
    begin = time.monotonic()
    held.signal(number, targets)
    for again in (signal.SIGTERM, signal.SIGUSR1):
        if held.agent.poll() is None:
            held.signal(again, ["agent"])
    return held.finish(since=begin)


def cut_short(path: Path) -> Result:
    """Ctrl-C while a rank will never come back, and again 2 s later."""
    stuck = Run(path, 2, settings=paced('{kind="sleep", rank=1, phase="eval", step=3}'))
    assert stuck.wait_for(stuck.logged("sleep in phase", rank=1))
    assert stuck.wait_for((path / "checkpoints/2/manifest.json").exists)
    stuck.signal(signal.SIGINT, ["agent"])
    time.sleep(4.0)
    assert stuck.agent.poll() is None
    stuck.signal(signal.SIGINT, ["agent"])
    return stuck.finish(since=time.monotonic())


def out_of_grace(path: Path) -> Result:
    stuck = Run(path, 2, settings=[*paced('{kind="spin", rank=1, step=4}'), "timeouts.grace_seconds=2.0"])
    assert stuck.wait_for(stuck.logged("spin in phase", rank=1))
    stuck.signal(signal.SIGTERM, [1])  # it holds the interpreter lock
    return stuck.finish(since=time.monotonic())


def killed_at_random(path: Path, seed: int = 0) -> Result:
    """Kills a worker at a random moment of the run, start-up included."""
    draw = random.Random(seed)
    started = Run(path, 2, ["--max-restarts", "3"], settings=paced())
    assert started.wait_for(lambda: len(started.workers()) == 2)
    deadline = time.monotonic() + draw.uniform(0.0, 8.0)
    started.wait_for(lambda: time.monotonic() > deadline)
    if victims := [pid for pid in started.workers() if is_alive(pid)]:
        with suppress(ProcessLookupError):  # it may just have ended by itself
            os.kill(victims[draw.randrange(len(victims))], signal.SIGKILL)
    return started.finish()


def killed_at_a_step(path: Path) -> Result:
    return run(path, 2, ["--max-restarts", "1"], paced('{kind="kill", rank=1, step=4}'))


def killed_again_and_again(path: Path) -> Result:
    return run(path, 2, ["--max-restarts", "9"], paced('{kind="kill", rank=1, step=1, attempt=0}'))


SCENARIOS: dict[str, Callable[[Path], object]] = {
    "unbroken": unbroken,
    "in a step, to rank 1": in_a_step,
    "in a step, to rank 0": lambda path: in_a_step(path, targets=(0,), number=signal.SIGTERM),
    "in a step, to the agent": lambda path: in_a_step(path, targets=("agent",), number=signal.SIGINT),
    "in a step, to all": lambda path: in_a_step(path, targets=("agent", 0, 1), number=signal.SIGTERM),
    "in a step, of four": lambda path: in_a_step(path, targets=(2, 3), processes=4),
    **{
        f"in {phase}, to {name}": lambda path, phase=phase, targets=targets: in_a_phase(path, phase, targets)
        for phase in ("init", "compile", "data", "checkpoint", "eval", "shutdown")
        for name, targets in {"the agent": ("agent",), "rank 1": (1,), "all": ("agent", 0, 1)}.items()
    },
    "cut short": cut_short,
    "out of grace": out_of_grace,
    "killed at a step": killed_at_a_step,
    "killed again and again": killed_again_and_again,
    **{f"killed at random, {seed}": lambda path, seed=seed: killed_at_random(path, seed) for seed in range(20)},
}
DEFAULT = {
    "in a step, to rank 1",
    "in compile, to the agent",
    "in eval, to the agent",
    "cut short",
    "killed at random, 0",
}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """The results of the scenarios that were asked for, and of the unbroken run; three at a time."""
    path = tmp_path_factory.mktemp("runs")
    items = [item for item in request.session.items if "results" in item.fixturenames and item.path == request.path]
    chosen = ["unbroken", *(item.callspec.params["scenario"] for item in items)]
    with ThreadPoolExecutor(3) as pool:
        futures: dict[str, Future] = {
            name: pool.submit(SCENARIOS[name], path / name.replace(" ", "_").replace(",", "")) for name in chosen
        }
        yield futures
        for future in futures.values():
            future.cancel()


def named(start: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "scenario",
        [
            pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow)
            for name in SCENARIOS
            if name.startswith(start)
        ],
    )


def check_stopped(result: Result) -> None:
    """All ended early, in time and in order, with the newest step saved."""
    assert result.code == result.verdict["exit_code"] == 75, result.errors
    assert result.verdict["outcome"] == "preempted"
    assert result.verdict["culprits"] == []
    assert result.seconds < 30
    assert result.orphans() == []
    newest = max(result.checkpoints, default=None)
    assert (result.verdict["last_checkpoint"] or {"step": None})["step"] == newest


@named("in a step")
def test_all_save_the_same_step_and_the_rest_is_the_unbroken_run(results, scenario):
    stopped, resumed = results[scenario].result(timeout=600)
    check_stopped(stopped)
    step = stopped.checkpoints[-1]
    assert 2 <= step < 6
    assert f": saved step {step}" in stopped.verdict["message"]
    assert resumed.code == 0, resumed.errors
    whole = results["unbroken"].result(timeout=600)
    assert whole.code == 0, whole.errors
    assert len(digests(whole)) == 6
    if scenario != "in a step, of four":
        assert digests(resumed) == digests(whole)
    attempts = {row["step"]: row["attempt"] for row in metrics.read(resumed.path / "metrics.jsonl", "train")}
    assert attempts == {number: 1 if number <= step else 2 for number in range(1, 7)}


@named("in init")
def test_a_signal_before_the_first_step_ends_at_once(results, scenario):
    result = results[scenario].result(timeout=600)
    check_stopped(result)
    assert result.checkpoints == []
    assert "no step had been taken" in result.verdict["message"]


@named("in compile")
def test_a_signal_while_compiling_ends_at_once(results, scenario):
    test_a_signal_before_the_first_step_ends_at_once(results, scenario)


@named("in data")
def test_a_signal_while_a_batch_is_late_waits_for_it(results, scenario):
    result = results[scenario].result(timeout=600)
    check_stopped(result)
    assert max(result.checkpoints, default=0) in (0, 1, 2)  # the other rank may have entered the first step


@named("in checkpoint")
def test_a_signal_in_a_save_waits_for_it(results, scenario):
    result = results[scenario].result(timeout=600)
    check_stopped(result)
    assert result.checkpoints[-1] in (2, 3)


@named("in eval")
def test_a_signal_in_an_evaluation_waits_for_it(results, scenario):
    result = results[scenario].result(timeout=600)
    check_stopped(result)
    assert result.checkpoints[-1] in (3, 4)


@named("in shutdown")
def test_a_signal_after_the_work_is_done_changes_nothing(results, scenario):
    result = results[scenario].result(timeout=600)
    assert result.code == 0, result.errors
    assert result.checkpoints[-1] == 6


@named("cut short")
def test_a_second_ctrl_c_ends_at_once(results, scenario):
    result = results[scenario].result(timeout=600)
    check_stopped(result)
    assert "a second Ctrl-C cut the save short; the newest checkpoint is of step 2" in result.verdict["message"]


@named("out of grace")
def test_the_grace_period_bounds_the_save(results, scenario):
    result = results[scenario].result(timeout=600)
    check_stopped(result)
    assert "timeouts.grace_seconds ended before the save did" in result.verdict["message"]


@named("killed at")
def test_a_killed_worker_is_replaced_and_the_end_is_that_of_the_unbroken_run(results, scenario):
    result = results[scenario].result(timeout=600)
    assert result.code == 0, result.errors
    assert result.orphans() == []
    assert digests(result) == digests(results["unbroken"].result(timeout=600))
    killed = "was killed by SIGKILL" in result.errors
    assert ("(restart 1 of " in result.errors) == killed
    assert (result.verdict["attempt"] == 2) == killed
    assert killed or scenario != "killed at a step"


@named("killed again")
def test_a_run_without_progress_is_given_up(results, scenario):
    result = results[scenario].result(timeout=600)
    assert result.code == 6
    assert result.verdict["attempt"] == 3
    assert "3 attempts in a row left no newer checkpoint: not starting again" in result.verdict["message"]
