"""Between processes the compiled step keeps its exchanges apart, so that they can run beside the backward pass."""

import json
import os
from pathlib import Path

import pytest

from trainer.launch import agent
from trainer.launch.spec import Job
from trainer.rundir import RunDir

SETTINGS = """
run.name = "overlap"
task.target = "models.mlp:MLPClassifier"
task.args = { image_size = 8, channels = 1, hidden = [16, 16, 16, 16], num_classes = 10 }
data = { source = "digits", global_batch = 8 }
mesh = { nodes = 2, devices_per_node = 2, platform = "cpu" }
sync = { algorithm = "xla", bucket_mib = 1e-6 }
"""
LEAVES = 10
"""Of the gradient: a kernel and a bias for each of the five layers."""


def all_reduces(path: Path, num_processes: int) -> list[int]:
    """How many all-reduces each process's compiled step has."""
    run_dir, attempt = RunDir.open(path)
    job = Job(SETTINGS, str(run_dir.path), attempt, num_processes, entry="worker_entries:compiled_step")
    assert agent.run(job) == 0
    return [json.loads((path / f"compiled-{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("LOCKSTEP_COMPILATION_CACHE", "off")
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.slow
def test_exchanges_between_processes_are_kept_apart_unless_the_user_wants_them_merged(tmp_path, monkeypatch):
    apart = all_reduces(tmp_path / "apart", 2)
    assert apart[0] == apart[1] >= LEAVES
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=")
    merged = all_reduces(tmp_path / "merged", 2)
    assert merged[0] == merged[1] <= apart[0] - LEAVES + 1
