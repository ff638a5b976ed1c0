"""``lockstep bench scaling``: which numbers of replicas, what is timed on them, and what the times amount to."""

import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console
from toy import mesh_of

from trainer.assembly import assemble
from trainer.config import Config
from trainer.errors import Halted
from trainer.evidence import scaling
from trainer.evidence.scaling_table import Point, row, table
from trainer.evidence.timing import Machine, agreed_repeats, in_turn, slowest
from trainer.mesh import AXES
from trainer.rundir import RunDir


def settings(**tables):
    return Config.model_validate(
        {
            "run": {"num_steps": 10},
            "task": {
                "target": "models.mlp:MLPClassifier",
                "args": {"image_size": 8, "channels": 1, "hidden": [8], "num_classes": 10},
            },
            "data": {"source": "digits", "global_batch": 32},
            "optimizer": {"name": "sgd", "learning_rate": 0.01, "accumulate_steps": 2, "frozen": ["*bias"]},
            "mesh": {"nodes": 2, "devices_per_node": 4, "platform": "cpu"},
            "sync": {"algorithm": "hierarchical"},
            **tables,
        }
    )


PLAIN = {"task": {"target": "toy_task:Mean"}}
"""Compiles quickly."""


@pytest.mark.parametrize("fixed", [False, True])
def test_the_whole_measurement(tmp_path, monkeypatch, fixed):
    counts = [1, 8] if fixed else [1, 2, 4, 8]
    ends = [Point(1, 1), Point(2, 4)]
    if fixed:
        monkeypatch.setattr(scaling, "points", lambda nodes, local: ends)
    console = Console(file=io.StringIO(), width=120)
    path = tmp_path / "x.json"
    config = settings(**PLAIN, optimizer={"name": "sgd", "learning_rate": 0.01})
    scaling.run(config, RunDir(tmp_path), 0, console, fixed_batch=fixed, seconds=0.01, json_path=str(path))
    result = json.loads(path.read_text())
    assert result["fixed"] == ("global batch" if fixed else "batch per replica")
    assert [found["replicas"] for found in result["rows"]] == counts
    assert [found["global_batch"] for found in result["rows"]] == [32 if fixed else 4 * count for count in counts]
    single = result["rows"][0]
    assert [single[f"lost_to_{cause}"] for cause in ("exchange", "compute")] == [0, 0]
    for found in result["rows"]:
        assert found["examples_per_second"] == pytest.approx(found["global_batch"] / found["step_seconds"])
        ideal = found["replicas"] * single["examples_per_second"]
        assert found["efficiency"] == pytest.approx(found["examples_per_second"] / ideal)
        assert found["waiting_seconds"] is None
        assert found["exchange_alone_seconds"] > 0
    shown = console.file.getvalue()
    assert "cores shared: the devices are emulated" in shown
    assert "8 = 2 x 4" in shown


def test_the_pieces_on_fewer_devices_do_the_same_step_on_less():
    pieces = assemble(settings())
    few = scaling.on_mesh(pieces, mesh_of(1, 2), batch=8)
    assert few.work.rounds == pieces.work.rounds == 2
    steps = scaling.Steps(few)
    steps()
    steps()
    steps.check()
    assert int(steps.state.step) == int(steps.state.num_updates) == 2
    batch = scaling.some_batch(few)
    first = pieces.loader.read(0)
    np.testing.assert_array_equal(batch["label"], first["label"][:8])
    twice = scaling.some_batch(scaling.on_mesh(pieces, mesh_of(1, 2), batch=64))
    np.testing.assert_array_equal(twice["label"], np.tile(first["label"], 2))


def test_steps_that_were_skipped_are_no_measurement():
    steps = scaling.Steps(assemble(settings()))
    steps._batch["image"] = steps._batch["image"] * np.nan
    steps()
    with pytest.raises(Halted, match="1 of 1 steps on the first batch were not finite"):
        steps.check()


def times(step, compute, exchange=0.01):
    return {"step": [step] * 3, "compute": [compute] * 3, "exchange": [exchange] * 3}


def test_what_is_lost_adds_up():
    single = row(Point(1, 1), 10, [times(1.0, 1.0)], None)
    assert (single.efficiency, single.lost_to_exchange, single.lost_to_compute) == (1.0, 0.0, 0.0)
    two = row(Point(2, 1), 20, [times(2.0, 1.1, 0.6), times(1.9, 1.5, 0.5)], single)
    assert two.step_seconds == 2.0
    assert two.efficiency == 0.5
    assert two.compute_seconds == pytest.approx(1.3)
    assert two.waiting_seconds == pytest.approx(0.2)
    assert two.exchange_seconds == pytest.approx(0.5)
    assert two.exchange_alone_seconds == 0.6
    assert two.lost_to_exchange == pytest.approx(0.25)
    assert two.lost_to_waiting == pytest.approx(0.1)
    assert two.lost_to_compute == pytest.approx(0.15)  # 1.3 s where 1 s is fair, of 2 s
    strong = row(Point(1, 2), 10, [times(0.5, 0.5)], single)
    assert strong.efficiency == 1.0
    faster_than_its_parts = row(Point(1, 2), 20, [times(1.0, 1.2)], single)
    assert faster_than_its_parts.exchange_seconds == 0

    one_core_each = Machine(2, 1, 2, 2, "cpu", "cpu", 4)
    told, _, shown = table([single, two], one_core_each, fixed_batch=False)
    assert told == "2 nodes x 1 cpu devices, 2 processes on 2 hosts"
    console = Console(file=io.StringIO(), width=120)
    console.print(shown)
    assert "50.0 %" in console.file.getvalue()


def test_the_slowest_process_counts_repeat_by_repeat():
    assert slowest([[1.0, 5.0, 1.0], [2.0, 2.0, 9.0]]) == 5.0


def test_repeats_fit_the_time_and_take_turns():
    assert [agreed_repeats(seconds, 1.0) for seconds in (10.0, 0.1, 1e-6)] == [3, 10, 200]
    called = []

    def noting(name):
        return lambda: called.append(name)

    found = in_turn({"a": noting("a"), "b": noting("b")}, 2, meet=noting("meet"))
    assert called == ["meet", "a", "meet", "b"] * 2
    assert [len(found["a"]), len(found["b"])] == [2, 2]


def test_replicas_double_within_a_node_and_then_across():
    assert [point.replicas for point in scaling.points(1, 1)] == [1]
    assert scaling.points(4, 3) == [Point(1, 1), Point(1, 2), Point(1, 3), Point(2, 3), Point(4, 3)]
    assert AXES == ("node", "local")
    assert jax.device_count() == 8


@pytest.mark.slow
def test_processes_that_take_no_part_wait_for_those_that_do(tmp_path):
    command = [sys.executable, "-m", "trainer", "bench", "scaling", "digits_mlp", "--processes", "2"]
    command += ["--set", "mesh.devices_per_node=1", "--seconds", "0.05", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    assert [(found["replicas"], found["processes"]) for found in rows] == [(1, 1), (2, 2)]
    assert rows[1]["waiting_seconds"] >= 0
    lost = [rows[1][f"lost_to_{what}"] for what in ("exchange", "waiting", "compute")]
    assert sum(lost) == pytest.approx(1 - rows[1]["efficiency"])
