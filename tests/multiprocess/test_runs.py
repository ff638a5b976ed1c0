"""Runs over several processes are the run over one: the same examples, losses and parameters."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trainer import metrics

ARGUMENTS = ["digits_mlp", "--set", "run.num_steps=5", "--set", "data.global_batch=48"]
ARGUMENTS += ["--set", "observe.log_every_steps=1", "--set", "debug.log_example_ids=true"]
ARGUMENTS += ["--set", "debug.digest_every=1", "--set", "checkpoint.every_steps=2"]


def train(path, num_processes, *more):
    command = [sys.executable, "-m", "trainer", "train", *ARGUMENTS, "--run-dir", str(path)]
    command += ["--processes", str(num_processes), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The rows of the same run over 1, 2 and 4 processes."""
    rows = {}
    for num_processes in (1, 2, 4):
        path = tmp_path_factory.mktemp("runs") / str(num_processes)
        done = train(path, num_processes)
        assert done.returncode == 0, done.stderr
        rows[num_processes] = metrics.read(path / "metrics.jsonl")
    return rows


@pytest.mark.parametrize("num_processes", [2, 4])
def test_the_run_does_not_depend_on_the_number_of_processes(runs, num_processes):
    for row, expected in zip(runs[num_processes], runs[1], strict=True):
        assert row.get("example_ids") == expected.get("example_ids")
        assert row["examples"] == expected["examples"]
        np.testing.assert_allclose(row["loss"], expected["loss"], rtol=1e-5)  # measured: 2e-7
        if row["kind"] == "train":
            np.testing.assert_allclose(row["grad_norm"], expected["grad_norm"], rtol=1e-5)


def test_two_runs_at_once_on_one_host_are_each_as_alone(runs, tmp_path):
    paths = [tmp_path / "one", tmp_path / "other"]
    with ThreadPoolExecutor(2) as pool:
        for path, done in zip(paths, pool.map(lambda path: train(path, 2), paths), strict=True):
            assert done.returncode == 0, done.stderr
            for row, expected in zip(metrics.read(path / "metrics.jsonl"), runs[2], strict=True):
                assert row["loss"] == expected["loss"]
                assert row.get("param_digest") == expected.get("param_digest")


@pytest.mark.slow
def test_under_pmap_several_processes_make_the_same_run(runs, tmp_path):
    done = train(tmp_path / "run", 2, "--set", 'sync.mapping="pmap"')
    assert done.returncode == 0, done.stderr
    for row, expected in zip(metrics.read(tmp_path / "run" / "metrics.jsonl"), runs[2], strict=True):
        assert row["loss"] == expected["loss"]
        assert row.get("param_digest") == expected.get("param_digest")


def test_a_non_finite_gradient_in_one_process_ends_all_and_is_named(tmp_path):
    fault = ["--set", 'debug.faults=[{kind="nan", rank=1, step=3}]']
    done = train(tmp_path / "run", 2, *fault)
    assert done.returncode == 4, done.stderr
    assert "step 3, from rank 1 " in done.stderr
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["exit_code"]) == ("halted", 4)

    resumed = train(tmp_path / "run", 2, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl", "train")
    assert [row["num_updates"] for row in rows] == [1, 2, 3, 4, 5]
