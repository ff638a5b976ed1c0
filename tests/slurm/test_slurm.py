"""scripts/slurm/train.sbatch under a real SLURM: a run completes whatever happens on the way, and comes back no more
often than it should."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from trainer import metrics

SCRIPT = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[2])) / "scripts/slurm/train.sbatch"
SETTINGS = ["data.global_batch=24", "observe.log_every_steps=1", "mesh.devices_per_node=1", "checkpoint.every_steps=10"]
SLOW_STEPS = 'debug.faults=[{kind="delay", rank=0, step=1, seconds=0.1, attempt=0}]'


class Job:
    """A submitted run: ``options`` are sbatch's, ``settings`` the run's."""

    def __init__(self, slurm, path, *settings, options=(), **env):
        self.slurm, self.path, self.log = slurm, path / "run", path / "log"
        command = path / "lockstep"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m trainer "$@"\n')
        command.chmod(0o755)
        env = {"LOCKSTEP_COMMAND": str(command), "LOCKSTEP_COMPILATION_CACHE": "off", "XLA_FLAGS": "", **env}
        argv = [*options, f"--output={self.log}", str(SCRIPT), "digits_mlp", "--run-dir", str(self.path)]
        for setting in (*SETTINGS, *settings):
            argv += ["--set", setting]
        self.id = slurm.submit(*argv, **env)
        assert self.id, "sbatch refused"

    def wait_for_step(self, step):
        self.slurm.wait_until(lambda: len(self.rows()) >= step, 240)

    def rows(self):
        path = self.path / "metrics.jsonl"
        return metrics.read(path, "train") if path.exists() else []

    def complete(self, num_steps, attempts):
        """Checks that the run has completed, with one row a step, in so many attempts."""
        assert self.slurm.wait(self.id, 240) == "COMPLETED", self.log.read_text()
        assert [row["step"] for row in self.rows()] == list(range(1, num_steps + 1))
        assert {row["attempt"] for row in self.rows()} <= set(range(1, attempts + 1))
        assert sorted(p.name for p in self.path.glob("attempts/*")) == [str(k) for k in range(1, attempts + 1)]

    def verdict(self, attempt):
        return json.loads((self.path / f"attempts/{attempt}/verdict.json").read_text())


@pytest.fixture(autouse=True)
def idle(slurm):
    """Nothing is left of one test for the next."""
    yield
    slurm.call("scancel", "--user=root")
    slurm.wait_until_idle()


def test_a_run_on_two_nodes_completes(slurm, tmp_path):
    job = Job(slurm, tmp_path, "run.num_steps=6")
    job.complete(6, attempts=1)
    assert "train.sbatch: completed" in job.log.read_text()
    assert "2 x cpu (cpu) = 2 nodes x 1 local" in job.log.read_text()


@pytest.mark.slow
def test_a_run_that_a_higher_partition_pre_empts_comes_back(slurm, tmp_path):
    job = Job(slurm, tmp_path, "run.num_steps=200", SLOW_STEPS)
    job.wait_for_step(15)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 1\n")
    slurm.submit("--partition=high", "--nodes=3", "--output=/dev/null", str(urgent))
    slurm.hurry(job.id)
    assert job.verdict(1)["exit_code"] == 75
    job.complete(200, attempts=2)


@pytest.mark.slow
def test_a_run_that_is_out_of_time_comes_back(slurm, tmp_path):
    job = Job(slurm, tmp_path, "run.num_steps=1000", SLOW_STEPS, options=["--time=2", "--signal=USR1@60"])
    slurm.hurry(job.id)
    saved = job.verdict(1)["last_checkpoint"]["step"]
    assert (job.verdict(1)["exit_code"], len(job.rows())) == (75, saved)
    job.wait_for_step(saved + 5)
    assert [row["step"] for row in job.rows()][: saved + 5] == list(range(1, saved + 6))


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_comes_back(slurm, tmp_path):
    job = Job(slurm, tmp_path, "run.num_steps=30", 'debug.faults=[{kind="kill", rank=1, step=15}]')
    slurm.hurry(job.id)
    job.complete(30, attempts=2)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_nodes(slurm, tmp_path):
    fault = 'debug.faults=[{kind="kill", rank=1, step=15}]'
    first = Job(slurm, tmp_path, "run.num_steps=30", fault, LOCKSTEP_MAX_REQUEUES="0")
    assert slurm.wait(first.id, 240) == "FAILED"
    second = Job(slurm, tmp_path, "run.num_steps=30", options=["--nodes=1"])
    second.complete(30, attempts=2)
    assert "1 x cpu (cpu) = 1 node x 1 local" in second.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_a_run_that_loses_a_node_comes_back(slurm, tmp_path, lost):
    """Another node than the controller's; with 1 the batch script is lost as well."""
    job = Job(slurm, tmp_path, "run.num_steps=300", SLOW_STEPS, options=["--nodelist=host1,host2"])
    job.wait_for_step(15)
    slurm.lab.kill_host(lost)
    try:
        slurm.wait_until(lambda: slurm.has_come_back(job.id), 240)
    finally:
        slurm.start_node(lost)
    slurm.hurry(job.id)
    job.complete(300, attempts=2)


@pytest.mark.slow
def test_a_cancelled_run_does_not_come_back(slurm, tmp_path):
    job = Job(slurm, tmp_path, "run.num_steps=1000", SLOW_STEPS)
    job.wait_for_step(5)
    slurm.call("scancel", job.id)
    assert slurm.wait(job.id, 240) == "CANCELLED"
    slurm.wait_until_idle()
    assert slurm.job(job.id)["Restarts"] == "0"
    assert job.verdict(1)["exit_code"] == 75, "it was saved all the same"


@pytest.mark.slow
def test_a_run_comes_back_only_so_often(slurm, tmp_path):
    fault = 'debug.faults=[{kind="kill", rank=1, step=2, attempt=0}]'
    job = Job(slurm, tmp_path, "run.num_steps=6", fault, LOCKSTEP_MAX_REQUEUES="1")
    slurm.hurry(job.id)
    assert slurm.wait(job.id, 240) == "FAILED"
    assert "the job has come back 1 times (LOCKSTEP_MAX_REQUEUES=1), so it ends here" in job.log.read_text()


@pytest.mark.slow
def test_a_run_that_is_refused_does_not_come_back(slurm, tmp_path):
    job = Job(slurm, tmp_path, "run.num_steps=0")
    assert slurm.wait(job.id, 240) == "FAILED"
    assert "exit code 2: another try would end alike" in job.log.read_text()


@pytest.mark.slow
def test_a_killed_agent_ends_all_and_the_run_comes_back(slurm, tmp_path):
    job = Job(slurm, tmp_path, "run.num_steps=100", SLOW_STEPS)
    job.wait_for_step(15)
    pids = [pid for pid, words in slurm.lab.commands(1).items() if "trainer train" in words]
    os.kill(max(pids), signal.SIGKILL)
    slurm.hurry(job.id)
    job.complete(100, attempts=2)
