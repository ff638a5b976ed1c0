"""Every failure, in every phase, over real processes: all end in time, the right one is blamed, and nothing remains."""

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest
from scenario import Result, Run, run

LIMIT_SECONDS = {"init": 20.0}
OTHER_LIMIT_SECONDS = 6.0
CODES = {"kill": 6, "raise": 1, "stop": 5, "sleep": 5, "spin": 5}
STEPS = {"init": None, "compile": None, "data": 3, "step": 3, "eval": 3, "checkpoint": 4, "shutdown": 6}
CHECKPOINTS = {"init": [], "compile": [], "shutdown": [2, 4, 6]}


class Cell(NamedTuple):
    """A failure of rank 1 in a run over so many processes."""

    kind: str
    phase: str
    processes: int = 2

    @property
    def limit_seconds(self) -> float:
        return LIMIT_SECONDS.get(self.phase, OTHER_LIMIT_SECONDS)

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    def run(self, path) -> Result:
        """Runs it; the result's seconds count from the failure."""
        step = STEPS[self.phase] if self.phase not in ("init", "compile", "shutdown") else 1
        fault = f'debug.faults=[{{kind="{self.kind}", rank=1, step={step}, phase="{self.phase}"}}]'
        limit = f"timeouts.{self.phase}_seconds={self.limit_seconds}"
        run = Run(path / self.name, self.processes, settings=[fault, limit])
        run.wait_for(run.logged("debug.faults: ", rank=1))
        return run.finish(since=time.monotonic())


DEFAULT = [
    *(Cell("sleep", "init"), Cell("kill", "init"), Cell("raise", "compile"), Cell("spin", "compile")),
    *(Cell("sleep", "step"), Cell("stop", "step"), Cell("spin", "eval"), Cell("kill", "eval")),
    *(Cell("stop", "checkpoint"), Cell("raise", "checkpoint"), Cell("sleep", "shutdown"), Cell("kill", "shutdown")),
]
"""Every fault and every phase."""
ALL = [
    Cell(kind, phase, processes)
    for processes, kind, phase in itertools.product(
        (2, 4), CODES, ("init", "compile", "data", "step", "checkpoint", "eval", "shutdown")
    )
]
CELLS = [
    pytest.param(cell, id=cell.name, marks=[] if cell in DEFAULT else pytest.mark.slow)
    for cell in sorted(ALL, key=lambda cell: (cell.phase != "init", cell.processes))
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """The results of the cells that were asked for; three at a time, for most only wait."""
    path = tmp_path_factory.mktemp("cells")
    items = [item for item in request.session.items if "results" in item.fixturenames and item.path == request.path]
    chosen = [item.callspec.params["cell"] for item in items]
    with ThreadPoolExecutor(3) as pool:
        futures: dict[Cell, Future[Result]] = {cell: pool.submit(cell.run, path) for cell in chosen}
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.mark.parametrize("cell", CELLS)
def test_a_failure_ends_all_in_time_and_blames_the_right_rank(results, cell):
    result = results[cell].result(timeout=600)
    verdict = result.verdict
    assert result.code == verdict["exit_code"] == CODES[cell.kind], result.errors
    assert result.seconds < (cell.limit_seconds if CODES[cell.kind] == 5 else 0) + 10
    (culprit,) = verdict["culprits"]
    assert (culprit["rank"], culprit["phase"], culprit["step"]) == (1, cell.phase, STEPS[cell.phase]), result.errors
    assert verdict["message"].startswith(f"rank 1 (host {culprit['host']}) ")
    assert f"lockstep: {verdict['message']}" in result.errors
    assert len(result.pids) == cell.processes
    assert result.orphans() == []
    whole = CHECKPOINTS.get(cell.phase, [2])
    if cell.phase == "data":
        assert set(result.checkpoints) <= {2}  # batch 3 is read while step 2 still runs
    elif cell.kind == "sleep" or cell.phase == "shutdown":
        assert result.checkpoints == whole
    else:  # the save of step 2 was perhaps under way, or that of step 4 went on while stacks were printed
        assert set(result.checkpoints) <= {*whole, 4}
    newest = max(result.checkpoints, default=None)
    assert verdict["last_checkpoint"] == (
        None if newest is None else {"step": newest, "path": str(result.path / "checkpoints" / str(newest))}
    )
    if CODES[cell.kind] == 5:
        assert cell.limit_seconds < verdict["seconds_to_detection"] < cell.limit_seconds + 5
        for rank in range(cell.processes):
            assert "most recent call first" in result.log(rank), rank
        assert ("had been stopped" in verdict["message"]) == (cell.kind == "stop")


HEALTHY = {  # name: settings of a run in which a rank is late, and yet within its limit
    "a job of rank 0 alone that is longer than a step may be": [
        'debug.faults=[{kind="sleep", rank=0, step=3, phase="eval", seconds=14.0}]',
        "timeouts.step_seconds=8.0",
    ],
    **{
        f"40 s late, {algorithm}": [
            'debug.faults=[{kind="sleep", rank=1, step=3, seconds=40.0}]',
            "timeouts.step_seconds=120.0",
            f'sync.algorithm="{algorithm}"',
        ]
        for algorithm in ("xla", "ring", "tree", "hierarchical", "central")
    },
    "40 s late, a codec": [  # all_to_all and all_gather between processes
        'debug.faults=[{kind="sleep", rank=1, step=3, seconds=40.0}]',
        "timeouts.step_seconds=120.0",
        'sync.codec="int8"',
    ],
    **{
        f"40 s late in {phase}": [
            f'debug.faults=[{{kind="sleep", rank=1, step={STEPS[phase]}, phase="{phase}", seconds=40.0}}]',
            f"timeouts.{phase}_seconds=120.0",
        ]
        for phase in ("eval", "checkpoint")
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("40 s") else []) for name in HEALTHY]
)
def test_who_is_slow_but_within_the_limit_is_left_alone(tmp_path, name):
    result = run(tmp_path / "run", 2, settings=HEALTHY[name])
    assert result.code == 0, result.errors
    assert result.checkpoints == [2, 4, 6]
