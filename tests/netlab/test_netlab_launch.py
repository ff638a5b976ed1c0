"""scripts/ssh and scripts/mpi for real: from one host of the lab, sshd and orted start the agents on the others."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer import metrics

SCRIPTS = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[2])) / "scripts"
TOKEN = "a secret for these tests"
SETTINGS = ["data.global_batch=24", "observe.log_every_steps=1", "mesh.devices_per_node=1", "mesh.nodes=2"]
SSHD = """
HostKey {work}/key
AuthorizedKeysFile {work}/key.pub
ListenAddress {address}
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
SetEnv HOME={work}
"""
SSH = """
IdentityFile {work}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def wait_until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.05)


class Site:
    """Two hosts of a lab with an sshd each, and what the scripts need to use them."""

    def __init__(self, lab, work):
        self.lab, self.work = lab, work
        Path("/run/sshd").mkdir(exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", work / "key"], check=True)
        (work / "ssh.conf").write_text(SSH.format(work=work))
        for host, address in enumerate(lab.addresses):
            conf = work / f"sshd-{host}.conf"
            conf.write_text(SSHD.format(work=work, address=address))
            lab.popen(host, [which("sshd"), "-D", "-e", "-f", str(conf)], stderr=subprocess.DEVNULL)
        for host in range(2):
            reach = [*f"ssh -F {work}/ssh.conf host{host} true".split()]
            wait_until(lambda reach=reach: lab.popen(0, reach, stderr=subprocess.DEVNULL).wait(timeout=60) == 0)
        command = work / "lockstep"
        command.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={os.environ.get('PYTHONPATH', '')} LOCKSTEP_COMPILATION_CACHE=off\n"
            f'exec {sys.executable} -P -m trainer "$@"\n'
        )
        command.chmod(0o755)
        self.env = {
            "LOCKSTEP_TOKEN": TOKEN,
            "LOCKSTEP_COMMAND": str(command),
            "SSH": f"ssh -F {work}/ssh.conf",
            "OMPI_MCA_plm_rsh_args": f"-F {work}/ssh.conf",
            "OMPI_MCA_orte_tmpdir_base": str(work),
        }

    def start(self, script, *settings):
        argv = [
            str(SCRIPTS / script),
            "host0,host1",
            "digits_mlp",
            "--run-dir",
            str(self.work / "run"),
            "--processes",
            "1",
        ]
        for setting in (*SETTINGS, *settings):
            argv += ["--set", setting]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.lab.popen(0, argv, env=self.env, cwd=self.work, **streams)

    def agents(self):
        """The pid of each host's agent."""
        found = {host: self.lab.commands(host).items() for host in range(2)}
        return {host: pid for host, items in found.items() for pid, words in items if "-m trainer train" in words}

    def rows(self):
        path = self.work / "run/metrics.jsonl"
        return metrics.read(path, "train") if path.exists() else []

    def command_lines(self):
        return [words for host in range(2) for words in self.lab.commands(host).values()]


def which(program):
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@pytest.fixture
def site(netlab, root, tmp_path):
    packages = {"sshd": "openssh-server", "ssh": "openssh-client", "mpirun": "openmpi-bin"}
    missing = [package for program, package in packages.items() if not which(program)]
    if missing:
        needed = f"apt-get install {' '.join(missing)}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(needed)
    with netlab.Lab(hosts=2) as lab:
        yield Site(lab, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ssh/run.sh", "mpi/run.sh"])
def test_a_run_completes(site, script):
    process = site.start(script, "run.num_steps=6")
    wait_until(lambda: len(site.agents()) == 2 or process.poll() is not None)
    assert not any(TOKEN in line for line in site.command_lines())
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert [row["step"] for row in site.rows()] == [1, 2, 3, 4, 5, 6]
    assert "2 processes" in said


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ssh/run.sh", "mpi/run.sh"])
def test_the_exit_code_is_the_agents(site, script):
    process = site.start(script, "run.num_steps=6", 'debug.faults=[{kind="kill", rank=1, step=3}]')
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 6, said
    assert json.loads((site.work / "run/verdict.json").read_text())["exit_code"] == 6
    wait_until(lambda: not site.agents())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ssh/run.sh", "mpi/run.sh"])
def test_ending_the_launcher_saves_and_ends_the_agents(site, script):
    process = site.start(script, "run.num_steps=100000")
    wait_until(lambda: len(site.rows()) > 5)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=240)
    wait_until(lambda: not site.agents())
    verdict = json.loads((site.work / "run/verdict.json").read_text())
    assert verdict["exit_code"] == 75
    assert verdict["last_checkpoint"]["step"] > 5
