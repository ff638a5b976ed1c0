"""Whole runs in this process that are interrupted, damaged, taken back and started from one another."""

import errno
import io
import shutil

import numpy as np
import pytest
from rich.console import Console
from test_loop import run, settings, training

from trainer import loop, metrics
from trainer.assembly import assemble
from trainer.checkpoint import catalog, reading
from trainer.checkpoint.store import Checkpoints
from trainer.errors import Halted, InputRefused, SettingsRefused
from trainer.rundir import RunDir

COMPARED = ("step", "num_updates", "epoch", "loss", "grad_norm", "learning_rate", "residual_norm")
COMPARED += ("param_digest", "example_ids")
MEAN = {"target": "toy_task:Mean", "args": {}}
NORMED = {"target": "toy_task:Normed", "args": {}}


def small(**changes):
    """A run of few and cheap steps."""
    return settings(**{"task": MEAN, "optimizer": {"name": "sgd", "learning_rate": 0.1, "ema_decay": 0.0}} | changes)


def small_steps(num_steps, **checkpoint):
    return small(
        run={"num_steps": num_steps, "eval_every_steps": 1}, checkpoint={"every_steps": 1, "keep": 9} | checkpoint
    )


def resume_and_listen(config, path):
    """Goes on with a run; returns what its display said."""
    run_dir, attempt = RunDir.open(path, resume=True)
    text = io.StringIO()
    loop.run(config, run_dir, attempt, Console(file=text, width=500))
    return text.getvalue()


def steps_of(directory):
    return [(entry.step, entry.status) for entry in catalog.entries(directory, checksums=True)]


def normed(fault_step=None):
    """Batch-norm, dropout, accumulation, Adam's moments, a moving average, a decaying rate, low-rank factors and what
    they leave out; epochs of five batches."""
    faults = [] if fault_step is None else [{"kind": "nan", "rank": 0, "step": fault_step, "attempt": 0}]
    return settings(
        run={"num_steps": 10},
        task=NORMED,
        data={"global_batch": 288},
        optimizer={"schedule": "cosine", "warmup_steps": 3},
        sync={"codec": "powersgd", "args": {"rank": 2}},
        checkpoint={"every_steps": 1},
        debug={"faults": faults},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return training(run(normed(), tmp_path_factory.mktemp("whole") / "run"))


@pytest.mark.parametrize("ends", [pytest.param((5,), marks=pytest.mark.slow), (4, 5)])
def test_ten_steps_are_the_same_in_parts_bit_for_bit(whole, tmp_path, ends):
    """A part is cut off by a fault, for one that is only shorter would have another schedule."""
    for end in ends:
        with pytest.raises(Halted):
            run(normed(fault_step=end + 1), tmp_path / "run", resume=True)
    rows = training(run(normed(), tmp_path / "run", resume=True))
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert {row["epoch"] for row in rows} == {0, 1}
    for row, expected in zip(rows, whole, strict=True):
        assert row["attempt"] == 1 + sum(row["step"] > end for end in ends)
        assert {key: row.get(key) for key in COMPARED} == {key: expected.get(key) for key in COMPARED}
    assert {row["residual_norm"] > 0 for row in rows if row["step"] % 2 == 0} == {True}


def resizing(codec, nodes):
    """Six steps on ``nodes`` nodes of eight devices in all; SGD, whose updates are as near as its gradients, and large
    beside the last bit of a parameter."""
    return settings(
        sync={"codec": codec, "args": {"rank": 2} if codec == "powersgd" else {}},
        optimizer={"name": "sgd", "learning_rate": 1.0, "accumulate_steps": 1, "ema_decay": 0.0},
        mesh={"nodes": nodes, "devices_per_node": 8 // nodes},
        checkpoint={"every_steps": 1, "keep": 9},
    )


def item(path, step, name):
    return reading.named(reading.read(path / "checkpoints" / str(step), name))


@pytest.mark.parametrize(
    ("codec", "old", "new"),
    [
        ("powersgd", 4, 2),
        pytest.param("powersgd", 2, 4, marks=pytest.mark.slow),
        pytest.param("int8", 4, 2, marks=pytest.mark.slow),
        ("int8", 2, 4),
    ],
)
def test_residuals_go_to_other_owners_and_the_log_says_how(tmp_path, codec, old, new):
    run(resizing(codec, old), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    catalog.go_back(tmp_path / "run" / "checkpoints", 3)
    told = resume_and_listen(resizing(codec, new), tmp_path / "run")
    assert f"residuals: each of the {new} owners starts from the mean of the {old} before" in told
    assert f"resumed on 1 process, {new} x {8 // new} devices; the checkpoint was saved on 1 process, {old} x" in told

    shapes = assemble(resizing(codec, new)).shapes
    checkpoints = Checkpoints(tmp_path / "whole" / "checkpoints", create=False)
    moved = reading.named(checkpoints.restore(3, shapes).state.sync)
    checkpoints.close()
    saved = item(tmp_path / "whole", 3, "sync")
    names = [name for name in saved if "residual" in name]
    assert any(np.abs(saved[name]).max() > 0 for name in names)
    for name in names:
        assert (saved[name].shape[0], moved[name].shape[0]) == (old, new)
        np.testing.assert_allclose(np.mean(moved[name], 0), np.mean(saved[name], 0), rtol=0, atol=1e-7)

    if codec == "powersgd":
        before = item(tmp_path / "whole", 3, "params")
        last_bit = np.finfo(np.float32).eps * max(np.abs(leaf).max() for leaf in before.values())
        for step in (4, 5, 6):
            ours, theirs = (item(tmp_path / name, step, "params") for name in ("run", "whole"))
            size = max(np.abs(theirs[name] - before[name]).max() for name in before)
            error = max(np.abs(ours[name] - theirs[name]).max() for name in before)
            assert error <= 1e-6 * size + last_bit  # of the parameters, which is all that float32 leaves to tell


def test_a_damaged_newest_checkpoint_costs_its_steps_and_nothing_else(tmp_path):
    expected = training(run(small_steps(4), tmp_path / "whole"))
    run(small_steps(3), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "300").mkdir()
    with open(tmp_path / "run" / "checkpoints" / "3" / "params" / "_METADATA", "ab") as file:
        file.write(b" ")
    told = resume_and_listen(small_steps(4), tmp_path / "run")
    assert "resumed from step 2" in told
    assert "300 is passed over: it has no manifest.json" in told
    assert "3 is passed over: params/_METADATA has" in told
    rows = training(metrics.read(tmp_path / "run" / "metrics.jsonl"))
    assert [(row["attempt"], row["param_digest"]) for row in rows] == [
        (1 if row["step"] < 3 else 2, row["param_digest"]) for row in expected
    ]
    assert steps_of(tmp_path / "run" / "checkpoints") == [
        (300, "unfinished"),
        *((step, "good") for step in (4, 3, 2, 1)),
    ]


def test_going_back_trains_the_same_steps_again_and_saves_them(tmp_path):
    rows = training(run(small_steps(4), tmp_path / "run"))
    directory = tmp_path / "run" / "checkpoints"
    assert catalog.go_back(directory, 2, RunDir(tmp_path / "run").id) == [3, 4]
    again = training(run(small_steps(4), tmp_path / "run", resume=True))
    assert [row["attempt"] for row in again] == [1, 1, 2, 2]
    assert [row["param_digest"] for row in again] == [row["param_digest"] for row in rows]
    assert steps_of(directory) == [(step, "good") for step in (4, 3, 2, 1)]
    assert not list(directory.rglob(catalog.ABANDONED))


def test_the_checkpoints_with_the_best_evaluations_stay_over_attempts(tmp_path):
    """Evaluations get better with every step, so that by the greatest loss the first ones are the best."""
    worst = {"keep": 1, "keep_best": 2, "best_mode": "max"}
    run(small_steps(3, **worst), tmp_path / "run")
    run(small_steps(5, **worst), tmp_path / "run", resume=True)
    losses = {row["step"]: row["loss"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl", "eval")}
    assert losses == dict(sorted(losses.items(), key=lambda item: -item[1]))
    assert [step for step, _ in steps_of(tmp_path / "run" / "checkpoints")] == [5, 2, 1]


def test_a_metric_that_no_evaluation_gives_is_refused(tmp_path):
    with pytest.raises(
        SettingsRefused, match=r"checkpoint.best_metric = 'f1': an evaluation of toy_task:Mean gives loss"
    ):
        run(small_steps(1, keep_best=1, best_metric="f1"), tmp_path / "run")


def test_a_full_run_directory_is_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics.MetricsWriter, "write", fail)
    with pytest.raises(InputRefused, match="run cannot be written: No space left on device; free space, then"):
        run(small_steps(2), tmp_path / "run")


def test_another_runs_checkpoints_are_refused_and_a_relative_directory_is_the_runs_own(tmp_path):
    for name in ("a", "b"):
        run(small_steps(1, directory="inner"), tmp_path / name)
        assert steps_of(tmp_path / name / "inner") == [(1, "good")]
    with pytest.raises(InputRefused, match=r"b/inner/1 was written by another run"):
        run(small_steps(2, directory=str(tmp_path / "b" / "inner")), tmp_path / "a", resume=True)
    run(small_steps(2, directory="inner"), tmp_path / "a", resume=True)
    assert steps_of(tmp_path / "a" / "inner") == [(2, "good"), (1, "good")]


def test_a_run_starts_from_anothers_parameters_and_nothing_else(tmp_path):
    run(small_steps(3), tmp_path / "old")
    other = {"name": "adamw", "learning_rate": 0.0, "ema_decay": 0.0}
    new = small(run={"num_steps": 1}, optimizer=other, checkpoint={"init_from": str(tmp_path / "old")})
    row, evaluation = run(new, tmp_path / "new")
    assert (row["step"], row["num_updates"], row["epoch"]) == (1, 1, 0)
    before = metrics.read(tmp_path / "old" / "metrics.jsonl")
    assert row["param_digest"] == training(before)[-1]["param_digest"]
    assert evaluation["loss"] == before[-1]["loss"]

    shutil.rmtree(tmp_path / "new" / "checkpoints")  # before its first checkpoint a run starts once more, and alike
    assert run(new, tmp_path / "new", resume=True)[0]["param_digest"] == row["param_digest"]
    wrong = small(
        task=NORMED, run={"num_steps": 1}, checkpoint={"init_from": str(tmp_path / "old" / "checkpoints" / "2")}
    )
    with pytest.raises(InputRefused, match=r"(?s)params/hidden: absent in the checkpoint, float32\[64, 16\] here"):
        run(wrong, tmp_path / "wrong")
