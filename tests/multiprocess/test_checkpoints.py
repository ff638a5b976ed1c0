"""Runs over several processes that are killed, moved to other topologies, or given storage that fails."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from trainer import metrics
from trainer.checkpoint import catalog
from trainer.launch.spec import Job
from trainer.rundir import RunDir

HERE = Path(__file__).parent
LIMIT_SECONDS = 300
TINY = ["digits_mlp", "--set", "observe.log_every_steps=1", "--set", "debug.log_example_ids=true"]
TINY += ["--set", "debug.digest_every=1", "--set", "checkpoint.every_steps=1", "--set", "data.global_batch=48"]
TINY += ["--set", "task.args.dropout=0.5", "--set", "mesh.virtual_replicas=8"]


def command(path, processes=1, *more, mesh=(2, 2), steps=4):
    words = [sys.executable, "-m", "trainer", "train", *TINY, "--run-dir", str(path), "--processes", str(processes)]
    words += ["--set", f"mesh.nodes={mesh[0]}", "--set", f"mesh.devices_per_node={mesh[1]}"]
    return [*words, "--set", f"run.num_steps={steps}", *more]


def train(path, processes=1, *more, **options):
    words = command(path, processes, *more, **options)
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


def completed(*arguments, **options):
    done = train(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def rows_of(path):
    return metrics.read(path / "metrics.jsonl", "train")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Six steps on 2 nodes x 2 devices by 2 processes, of which the first four are also a run of their own."""
    path = tmp_path_factory.mktemp("unbroken") / "run"
    completed(path, 2, steps=6)
    return path


def from_step(unbroken, tmp_path, step=4):
    """A copy of the run, gone back to ``step``."""
    path = tmp_path / "run"
    subprocess.run(["cp", "-a", str(unbroken), str(path)], check=True)
    catalog.go_back(path / "checkpoints", step)
    return path


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("processes", "mesh"),
    [
        (1, (1, 4)),
        pytest.param(1, (1, 1), marks=SLOW),
        pytest.param(4, (4, 1), marks=SLOW),
        pytest.param(2, (2, 4), marks=SLOW),
        pytest.param(1, (2, 2), marks=SLOW),
    ],
)
def test_a_run_goes_on_on_another_topology(unbroken, tmp_path, processes, mesh):
    path = from_step(unbroken, tmp_path)
    done = completed(path, processes, "--resume", mesh=mesh, steps=6)
    assert "the checkpoint was saved on 2 processes, 2 x 2 devices" in done.stdout
    for row, expected in zip(rows_of(path), rows_of(unbroken), strict=True):
        assert row["example_ids"] == expected["example_ids"]
        assert row["learning_rate"] == expected["learning_rate"]
        assert abs(row["loss"] - expected["loss"]) <= 1e-6
    assert [row["attempt"] for row in rows_of(path)] == [1, 1, 1, 1, 2, 2]


def test_what_does_not_divide_is_refused_with_what_does(unbroken, tmp_path):
    path = from_step(unbroken, tmp_path)
    done = train(path, 1, "--resume", "--set", 'mesh.virtual_replicas="auto"', mesh=(1, 3), steps=6)
    assert done.returncode == 2
    assert "numbers that can: 1, 2, 4, 8" in done.stderr


@pytest.mark.slow
def test_three_devices_take_over_where_they_divide(tmp_path):
    """12 virtual replicas, on 2 x 2 devices and then on 1 x 3."""
    twelve = ["--set", "mesh.virtual_replicas=12"]
    completed(tmp_path / "whole", 2, *twelve, steps=4)
    completed(tmp_path / "run", 2, *twelve, steps=4)
    catalog.go_back(tmp_path / "run" / "checkpoints", 2)
    completed(tmp_path / "run", 3, *twelve, "--resume", mesh=(1, 3), steps=4)
    for row, expected in zip(rows_of(tmp_path / "run"), rows_of(tmp_path / "whole"), strict=True):
        assert row["example_ids"] == expected["example_ids"]
        assert abs(row["loss"] - expected["loss"]) <= 1e-6


@pytest.mark.slow
def test_every_example_of_an_epoch_comes_once_over_four_then_two_then_three_processes(tmp_path):
    """30 batches of 48 are an epoch of 1,437 examples; a part of it on 4, 2 and 3 processes each."""
    shared = ["--set", "mesh.virtual_replicas=12", "--set", "checkpoint.every_steps=10"]
    for processes, steps in ((4, 10), (2, 20), (3, 30)):
        completed(tmp_path / "run", processes, *shared, "--resume", mesh=(processes, 1), steps=steps)
    ids = [example for row in rows_of(tmp_path / "run") for example in row["example_ids"]]
    assert sorted(ids) == list(range(1437))
    assert [row["attempt"] for row in rows_of(tmp_path / "run")] == [1] * 10 + [2] * 10 + [3] * 10


def gone(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_directory_that_is_deleted_under_the_run_ends_it(tmp_path, is_replaced):
    """Moved away, which is as if deleted at once; another of the same name does not pass for it."""
    path, moved = tmp_path / "run", tmp_path / "moved"
    process = subprocess.Popen(
        command(path, steps=100_000), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not catalog.newest_in(path / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.05)
        path.rename(moved)
        if is_replaced:
            (path / "checkpoints").mkdir(parents=True)
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 3, errors
    assert "the directory is gone" in errors
    assert not any(entry.is_good for entry in catalog.entries(path / "checkpoints"))
    assert catalog.newest_in(moved / "checkpoints")


def kill_while_saving(path, seconds):
    """Starts or resumes a run that saves at every step, and kills it some time after its first new checkpoint."""
    directory = path / "checkpoints"
    newest = max((entry.step for entry in catalog.entries(directory)), default=0)
    words = command(path, 2, "--resume", "--set", "task.args.hidden=[1024]", steps=100_000)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(entry.is_good and entry.step > newest for entry in catalog.entries(directory)):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children()
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert all(gone(worker) for worker in alive)


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=SLOW)])
def test_a_run_that_is_killed_at_any_moment_goes_on_bit_for_bit(tmp_path, num_kills):
    """Every step that was done twice was done alike, and what is selected is good to the last byte."""
    path, moments = tmp_path / "run", random.Random(num_kills)
    for _ in range(num_kills):
        kill_while_saving(path, moments.uniform(0, 0.5))
        found = catalog.select(path / "checkpoints", RunDir(path).id)
        assert found.step is not None
        assert all("was never finished" in warning for warning in found.warnings), found.warnings
    digests = {}
    for line in (path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line) if line.endswith("}") else {}
        if "param_digest" in row:
            digests.setdefault(row["step"], set()).add(row["param_digest"])
    assert sorted(digests) == list(range(1, max(digests) + 1))
    assert all(len(seen) == 1 for seen in digests.values()), digests


@contextmanager
def tmpfs(path, size):
    """A file system in memory of ``size``."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system to be filled")
@pytest.mark.slow
def test_a_full_disk_ends_the_run_plainly_and_it_goes_on_once_there_is_room(tmp_path):
    """Adam's moments and 0.8 million parameters: a checkpoint takes 9 MB, so the second fills 20 MB."""
    path, disk = tmp_path / "run", tmp_path / "disk"
    options = ["--set", f'checkpoint.directory="{disk}/c"', "--set", "task.args.hidden=[10240]"]
    options += ["--set", 'optimizer.name="adamw"', "--set", "optimizer.momentum=0.0"]
    with tmpfs(disk, "20m"):
        done = train(path, 2, *options, steps=4)
        assert done.returncode == 3, done.stderr
        (line,) = done.stderr.splitlines()
        assert "could not be written" in line
        assert "No space left on device" in line
        assert "is intact" in line
        before = [entry for entry in catalog.entries(disk / "c", checksums=True) if entry.is_good]
        assert before
        verdict = json.loads((path / "verdict.json").read_text())
        assert (verdict["exit_code"], verdict["outcome"]) == (3, "input_refused")

        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        done = completed(path, 2, *options, "--resume", steps=4)
        assert f"resumed from step {before[0].step}" in done.stdout
        assert catalog.select(disk / "c").step == 4
        assert not list((disk / "c").glob("*.orbax*"))


def test_directories_that_are_not_shared_are_told(tmp_path):
    """Each rank has one of its own."""
    run_dir, attempt = RunDir.open(tmp_path / "run")
    config = subprocess.run(
        [sys.executable, "-m", "trainer", "config", "digits_mlp", "--set", "mesh.devices_per_node=1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_SECONDS,
    ).stdout
    job = Job(config, str(run_dir.path), attempt, 2, entry="worker_entries:unshared")
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(HERE / "run_agent.py"), json.dumps(job.__dict__)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "is not shared: rank 0 on" in done.stderr
    assert "does not see what rank 1 on" in done.stderr
    assert time.monotonic() - begin < 60


def test_plain_orbax_reads_the_parameters_as_readme_says(unbroken, tmp_path):
    root = Path(os.environ.get("LOCKSTEP_CHECKOUT", HERE.parents[1]))
    found = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (program,) = [block for block in found if "ocp.PyTreeCheckpointer" in block]
    program = program.replace("runs/mlp/checkpoints/600", str(unbroken / "checkpoints" / "6"))
    program += 'import sys\nassert "trainer" not in sys.modules\nprint(params["head"]["kernel"].shape)\n'
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(128, 10)"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path):
    """Seen from outside, at save 10 and save 50 of 52."""
    path = tmp_path / "run"
    words = command(path, 1, "--no-agent", "--set", "checkpoint.every_steps=10", mesh=(1, 2), steps=520)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    sizes = {}
    try:
        while process.poll() is None:
            newest = max((entry.step for entry in catalog.entries(path / "checkpoints") if entry.is_good), default=0)
            for step in (100, 500):
                if newest >= step and step not in sizes:
                    sizes[step] = psutil.Process(process.pid).memory_info().rss
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    assert np.isclose(sizes[500], sizes[100], rtol=0.1), sizes
