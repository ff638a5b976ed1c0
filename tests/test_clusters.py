"""Where an agent finds itself: from options and environments like the clusters' own."""

import os
import subprocess
import sys

import pytest

from trainer.errors import SettingsRefused
from trainer.launch.clusters import SLURM_PORTS, Options, Place, detect, locate, parse_address, scontrol_hostnames

TOKEN = "0123456789abcdef"
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08],login",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "LOCKSTEP_NUM_HOSTS": "3", "LOCKSTEP_RENDEZVOUS": "run-0.run:29400"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_precondition_transports": "6a0c6d66e3c8f9fe-5b76c93f843edc69",
}


def expand(nodelist):
    """As scontrol does it."""
    assert nodelist == "gpu[07-08],login"
    return ["gpu07", "gpu08", "login"]


def found(environ, *given):
    """(num_hosts, host_index, rendezvous), from the environment and these options."""
    place = locate(environ, Options(*given), expand)
    return place.num_hosts, place.host_index, place.rendezvous


def refusal(environ, *given):
    with pytest.raises(SettingsRefused) as caught:
        locate(environ, Options(*given), expand)
    return str(caught.value)


def test_alone_unless_something_says_otherwise():
    assert locate({}, Options()) == locate({}, Options(1)) == locate({}, Options(1, 0, "a:1")) == Place(1, 0, "", "")


def test_options_alone():
    place = locate({"LOCKSTEP_TOKEN": TOKEN}, Options(2, 1, "node1:29400"))
    assert place == Place(2, 1, "node1:29400", TOKEN)
    assert TOKEN not in repr(place)


def test_slurm_tells_all_and_scontrol_expands():
    num_hosts, index, rendezvous = found(SLURM)
    host, port = parse_address(rendezvous)
    assert (num_hosts, index, host) == (3, 1, "gpu07")
    assert port in SLURM_PORTS


def test_slurm_gives_jobs_steps_and_restarts_their_own_port_or_token():
    places = [
        locate(SLURM | change, Options(), expand)
        for change in ({}, {"SLURM_JOB_ID": "18"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"})
    ]
    assert len({place.rendezvous for place in places}) == 3, "a restart may use the same port"
    assert len({place.token for place in places}) == 4
    assert locate(SLURM, Options(), expand) == places[0]


def test_kubernetes_and_open_mpi():
    assert found(KUBERNETES | {"LOCKSTEP_TOKEN": TOKEN}) == (3, 1, "run-0.run:29400")
    assert found(OPEN_MPI, None, None, "node1:29400") == (3, 1, "node1:29400")


@pytest.mark.parametrize(
    "alone",
    [
        {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1"},
        SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
        KUBERNETES | {"LOCKSTEP_NUM_HOSTS": "1", "JOB_COMPLETION_INDEX": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_cluster_of_one(alone):
    assert found(alone) == (1, 0, "")


@pytest.mark.parametrize("environ", [SLURM, KUBERNETES, OPEN_MPI], ids=["slurm", "kubernetes", "open mpi"])
def test_options_win(environ):
    assert found(environ | {"LOCKSTEP_TOKEN": TOKEN}, 2, 0, "mine:1") == (2, 0, "mine:1")
    assert found(environ, 1) == (1, 0, "")
    assert found(environ | {"LOCKSTEP_TOKEN": TOKEN}, None, None, "mine:1") == (3, 1, "mine:1")
    assert found(environ | {"LOCKSTEP_TOKEN": TOKEN}, 3, None, "mine:1") == (3, 1, "mine:1")


def test_a_given_token_counts_before_a_derived_one():
    assert locate(SLURM | {"LOCKSTEP_TOKEN": TOKEN}, Options(), expand).token == TOKEN
    assert len(locate(OPEN_MPI, Options(None, None, "a:1")).token) == 64


REFUSALS = {
    "no hosts": ({}, (0,), "--num-hosts 0: must be at least 1"),
    "only the number": ({}, (2,), "needs --host-index and --rendezvous too"),
    "only the index": ({}, (None, 1), "needs --num-hosts and --rendezvous too"),
    "only the address": ({}, (None, None, "a:1"), "needs --num-hosts and --host-index too"),
    "no address": ({}, (2, 1), "needs --rendezvous too (no SLURM, Kubernetes or Open MPI was found)"),
    "index too large": ({}, (2, 2, "a:1"), "--host-index 2: hosts are counted from 0 to 1 with --num-hosts 2"),
    "index of one": ({}, (1, 1), "--host-index 1: hosts are counted from 0 to 0 with --num-hosts 1"),
    "index below 0": ({}, (None, -1), "--host-index -1: hosts are counted from 0"),
    "no token": ({}, (2, 1, "a:1"), "needs the environment variable LOCKSTEP_TOKEN, alike on all of them"),
    "short token": ({"LOCKSTEP_TOKEN": "x"}, (2, 1, "a:1"), "LOCKSTEP_TOKEN has less than 16 characters"),
    "half against the cluster": (SLURM, (4,), "--num-hosts 4, but SLURM says host 1 of 3: give both"),
    "the other half": (SLURM, (None, 2), "--host-index 2, but SLURM says host 1 of 3: give both"),
    "mpi has no address": (OPEN_MPI, (), "needs --rendezvous too (Open MPI says host 1 of 3)"),
    "two agents a host": (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (), "mpirun --map-by ppr:1:node"),
    "srun with more tasks": (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, (), "srun --ntasks-per-node=1"),
    "no step": ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}, (), "srun --ntasks-per-node=1 lockstep train"),
    "node out of range": (SLURM | {"SLURM_NODEID": "3"}, (), "SLURM_NODEID = 3, but scontrol lists 3 nodes"),
    "no number": (SLURM | {"SLURM_NODEID": "x"}, (), "SLURM_NODEID = 'x' in the environment is no number"),
    "pod without a number": ({"JOB_COMPLETION_INDEX": "1"}, (), "LOCKSTEP_NUM_HOSTS is not: set it"),
    "pod out of range": (KUBERNETES | {"JOB_COMPLETION_INDEX": "3"}, (), "set the latter to the Job's completions"),
    "two that disagree": (
        SLURM | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"},
        (),
        "Open MPI says host 2 of 3 but SLURM says host 1 of 3: give --num-hosts, --host-index and --rendezvous",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_in_one_line(case):
    environ, given, message = REFUSALS[case]
    text = refusal(environ, *given)
    assert message in text
    assert "\n" not in text


def test_two_clusters_that_agree_are_one():
    assert detect(SLURM | OPEN_MPI, expand) == detect(OPEN_MPI)


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1", "a:1:2", "a b:1", "fd00::1:5", "[]:1"]
)
def test_no_address(text):
    assert "must be HOST:PORT" in refusal({"LOCKSTEP_TOKEN": TOKEN}, 2, 0, text)


def test_the_command_line_refuses_what_does_not_fit_before_anything_is_touched(tmp_path):
    argv = [sys.executable, "-m", "trainer", "train", "digits_mlp", "--run-dir", str(tmp_path / "run")]
    environ = {**os.environ, "LOCKSTEP_TOKEN": TOKEN}
    for more, message in (
        (["--num-hosts", "2"], "needs --host-index and --rendezvous too"),
        (["--num-hosts", "2", "--host-index", "1", "--rendezvous", "127.0.0.1:5"], "a loopback address"),
        (["--num-hosts", "2", "--host-index", "1", "--rendezvous", "a:5", "--no-agent"], "--no-agent runs on one host"),
    ):
        done = subprocess.run([*argv, *more], env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_scontrol_that_is_not_there_is_explained(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError(2, "No such file", "scontrol")

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(SettingsRefused, match=r"scontrol show hostnames 'a' failed .*: give --rendezvous HOST:PORT"):
        scontrol_hostnames("a")
