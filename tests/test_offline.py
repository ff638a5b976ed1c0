"""Exported arrays are the parameters as they are, and a failed export leaves nothing."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from test_loop import run, settings

from trainer import offline
from trainer.errors import InputRefused, SettingsRefused
from trainer.rundir import RunDir


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    config = settings(run={"num_steps": 1})
    run(config, path)
    return config, RunDir(path)


@pytest.mark.parametrize("suffix", offline.FORMATS)
def test_arrays_keep_shape_and_value(tmp_path, suffix):
    output = tmp_path / f"params{suffix}"
    output.write_text("an older export")
    tree = {"scale": np.float32(2), "half": np.asarray(jnp.arange(3, dtype=jnp.bfloat16)), "t": np.ones((2, 3)).T}
    offline.write_arrays(output, offline.named_arrays(tree))
    arrays = load_file(output) if suffix == ".safetensors" else np.load(output)
    assert arrays["scale"].shape == ()
    assert arrays["t"].shape == (3, 2)
    assert arrays["half"].astype(np.float32).tolist() == [0, 1, 2]
    if suffix == ".npz":
        assert arrays["half"].dtype == np.float32
    assert [entry.name for entry in tmp_path.iterdir()] == [output.name]


@pytest.mark.parametrize("suffix", offline.FORMATS)
def test_a_missing_folder_is_refused(finished, tmp_path, suffix):
    with pytest.raises(InputRefused, match=r"--output .*cannot be written"):
        offline.export(finished[1], tmp_path / "nowhere" / f"params{suffix}")


def test_the_ending_is_checked_first(tmp_path):
    with pytest.raises(SettingsRefused, match="must end in"):
        offline.export(RunDir(tmp_path / "no run"), tmp_path / "params.bin")


def test_damaged_settings_are_the_runs_fault_and_not_the_users(tmp_path):
    (tmp_path / "config.toml").write_text("[")
    with pytest.raises(InputRefused, match="holds damaged settings"):
        offline.export(RunDir(tmp_path), tmp_path / "params.npz")


def test_metrics_that_are_not_finite_are_printed_as_null(finished, monkeypatch):
    monkeypatch.setattr(offline.Evaluator, "__call__", lambda self, state: {"loss": float("nan"), "examples": 3})
    text = io.StringIO()
    config, run_dir = finished
    offline.evaluate(config, run_dir, 1, Console(file=text))
    assert json.loads(text.getvalue(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "examples": 3,
        "non_finite": ["loss"],
    }
