"""A real SLURM on one machine: a controller and three nodes, each in a net-lab host, with a munged of their own."""

import importlib.util
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[2]))
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "tc")
NUM_NODES = 3

CONF = """
ClusterName=lab
SlurmctldHost={hostname}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge.socket
CredType=cred/munge
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool-%n
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/slurmd-%n.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=20
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


def which(program: str) -> str:
    """Its path; the daemons are often not on a user's."""
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or ""


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.1)


class Slurm:
    """The cluster; ``work`` is a directory for its files, on a disk that its nodes share."""

    def __init__(self, lab, work: Path) -> None:
        self.lab, self.work = lab, work
        (work / "state").mkdir()
        key = work / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName=host{index} NodeHostname={lab.hostname(index)} NodeAddr={address} CPUs=1 State=UNKNOWN"
            for index, address in enumerate(lab.addresses)
        )
        fields = {"hostname": lab.hostname(0), "address": lab.addresses[0], "work": work, "nodes": nodes}
        (work / "slurm.conf").write_text(CONF.format(**fields))
        (work / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # --force: the directories above may be closed to other users, which munged only warns of then.
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        paths = [f"--{option}={work}/munge.{name}" for option, name in names.items()]
        self.daemon(0, "munged", "--foreground", "--force", f"--key-file={key}", *paths)
        wait_until((work / "munge.socket").exists, 120)
        self.daemon(0, "slurmctld", "-D", "-f", str(work / "slurm.conf"))
        for index in range(lab.hosts):
            self.start_node(index)
        self.wait_until_idle()

    def daemon(self, host: int, program: str, *arguments: str) -> subprocess.Popen:
        with (self.work / f"{program}-{host}.out").open("ab") as log:
            return self.lab.popen(host, [which(program), *arguments], env=self.env, stdout=log, stderr=log)

    def start_node(self, index: int) -> None:
        (self.work / f"spool-host{index}").mkdir(exist_ok=True)
        # A host of the lab has a /sys of its own; slurmd wants to see some cgroups in it, though it uses none.
        hide = 'mount -t tmpfs none /sys/fs/cgroup && exec "$0" "$@"'
        self.daemon(
            index, "sh", "-c", hide, which("slurmd"), "-D", "-N", f"host{index}", "-f", str(self.work / "slurm.conf")
        )

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.work / "slurm.conf")}

    def call(self, *argv: str, **env: str) -> str:
        """What a command of SLURM's says, on host 0; "" if it fails."""
        with self.lab.popen(
            0, argv, env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.work
        ) as process:
            out, _ = process.communicate(timeout=120)
        return out if process.returncode == 0 else ""

    def wait_until_idle(self) -> None:
        nodes = ["idle"] * self.lab.hosts
        wait_until(lambda: self.call("sinfo", "-hN", "-p", "low", "-o", "%T").split() == nodes, 240)

    def hurry(self, job: str) -> None:
        """Has a requeued job start in some seconds, not in the two minutes that SLURM leaves it."""
        wait_until(lambda: self.has_come_back(job, "PENDING"), 240)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now+4")

    def submit(self, *arguments: str, **env: str) -> str:
        """The new job's id."""
        return self.call("sbatch", "--parsable", *arguments, **env).strip()

    def job(self, job: str) -> dict[str, str]:
        """What scontrol knows of a job."""
        pairs = (word.partition("=") for word in self.call("scontrol", "show", "job", job).split())
        return {name: value for name, _, value in pairs}

    def has_come_back(self, job: str, *states: str) -> bool:
        """Whether a job was requeued, and is in one of ``states``, if any are given."""
        known = self.job(job)
        return known.get("Restarts", "0") != "0" and (not states or known["JobState"] in states)

    wait_until = staticmethod(wait_until)

    def wait(self, job: str, seconds: float, *states: str) -> str:
        """The job's state, once it is one of ``states`` (by default those of a job that is over)."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        seen = [""]
        wait_until(lambda: seen.append(self.job(job).get("JobState", "")) or seen[-1] in wanted, seconds)
        return seen[-1]


def load_netlab() -> ModuleType:
    spec = importlib.util.spec_from_file_location("netlab", CHECKOUT / "scripts" / "netlab.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def cluster(work: Path) -> Iterator[Slurm]:
    """A SLURM of its own, gone with all its jobs at the end of the block."""
    with load_netlab().Lab(hosts=NUM_NODES) as lab:
        yield Slurm(lab, work)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if not which(name)]
    if missing or os.geteuid() != 0:
        needs = "root" if os.geteuid() else f"{', '.join(missing)}: apt-get install slurm-wlm munge iproute2"
        if os.environ.get("CI"):
            pytest.fail(f"a SLURM of its own needs {needs}")
        pytest.skip(f"a SLURM of its own needs {needs}")
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running
