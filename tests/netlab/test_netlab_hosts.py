"""Runs on several hosts, with agents that meet over a real link: they train together, and end together."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from trainer import metrics

TOKEN = "a secret for these tests"
PORT = 29400
SETTINGS = ["data.global_batch=24", "observe.log_every_steps=1", "mesh.devices_per_node=2", "mesh.nodes=2"]
LONG = ["run.num_steps=100000", "checkpoint.every_steps=20"]
"""More steps than any test waits for."""


class Run:
    """The agents of one run, one on each host of a lab."""

    def __init__(self, lab, path, *settings, processes=2, options=(), tokens=(TOKEN, TOKEN)):
        self.lab, self.path = lab, path
        argv = [sys.executable, "-P", "-m", "trainer", "train", "digits_mlp", "--run-dir", str(path)]
        argv += ["--processes", str(processes), "--num-hosts", str(lab.hosts), "--host-index", "{host}"]
        argv += ["--rendezvous", f"{{address0}}:{PORT}", *options]
        for setting in (*SETTINGS, *settings):
            argv += ["--set", setting]
        self.argv, self.agents = argv, {}
        for host, token in enumerate(tokens):
            self.start(host, token)

    def start(self, host, token):
        env = {"LOCKSTEP_TOKEN": token, "LOCKSTEP_COMPILATION_CACHE": "off", "XLA_FLAGS": ""}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.agents[host] = self.lab.popen(host, self.lab.fill(self.argv, host), env=env, **pipes)

    def end(self, host, seconds=240):
        """The agent's exit code and what it said, once it is gone and nothing is left on its host."""
        _, err = self.agents[host].communicate(timeout=seconds)
        assert self.lab.pids(host) == [], "orphans"
        return self.agents[host].returncode, err

    def wait_for_step(self, step, seconds=240):
        deadline = time.monotonic() + seconds
        while self.last_step() < step:
            assert time.monotonic() < deadline, [agent.poll() for agent in self.agents.values()]
            time.sleep(0.05)

    def last_step(self):
        path = self.path / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def verdict(self, name="verdict.json"):
        return json.loads((self.path / name).read_text())


@pytest.fixture
def lab(netlab, root):
    with netlab.Lab(hosts=2, rate="1gbit") as made:
        yield made


def test_two_hosts_train_together_with_several_workers_each(lab, tmp_path):
    run = Run(lab, tmp_path / "run", "run.num_steps=6", "debug.log_example_ids=true")
    commands = [words for host in range(2) for words in lab.commands(host).values()]
    assert [run.end(host)[0] for host in range(2)] == [0, 0]
    assert not any(TOKEN in command for command in commands)
    rows = metrics.read(run.path / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(len(set(row["example_ids"])) == 24 for row in rows)
    assert sorted(path.name for path in run.path.glob("attempts/1/logs/*")) == [f"rank-{r}.log" for r in range(4)]
    assert run.verdict()["exit_code"] == 0
    assert lab.bytes_sent(1) > 6 * 4 * 9610, "the gradients crossed the link"
    for path in run.path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_cut_link_ends_both_sides_within_the_lease(lab, tmp_path):
    run = Run(lab, tmp_path / "run", *LONG, processes=1)
    run.wait_for_step(25)
    lab.cut(1)
    cut = time.monotonic()
    (code0, err0), (code1, err1) = run.end(0), run.end(1)
    assert time.monotonic() - cut < 15
    assert (code0, code1) == (6, 6)
    assert "host 1 (" in err0
    assert "with ranks 1 is lost: nothing was heard of it for 5 s" in err0
    assert "agent 0 at" in err1
    assert "is lost: nothing was heard of it for 5 s" in err1
    verdict = run.verdict()
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1]
    assert verdict["last_checkpoint"]["step"] >= 20
    assert run.verdict("attempts/1/verdict.host-1.json")["exit_code"] == 6


@pytest.mark.slow
def test_a_partition_that_heals_in_time_changes_nothing(lab, tmp_path):
    run = Run(lab, tmp_path / "run", "run.num_steps=400", processes=1)
    run.wait_for_step(5)
    lab.cut(1)
    pause(1.5)
    lab.heal(1)
    assert [run.end(host)[0] for host in range(2)] == [0, 0]


def pause(seconds):
    """The cut has to last for a while: there is nothing to wait for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.slow
def test_a_partition_that_heals_too_late_leaves_two_ended_hosts(lab, tmp_path):
    run = Run(lab, tmp_path / "run", *LONG, processes=1)
    run.wait_for_step(5)
    lab.cut(0)
    pause(6.0)
    lab.heal(0)
    assert [run.end(host)[0] for host in range(2)] == [6, 6]


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_dies_ends_the_other(lab, tmp_path, host):
    run = Run(lab, tmp_path / "run", *LONG)
    run.wait_for_step(5)
    lab.kill_host(host)
    killed = time.monotonic()
    code, err = run.end(1 - host)
    run.agents[host].communicate(timeout=240)
    assert (code, time.monotonic() - killed < 15) == (6, True), err
    if host == 0:
        assert "host 0 (" in err
        assert run.verdict("attempts/1/verdict.host-1.json")["exit_code"] == 6
    else:
        assert "host 1 (" in err
        assert "with ranks 2, 3 is lost" in err


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("whom", ["agent", "worker"])
def test_a_signal_to_one_host_saves_the_same_step_everywhere(lab, tmp_path, host, whom):
    run = Run(lab, tmp_path / "run", *LONG)
    run.wait_for_step(5)
    target = run.agents[host].pid
    if whom == "worker":
        target = next(pid for pid, words in lab.commands(host).items() if "trainer.launch.worker" in words)
    os.kill(target, signal.SIGTERM)
    ends = [run.end(index) for index in range(2)]
    assert [code for code, _ in ends] == [75, 75], ends
    step = run.verdict()["last_checkpoint"]["step"]
    for _, err in ends:
        assert f"saved step {step}" in err
    assert run.last_step() == step


@pytest.mark.slow
def test_restarts_go_on_on_all_hosts(lab, tmp_path):
    fault = 'debug.faults=[{kind="kill", rank=3, step=30}]'
    settings = ("run.num_steps=50", "checkpoint.every_steps=20", fault)
    run = Run(lab, tmp_path / "run", *settings, options=("--max-restarts", "1"))
    ends = [run.end(host) for host in range(2)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "starting again from step 20 (restart 1 of 1)" in ends[1][1]
    rows = metrics.read(run.path / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert {row["attempt"] for row in rows} == {1, 2}


@pytest.mark.slow
def test_a_worker_stuck_on_one_host_is_named_on_both(lab, tmp_path):
    run = Run(lab, tmp_path / "run", *LONG, "timeouts.step_seconds=5", 'debug.faults=[{kind="spin", rank=2, step=5}]')
    ends = [run.end(host) for host in range(2)]
    assert [code for code, _ in ends] == [5, 5], ends
    for _, err in ends:
        assert f"rank 2 (host {lab.hostname(1)}) never entered step 5" in err
    assert "Thread" in (run.path / "attempts/1/logs/rank-2.log").read_text()


def test_a_host_with_another_token_is_told_so_while_host_0_waits(lab, tmp_path):
    run = Run(lab, tmp_path / "run", "run.num_steps=2", processes=1, tokens=(TOKEN, "of another run, perhaps"))
    code, err = run.end(1)
    assert code == 2
    (line,) = err.splitlines()
    assert (
        f"host 1: agent 0 at --rendezvous {lab.addresses[0]}:{PORT} dropped us at the proof of LOCKSTEP_TOKEN" in line
    )
    assert TOKEN not in err
    assert run.agents[0].poll() is None
    run.start(1, TOKEN)
    assert [run.end(host)[0] for host in range(2)] == [0, 0]


@pytest.mark.slow
def test_a_host_that_never_comes_is_named(lab, tmp_path):
    argv = [sys.executable, "-P", "-m", "trainer", "train", "digits_mlp", "--run-dir", str(tmp_path / "run")]
    argv += ["--num-hosts", "3", "--rendezvous", f"{lab.addresses[0]}:{PORT}", "--set", "timeouts.init_seconds=8"]
    argv += ["--host-index"]
    env = {"LOCKSTEP_TOKEN": TOKEN}
    agents = [lab.popen(h, [*argv, str(h)], env=env, stderr=subprocess.PIPE, text=True) for h in range(2)]
    for agent in agents:
        _, err = agent.communicate(timeout=240)
        assert agent.returncode == 5
        assert f"only hosts 0 ({lab.hostname(0)}), 1 ({lab.hostname(1)}) of --num-hosts 3" in err
        assert "missing: 2." in err
