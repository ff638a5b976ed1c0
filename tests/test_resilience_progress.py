"""Marks in shared memory, and failures that are staged as a phase begins."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer.config import Fault
from trainer.resilience import faults
from trainer.resilience.progress import HOLD, Block, Marks, Progress


@pytest.fixture
def block():
    with Block() as block:
        yield block


@pytest.fixture
def worker(block):
    return Progress(os.dup(block.fd))


def test_the_agent_sees_what_the_worker_is_busy_with(block, worker):
    assert block.marks()._replace(moved=0) == Marks()
    worker.starts_at(3)
    seen = []
    program = worker.dispatching(lambda state: seen.append(block.marks()) or state + 1)
    batches = worker.reading(iter("ab"))
    assert [next(batches), program(1), next(batches), program(2)] == ["a", 2, "b", 3]
    assert list(batches) == []
    assert [(m.phase, m.dispatched, m.awaited, m.completed) for m in seen] == [("step", 4, 4, 3), ("step", 5, 5, 3)]
    with worker.awaiting(4):
        assert (block.marks().awaited, block.marks().completed) == (4, 3)
    marks = block.marks()
    assert (marks.first, marks.dispatched, marks.awaited, marks.completed) == (3, 5, 0, 4)


def test_a_phase_ends_with_its_block_but_an_exception_leaves_it(block, worker):
    worker.enter("compile")
    with worker.phase("eval"):
        worker.tick()
        assert (block.marks().phase, block.marks().ticks) == ("eval", 2)
    assert (block.marks().phase, block.marks().ticks) == ("compile", 1)
    with pytest.raises(KeyError), worker.phase("checkpoint"):
        raise KeyError
    assert block.marks().phase == "checkpoint"


def test_every_mark_moves_the_time(block, worker):
    before = time.monotonic()
    assert before - 5 < block.marks().moved <= before
    worker.tick()
    assert before < block.marks().moved <= time.monotonic()


def test_a_worker_holds_until_it_is_told_where_to_stop(block, worker):
    assert not worker.must_stop(1)
    block.command(HOLD)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(worker.must_stop(2)))
    thread.start()
    deadline = time.monotonic() + 60
    while not block.marks().held and time.monotonic() < deadline:
        time.sleep(0.001)
    assert block.marks().held
    block.command(3)
    thread.join(60)
    assert answers == [False]
    assert not block.marks().held
    assert worker.must_stop(3)


def test_the_memory_has_no_name_and_is_given_back(block):
    fd = block.fd
    block.close()
    block.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def strikes(worker, *settings: dict) -> list[str]:
    """The phases and steps in which faults strike rank 1 in attempt 1 of a small run."""
    hit = []
    planned = [Fault.model_validate({"rank": 1, **fault}) for fault in settings]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "strike", lambda fault: hit.append(f"{fault.kind} {now}"))
        worker.on_enter = faults.striker(planned, 1, 1)
        for now in ("init", "compile"):
            worker.enter(now)
        program = worker.dispatching(lambda: None)
        batches = worker.reading(iter(range(9)))
        for step in range(1, 5):
            now = f"data {step}"
            next(batches)
            now = f"step {step}"
            program()
            if step == 4:
                for phase in ("checkpoint", "eval"):
                    now = f"{phase} {step}"
                    with worker.phase(phase):
                        pass
        now = "shutdown"
        worker.enter("shutdown")
    return hit


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        ({"kind": "kill", "phase": "init"}, ["kill init"]),
        ({"kind": "kill", "phase": "compile"}, ["kill compile"]),
        ({"kind": "raise", "step": 3}, ["raise step 3"]),
        ({"kind": "stop", "step": 3, "phase": "data"}, ["stop data 3"]),
        ({"kind": "sleep", "step": 2, "phase": "eval"}, ["sleep eval 4"]),
        ({"kind": "spin", "phase": "checkpoint"}, ["spin checkpoint 4"]),
        ({"kind": "kill", "phase": "shutdown"}, ["kill shutdown"]),
        ({"kind": "delay", "step": 3, "seconds": 1.0}, ["delay step 3", "delay step 4"]),
        ({"kind": "kill", "step": 3, "attempt": 2}, []),
        ({"kind": "kill", "step": 3, "attempt": 0}, ["kill step 3"]),
        ({"kind": "kill", "step": 3, "rank": 0}, []),
        ({"kind": "nan", "step": 3}, []),
    ],
)
def test_a_fault_strikes_where_and_when_it_is_meant_to(worker, fault, when):
    assert strikes(worker, fault) == when


def test_a_nan_spoils_so_many_steps():
    fault = Fault(kind="nan", rank=1, step=3, num_steps=2)
    assert [step for step in range(1, 8) if faults.spoils([fault], 1, 1, step)] == [3, 4]
    assert not faults.spoils([fault], 0, 1, 3)
    assert not faults.spoils([fault], 1, 2, 3)


@pytest.mark.parametrize("kind", ["kill", "stop", "raise", "sleep", "spin"])
def test_what_a_fault_does_to_its_process(kind):
    """Only a process that can still run Python lets its second thread write."""
    code = (
        "import faulthandler, signal, sys, threading, time\n"
        "from trainer.config import Fault\n"
        "from trainer.resilience import faults\n"
        "faulthandler.register(signal.SIGUSR2, all_threads=True)\n"
        "go = threading.Event()\n"
        "def beat():\n"
        "    go.wait()\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        "        print('beat', flush=True)\n"
        "threading.Thread(target=beat, daemon=True).start()\n"
        "go.set()\n"
        f"faults.strike(Fault(kind='{kind}', rank=0))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"debug.faults: {kind} in phase step now\n"
        if kind == "kill":
            assert process.wait(60) == -signal.SIGKILL
        elif kind == "raise":
            assert process.wait(60) == 1
            assert process.stderr is not None
            assert "StagedError" in process.stderr.read()
        elif kind == "sleep":
            assert process.stdout.readline() == "beat\n"
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGUSR2)
            process.send_signal(signal.SIGCONT)
            assert process.stderr is not None
            assert "most recent call first" in process.stderr.readline()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"kind": "nan", "phase": "eval"}, "phase: a nan is in a contribution"),
        ({"kind": "kill", "num_steps": 2}, "num_steps: kill would ignore it"),
        ({"kind": "kill", "seconds": 2.0}, "seconds: kill would ignore it"),
        ({"kind": "delay"}, "seconds: a delay needs how many"),
        ({"kind": "kill", "phase": "init", "step": 2}, 'step: the phase "init" would ignore it'),
    ],
)
def test_a_fault_ignores_nothing_that_is_set(fault, problem):
    with pytest.raises(ValueError, match=problem):
        Fault.model_validate({"rank": 0, **fault})
