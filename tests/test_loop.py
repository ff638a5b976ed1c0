"""Whole runs in this process: what they leave behind, and that an interrupted run is the same run."""

from pathlib import Path

import jax
import numpy as np
import pytest

from trainer import loop, metrics, story, sync
from trainer.assembly import assemble
from trainer.config import Config
from trainer.data import Loader
from trainer.errors import Halted, InputRefused, SettingsRefused
from trainer.rundir import RunDir

SMALL = {
    "run": {"num_steps": 6, "seed": 1},
    "task": {
        "target": "models.mlp:MLPClassifier",
        "args": {"image_size": 8, "channels": 1, "hidden": [16], "num_classes": 10, "dropout": 0.5, "random_shift": 1},
    },
    "data": {"source": "digits", "global_batch": 48},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2, "accumulate_steps": 2, "ema_decay": 0.9},
    "mesh": {"nodes": 2, "devices_per_node": 4, "platform": "cpu"},
    "debug": {"digest_every": 1, "log_example_ids": True},
    "observe": {"log_every_steps": 2},
}


def settings(**changes):
    """SMALL with some tables updated."""
    return Config.model_validate(
        {**SMALL, **{name: {**SMALL.get(name, {}), **table} for name, table in changes.items()}}
    )


def run(config: Config, path: Path, *, resume: bool = False) -> list[metrics.Row]:
    """Runs ``config`` in ``path`` and returns its rows."""
    run_dir, attempt = RunDir.open(path, resume=resume)
    loop.run(config, run_dir, attempt, None)
    return metrics.read(run_dir.metrics)


def training(rows):
    return [row for row in rows if row["kind"] == "train"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken") / "run"
    return path, run(settings(), path)


def test_a_run_leaves_what_the_design_promises(unbroken):
    path, rows = unbroken
    train, evaluations = training(rows), [row for row in rows if row["kind"] == "eval"]
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5, 6]
    for row in train:
        assert row["num_updates"] == row["step"]
        assert row["attempt"] == 1
        assert row["num_contributions"] == 8
        assert row["examples"] == 48
        assert len(row["param_digest"]) == 16
        assert row["step_seconds"] > 0
        assert row["examples_per_second"] > 0
    assert len({row["param_digest"] for row in train}) == 6
    assert [row["examples"] for row in evaluations] == [360]
    assert {"loss", "accuracy", "step", "attempt"} <= evaluations[0].keys()
    assert (path / "config.toml").is_file()
    checkpoint = path / "checkpoints" / "6"
    assert {"params", "model_state", "optimizer", "sync", "data", "meta"} <= {
        item.name for item in checkpoint.iterdir()
    }


@pytest.mark.parametrize("first_part", [1, 3])
def test_six_steps_are_three_and_three_bit_for_bit(unbroken, tmp_path, first_part):
    """In the middle of an epoch, with dropout, augmentation, accumulation, Adam's moments and a moving average."""
    run(settings(run={"num_steps": first_part}), tmp_path / "run")
    resumed = run(settings(), tmp_path / "run", resume=True)
    assert [row["attempt"] for row in training(resumed)] == [1] * first_part + [2] * (6 - first_part)
    for row, expected in zip(training(resumed), training(unbroken[1]), strict=True):
        for key in ("step", "num_updates", "loss", "grad_norm", "learning_rate", "param_digest", "example_ids"):
            assert row[key] == expected[key], (key, row["step"])
    last, expected = (rows[-1] if rows[-1]["kind"] == "eval" else rows[-2] for rows in (resumed, unbroken[1]))
    assert (last["loss"], last["accuracy"]) == (expected["loss"], expected["accuracy"])


def test_an_epoch_is_a_permutation_with_a_short_last_batch(tmp_path):
    """1,437 examples in batches of 480: three batches, the last one of 477 rows; then another order."""
    rows = training(run(settings(data={"global_batch": 480}, run={"num_steps": 4}), tmp_path / "run"))
    assert [row["examples"] for row in rows] == [480, 480, 477, 480]
    assert [row["epoch"] for row in rows] == [0, 0, 0, 1]
    first_epoch = [example for row in rows[:3] for example in row["example_ids"]]
    assert sorted(first_epoch) == list(range(1437))
    assert rows[3]["example_ids"] != rows[0]["example_ids"]


@pytest.mark.slow
def test_a_batch_norm_model_runs_and_resumes_bit_for_bit(tmp_path):
    resnet = {"target": "models.resnet:ResNetClassifier"}
    resnet["args"] = {"image_size": 8, "channels": 1, "num_classes": 10, "depth": 18, "width": 4}
    both = {"task": resnet, "data": {"global_batch": 16}, "optimizer": {"name": "sgd", "accumulate_steps": 1}}
    both["optimizer"] |= {"ema_decay": 0.0, "learning_rate": 0.05}
    whole = training(run(settings(run={"num_steps": 4}, **both), tmp_path / "whole"))
    run(settings(run={"num_steps": 2}, **both), tmp_path / "parts")
    parts = training(run(settings(run={"num_steps": 4}, **both), tmp_path / "parts", resume=True))
    assert [row["param_digest"] for row in parts] == [row["param_digest"] for row in whole]


def test_a_non_finite_step_halts_and_is_not_saved(tmp_path):
    faults = {"faults": [{"kind": "nan", "rank": 0, "step": 3}]}
    config = settings(debug=faults, checkpoint={"every_steps": 1})
    with pytest.raises(Halted, match=r"step 3, from rank 0 .*optimizer.non_finite = 'skip'"):
        run(config, tmp_path / "run")
    rows = training(metrics.read(tmp_path / "run" / "metrics.jsonl"))
    assert rows[-1]["step"] == 3
    assert rows[-1]["loss"] is None
    assert "loss" in rows[-1]["non_finite"]
    assert sorted(entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir())[-1] == "2"


def test_skipped_steps_count_as_steps_but_not_as_updates(tmp_path):
    faults = {"faults": [{"kind": "nan", "rank": 0, "step": 2, "num_steps": 2}]}
    rows = training(
        run(settings(debug={**faults, "digest_every": 1}, optimizer={"non_finite": "skip"}), tmp_path / "run")
    )
    assert [row["num_updates"] for row in rows] == [1, 1, 1, 2, 3, 4]
    assert [row["num_contributions"] for row in rows] == [8, 0, 0, 8, 8, 8]
    assert rows[0]["param_digest"] == rows[1]["param_digest"] == rows[2]["param_digest"] != rows[3]["param_digest"]
    assert np.isfinite([row["loss"] for row in rows[3:]]).all()


def test_an_endless_run_of_skips_halts(tmp_path):
    faults = {"faults": [{"kind": "nan", "rank": 0, "step": 2, "num_steps": 100}]}
    optimizer = {"non_finite": "skip", "max_consecutive_skips": 2}
    with pytest.raises(Halted, match=r"step 4.*3 steps in a row.*max_consecutive_skips = 2"):
        run(settings(debug=faults, optimizer=optimizer), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": {"global_batch": 50}}, SettingsRefused, "global_batch = 50 .*16 virtual replicas.*48 or 64"),
        ({"data": {"global_batch": 8}}, SettingsRefused, "set it to 16"),
        ({"mesh": {"devices_per_node": 3}}, SettingsRefused, "mesh.nodes = 2 x mesh.devices_per_node = 3"),
        ({"data": {"global_batch": 1600}}, InputRefused, "1437 training examples"),
        ({"task": {"args": {"image_size": 9}}}, SettingsRefused, "task.args"),
        (
            {"task": {"args": {"image_size": 9, "num_classes": 10}}},
            SettingsRefused,
            r"cannot take the batches of data.source = 'digits' \(image float32\[48, 8, 8, 1\]",
        ),
        ({"task": {"target": "models.mlp:MLP"}}, SettingsRefused, "task.args"),
        (
            {"task": {"target": "trainer.rundir:RunDir", "args": {"path": "x"}}},
            SettingsRefused,
            "is no task: it lacks init",
        ),
        (
            {"debug": {"faults": [{"kind": "nan", "rank": 1, "step": 3}]}},
            SettingsRefused,
            "rank 1, but ranks go from 0 to 0",
        ),
        ({"optimizer": {"frozen": ["nothing/*"]}}, SettingsRefused, "matches no parameter"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        run(settings(**changes), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert RunDir.open(tmp_path / "run")[1] == 2, "a refused start must not stand in the way of the next"


def test_a_shorter_run_than_the_checkpoint_is_refused(unbroken, tmp_path):
    run(settings(run={"num_steps": 2}), tmp_path / "run")
    with pytest.raises(InputRefused, match=r"step 2, past run.num_steps = 1"):
        run(settings(run={"num_steps": 1}), tmp_path / "run", resume=True)


@pytest.mark.parametrize("every_steps", [0, 1])
def test_parameters_that_an_update_poisoned_are_not_saved(tmp_path, every_steps):
    optimizer = {"name": "sgd", "learning_rate": 3e38, "ema_decay": 0.0, "weight_decay": 1e38}
    config = settings(run={"num_steps": 1}, optimizer=optimizer, checkpoint={"every_steps": every_steps})
    with pytest.raises(Halted, match=r"parameter '.*' is not finite after step 1"):
        run(config, tmp_path / "run")
    assert not any(path.name.isdecimal() for path in (tmp_path / "run" / "checkpoints").iterdir())


def test_a_new_run_does_not_go_on_from_the_checkpoints_of_another(tmp_path):
    config = settings(run={"num_steps": 1}, checkpoint={"directory": str(tmp_path / "shared")})
    run(config, tmp_path / "first")
    for _ in range(2):  # a second try of what was refused is no more of a resumption than the first
        with pytest.raises(InputRefused, match=r"shared holds checkpoints already \(step 1\)"):
            run(config, tmp_path / "second")
    run(config, tmp_path / "first", resume=True)


def test_measured_links_are_read_before_anything_is_compiled_and_told_in_the_banner(tmp_path):
    links = sync.Profile(sync.CostModel(1e-5, 1e-9), sync.CostModel(1e-4, 1e-8), 1e-3)
    sync.write_profile(links, tmp_path / "links.json")
    pieces = assemble(settings(sync={"profile": str(tmp_path / "links.json"), "algorithm": "ring"}))
    assert (pieces.profile, pieces.links.num_hosts) == (links, 1)
    told = story.facts(pieces, story.sending(pieces), RunDir(tmp_path), 1, None).algorithm
    assert told.startswith("ring, as the settings say, predicted from the measured links to take ")
    with pytest.raises(InputRefused, match=r"sync\.profile = 'nowhere\.json': .*/nowhere\.json was looked for"):
        assemble(settings(sync={"profile": "nowhere.json"}))


def test_to_put_a_run_together_one_batch_is_read(monkeypatch):
    reads, read = [], Loader.read
    monkeypatch.setattr(Loader, "read", lambda self, index: reads.append(index) or read(self, index))
    shapes = assemble(settings()).batch_shapes()
    assert reads == [0]
    assert shapes["image"].shape == (48, 8, 8, 1)


def test_the_best_metrics_are_those_that_were_given():
    rows = [{"loss": 2.0}, {"loss": 1.0, "accuracy": 0.5}, {"accuracy": 0.25}]
    assert story._best(rows) == {"loss": 1.0, "accuracy": 0.5}
    assert story._best(rows[:1]) == {}


def test_the_step_is_compiled_once_by_a_fresh_run_and_once_by_a_resumed_one(tmp_path):
    """With a short last batch in either: steps 3 and 6 of 480, 480 and 477 examples."""
    compiled = []

    def note(event, seconds, fun_name="", **_):
        compiled.extend([fun_name] if event == "/jax/core/compile/backend_compile_duration" else [])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for num_steps in (4, 7):
            compiled.clear()
            config = settings(data={"global_batch": 480}, run={"num_steps": num_steps})
            run(config, tmp_path / "run", resume=num_steps > 4)
            assert compiled.count("jit(body)") == 2, "that of the step, and that of the evaluation"
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
