"""scripts/bench/codec_quality.py: it pairs runs by seed, goes on where it was, and derives times as it says."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCH = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[1])) / "scripts" / "bench"
SETTINGS = {"config": "digits_mlp", "set": [], "steps": 4}
LAB = {"config": "digits_mlp", "rate": "200mbit", "hosts": 2, "devices": 4}


@pytest.fixture(scope="module")
def quality():
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("codec_quality", BENCH / "codec_quality.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


def run_of(*accuracies, exit_code=0):
    """A finished run, evaluated at steps 2, 4, ..."""
    rows = [{"step": 2 * (i + 1), "accuracy": a, "loss": 1 - a} for i, a in enumerate(accuracies)]
    return {"exit_code": exit_code, "evaluations": rows}


@pytest.fixture
def results(quality, tmp_path):
    """Of two seeds: exact, and int8; sign halted with the second."""
    found = quality.Results(tmp_path / "runs.json", SETTINGS)
    for codec, runs in {
        "exact": [run_of(0.5, 0.75), run_of(0.25, 0.5)],
        "int8": [run_of(0.25, 0.5), run_of(0.75, 0.75)],
        "sign": [run_of(0.25, 0.5), run_of(exit_code=4)],
    }.items():
        for seed, result in enumerate(runs):
            found.add(quality.Arm(codec), seed, result)
    return found


def test_differences_are_paired_by_seed(quality, results):
    assert quality.differences(results, quality.Arm("int8"), range(2), "accuracy") == [-0.25, 0.25]
    assert quality.mean_and_error([-0.25, 0.25]) == (0.0, 0.25)
    lines = list(quality.table(results, [quality.Arm("int8"), quality.Arm("sign")], range(2)))
    assert lines[:2] == [
        "digits_mlp, 2 seeds: the exact exchange, and the differences from it with the",
        "same seed, as mean ± its standard error",
    ]
    assert "| | accuracy | loss |" in lines[2]
    assert "| exact | 0.6250 ± 0.1250 | 0.3750 ± 0.1250 |" in lines
    assert "| int8 | +0.0000 ± 0.2500 | +0.0000 ± 0.2500 |" in lines
    assert "| sign | 1 of 2 halted | 1 of 2 halted |" in lines
    assert "int8: accuracy -0.2500 +0.2500" in lines
    assert "sign: loss +0.2500 halted" in lines


def test_what_is_in_the_file_is_not_run_again_and_other_settings_are_refused(quality, results):
    again = quality.Results(results.path, SETTINGS)
    assert again.runs == results.runs
    assert again.get(quality.Arm("int8", False), 0) is None
    with pytest.raises(SystemExit, match="name another file"):
        quality.Results(results.path, {**SETTINGS, "steps": 5})


def test_times_are_derived_from_steps_here_and_seconds_there(quality, results):
    lab = {**LAB, "codecs": {label: {"seconds": 3.0} for label in ("exact", "int8", "sign")}}
    arms = [quality.Arm(label) for label in ("exact", "int8", "sign", "topk")]
    head, *_, exact, int8, sign = quality.times_to_target(results, arms, range(2), lab, "accuracy", 0.5)
    assert "derived, not run" in head
    assert [cell.strip() for cell in exact.split("|")][1:5] == ["exact", "3", "3.000", "9"]
    assert [cell.strip() for cell in int8.split("|")][2:5] == ["3", "3.000", "9"]
    assert "not reached" in sign
    assert quality.steps_to(run_of(0.5, 0.75), "loss", 0.25) == 4
    assert math.isinf(quality.steps_to(run_of(0.5), "accuracy", 0.9))


def test_a_report_of_exchanges_is_refused(quality, tmp_path):
    (tmp_path / "lab.json").write_text(json.dumps({**LAB, "config": ""}))
    with pytest.raises(SystemExit, match="holds exchanges alone, not steps of digits_mlp"):
        quality.read_lab(tmp_path / "lab.json", "digits_mlp")


def test_runs_are_made_and_compared(tmp_path):
    """Without error feedback alone: the settings of the other arm are the same but for one."""
    command = [sys.executable, str(BENCH / "codec_quality.py"), "--config", "digits_mlp", "--steps", "2"]
    command += ["--codecs", "topk:ratio=0.5", "--seeds", "1", "--results", str(tmp_path / "runs.json")]
    command += ["--feedback", "without", "--set", "mesh.devices_per_node=1"]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=120, check=True) for _ in range(2))
    assert first.stderr == "1/2: exact, seed 0\n2/2: topk:ratio=0.5, no feedback, seed 0\n"
    assert second.stderr == ""
    assert first.stdout == second.stdout
    assert "topk:ratio=0.5, no feedback" in first.stdout
    held = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert held["exact"]["0"]["evaluations"][-1]["step"] == 2
    assert held["exact"]["0"] != held["topk:ratio=0.5, no feedback"]["0"]


def test_ended_early_it_leaves_no_run_behind(tmp_path):
    command = [sys.executable, str(BENCH / "codec_quality.py"), "--config", "digits_mlp", "--codecs", "int8"]
    with subprocess.Popen([*command, "--jobs", "2"], stderr=subprocess.PIPE, text=True) as process:
        assert "exact, seed 0" in process.stderr.readline()
        until = time.monotonic() + 60
        while len(started := psutil.Process(process.pid).children(recursive=True)) < 2:
            assert time.monotonic() < until, "no run was started"
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(started, timeout=30)[1]
