"""The lab's measurements run, very small: their reports are whole and add up. How long anything took is not tested."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
LIMIT_SECONDS = 60
CHAIN = ("--layers", 2, "--width", 16, "--batch", 8, "--repetitions", 2, "--steps", 1)


def argv_of(script, *arguments):
    return [sys.executable, str(BENCH / script), *map(str, arguments), "--limit", str(LIMIT_SECONDS), "--json"]


@pytest.fixture
def report_of(root, marker):
    """Runs a script to its end and returns its report."""

    def run(script, *arguments):
        done = subprocess.run(argv_of(script, *arguments), capture_output=True, text=True, timeout=5 * LIMIT_SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_kernel_counts_what_the_accounting_says(report_of):
    report = report_of("lab_exchange.py", "--devices", 2, "--megabytes", 1, "--rate", "1gbit", "--repetitions", 2)
    assert report["payload_bytes"] == pytest.approx(1e6, rel=0.05)
    assert len(report["algorithms"]) == 7
    for name, row in report["algorithms"].items():
        assert abs(row["largest_excess"]) < 0.03, name
        assert len(row["counted_bytes"]) == 2
        assert row["bound_seconds"] == max(row["accounted_bytes"]) / 125e6
        assert row["ratio"] == row["seconds"] / row["bound_seconds"]


def check_codec_rows(report, *labels):
    assert list(report["codecs"]) == ["exact", *labels]
    exact = report["codecs"]["exact"]
    for label, row in report["codecs"].items():
        assert len(row["counted_bytes"]) == 2
        assert row["ratio"] == row["seconds"] / row["bound_seconds"] > 0, label
        assert row["times_faster"] == exact["seconds"] / row["seconds"]
        assert row["times_fewer_bytes"] == max(exact["accounted_bytes"]) / max(row["accounted_bytes"])


def test_codecs_send_what_the_accounting_says(report_of):
    options = ("--devices", 2, "--megabytes", 1, "--rate", "1gbit", "--repetitions", 2)
    report = report_of("lab_codecs.py", *options, "--codecs", "int8")
    check_codec_rows(report, "int8")
    for label, row in report["codecs"].items():
        assert abs(row["largest_excess"]) < 0.1, label  # the headers of such small messages weigh much
    assert report["codecs"]["int8"]["times_fewer_bytes"] > 3.9
    assert report["ddp"] == {}


@pytest.mark.slow
def test_whole_steps_are_measured_with_codecs(report_of):
    options = ("--config", "digits_mlp", "--devices", 1, "--rate", "1gbit", "--repetitions", 2)
    report = report_of("lab_codecs.py", *options, "--codecs", "topk:ratio=0.1", "--set", "data.global_batch=16")
    check_codec_rows(report, "topk:ratio=0.1")
    assert report["config"] == "digits_mlp"
    assert report["payload_bytes"] == 4 * 9610


@pytest.mark.slow
def test_the_fit_predicts_each_measured_point(report_of):
    options = ("--devices", 1, "--largest-mib", 0.02, "--repetitions", 1, "--algorithms", "xla", "tree")
    report = report_of("lab_fit.py", "--rate", "1gbit", "--other-rate", "500mbit", *options)
    points = report["points"]
    assert [len(rows) for rows in points.values()] == [6, 4, 4, 4]
    assert {row["hosts"] for row in points["more hosts"]} == {3}
    assert {row["rate"] for row in points["other rate"]} == {"500mbit"}
    assert not {row["bytes"] for row in points["other sizes"]} & {row["bytes"] for row in points["fitted"]}
    for rows in points.values():
        for row in rows:
            assert row["ratio"] == row["seconds"] / row["predicted_seconds"] > 0


@pytest.mark.slow
def test_steps_are_measured_with_and_without_their_exchange(report_of):
    report = report_of("lab_overlap.py", *CHAIN, "--rounds", 1)
    assert set(report["kinds"]) == {"lockstep", "jax"}
    for row in report["kinds"].values():
        assert min(row[f"{program}_seconds"] for program in ("compute", "exchange", "step")) > 0
        assert len(row["ratio_of_each_round"]) == 1


@pytest.mark.slow
def test_every_way_to_accumulate_is_measured(report_of):
    ways = report_of("lab_accumulation.py", *CHAIN, "--virtual", 2)["ways"]
    assert list(ways) == ["no exchange", "at the end", "last round", "each round"]
    assert ways["no exchange"]["ratio"] == 1


def test_a_failing_worker_is_quoted_and_nothing_is_left(root, traces):
    done = subprocess.run(
        argv_of("lab_accumulation.py", *CHAIN, "--virtual", 3), capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 1
    assert "lab_accumulation.py: the worker on host" in done.stderr
    assert "8" in done.stderr
    assert not [trace for trace in traces(0) if trace.startswith("process")]


def test_ended_in_the_middle_a_script_leaves_nothing_behind(root, traces, eventually):
    process = subprocess.Popen(argv_of("lab_overlap.py"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: len([trace for trace in traces(0) if trace.startswith("process")]) >= 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not [trace for trace in traces(0) if trace.startswith("process")]


def test_a_rate_that_is_none_is_refused_in_a_line(root):
    done = subprocess.run(argv_of("lab_exchange.py", "--rate", "fast"), capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith("lab_exchange.py: rate: must be a number")
    assert len(done.stderr.splitlines()) == 1


def times_of(*arguments):
    """The cells of the one row that scripts/bench/detection_times.py prints."""
    argv = [sys.executable, str(BENCH / "detection_times.py"), "--bare-jax", "--repeat", "1", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10 * LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]


def test_a_failure_is_timed_beside_bare_jax():
    fault, code, known, over, bare = times_of("--faults", "sleep", "--limit", "5", "--cap", "10")
    assert (fault, code, bare) == ("sleep", "5", "not within 10 s")
    assert 0 < float(known.removesuffix(" s")) <= float(over.removesuffix(" s"))


@pytest.mark.slow
def test_a_cut_link_is_timed_beside_bare_jax(root, traces):
    fault, code, _, over, bare = times_of("--hosts", "--faults", "link cut", "--cap", "10")
    assert (fault, code, bare) == ("link cut", "6", "not within 10 s")
    assert float(over.removesuffix(" s")) > 0
    assert not [trace for trace in traces(0) if trace.startswith("process")]


def test_a_fault_that_is_not_timed_is_refused_in_a_line():
    argv = [sys.executable, str(BENCH / "detection_times.py"), "--hosts", "--faults", "spin"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 2
    assert "spin: there are host of agent 0 killed, other host killed, link cut" in done.stderr
