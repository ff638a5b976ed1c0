"""Whole runs with codecs: what their rows say, that an interrupted run is the same run, and what is refused."""

import typing

import numpy as np
import pytest
from rich.console import Console
from test_loop import run, settings, training

from trainer import loop, metrics, sync
from trainer.config import CodecName, Config
from trainer.rundir import RunDir

TOPK = {"codec": "topk", "args": {"ratio": 0.1}}
SHORT = {"accumulate_steps": 1, "ema_decay": 0.0}


def test_the_settings_know_every_codec():
    assert set(typing.get_args(CodecName)) == {"none", *sync.CODECS}


def test_six_steps_are_three_and_three_bit_for_bit(tmp_path):
    whole = training(run(settings(sync=TOPK, optimizer=SHORT), tmp_path / "whole"))
    run(settings(sync=TOPK, optimizer=SHORT, run={"num_steps": 3}), tmp_path / "parts")
    parts = training(run(settings(sync=TOPK, optimizer=SHORT), tmp_path / "parts", resume=True))
    assert [row["attempt"] for row in parts] == [1, 1, 1, 2, 2, 2]
    for key in ("loss", "param_digest"):
        assert [row[key] for row in parts] == [row[key] for row in whole], key
    assert parts[-1]["residual_norm"] == whole[-1]["residual_norm"] > 0


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_the_rows_count_bytes_and_residuals(tmp_path, codec):
    rows = training(run(settings(sync={"codec": codec, "warmup_steps": 2}, optimizer=SHORT), tmp_path / "run"))
    sent = [row["wire_bytes_slow"] for row in rows]
    assert sent[0] == sent[1] > 2 * sent[2]  # such a small model's biases and scales weigh much
    assert sent[2:] == 4 * sent[2:3]
    norms = {row["step"]: row["residual_norm"] for row in rows if "residual_norm" in row}
    assert set(norms) == {2, 4, 6}
    assert norms[2] == 0 < norms[4]
    assert np.isfinite([row["loss"] for row in rows]).all()


def test_a_skipped_step_leaves_the_residuals_as_they_were(tmp_path):
    """With a spoiled fourth step, the updates are those of a run without that batch."""
    faults = {"faults": [{"kind": "nan", "rank": 0, "step": 4}], "digest_every": 1}
    skipping = {**SHORT, "non_finite": "skip"}
    observe = {"log_every_steps": 1}
    rows = training(run(settings(sync=TOPK, optimizer=skipping, debug=faults, observe=observe), tmp_path / "run"))
    assert [row["num_updates"] for row in rows] == [1, 2, 3, 3, 4, 5]
    assert rows[3]["residual_norm"] == rows[2]["residual_norm"] != rows[4]["residual_norm"]
    assert rows[3]["param_digest"] == rows[2]["param_digest"]


def test_one_node_is_warned_of_and_exact(tmp_path):
    one = {"nodes": 1, "devices_per_node": 8}
    run_dir, attempt = RunDir.open(tmp_path / "run", resume=False)
    console = Console(record=True, width=200)
    config = settings(sync={"codec": "sign"}, optimizer=SHORT, mesh=one, run={"num_steps": 2})
    loop.run(config, run_dir, attempt, console)
    text = console.export_text()
    assert "warning: sync.codec = 'sign' does nothing, since with mesh.nodes = 1 there is no slow link" in text
    assert "sign across nodes, exact within them, with error feedback" in text
    exact = training(run(settings(optimizer=SHORT, mesh=one, run={"num_steps": 2}), tmp_path / "exact"))
    coded = training(metrics.read(run_dir.metrics))
    np.testing.assert_allclose([row["loss"] for row in coded], [row["loss"] for row in exact], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": {"args": {"rank": 2}}}, 'args: the codec "none" would ignore it'),
        ({"sync": {"error_feedback": False}}, 'error_feedback: the codec "none" would ignore it'),
        ({"sync": {"codec": "int8", "algorithm": "ring"}}, 'it is one of "auto", "hierarchical"'),
        ({"sync": {"codec": "int8", "compress": "all", "algorithm": "hierarchical"}}, '"auto", "xla", "ring", "tree"'),
        ({"sync": {"codec": "int8", "compress": "all", "across": "tree"}}, 'across: compress = "all" would ignore it'),
        ({"sync": {"codec": "topk", "momentum_correction": 0.9, "error_feedback": False}}, "it needs error_feedback"),
        ({"sync": {"codec": "topk", "momentum_correction": 0.9}}, "adamw has a momentum of its own"),
    ],
)
def test_what_would_be_ignored_or_applied_twice_is_refused_at_load(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_momentum_correction_goes_with_an_optimizer_without_momentum():
    both = {"sync": {"codec": "topk", "momentum_correction": 0.9}}
    assert isinstance(settings(**both, optimizer={"name": "sgd"}), Config)
