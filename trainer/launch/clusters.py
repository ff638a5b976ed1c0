"""Which of the run's hosts this one is: from the options, or from SLURM, Kubernetes or Open MPI, each in its own words.

Options win over what is detected. Whatever does not fit together is refused before anything is started.
"""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from trainer.errors import SettingsRefused

TOKEN = "LOCKSTEP_TOKEN"
"""The environment variable with the secret that a run's agents share."""
SHORTEST_TOKEN = 16
SLURM_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to connections of its own."""

Expand = Callable[[str], list[str]]


@dataclass(frozen=True)
class Options:
    """--num-hosts, --host-index and --rendezvous, None where not given."""

    num_hosts: int | None = None
    host_index: int | None = None
    rendezvous: str | None = None


@dataclass(frozen=True)
class Place:
    """Where this agent stands among the hosts of its run.

    rendezvous: HOST:PORT where agent 0 listens for the others; "" for a run on one host.
    token:      what the agents prove to each other that they know.
    """

    num_hosts: int = 1
    host_index: int = 0
    rendezvous: str = ""
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Found:
    """What a cluster says. ``shared`` is a text that all agents of the job have, and those of no other job."""

    cluster: str
    num_hosts: int
    host_index: int
    rendezvous: str | None = None
    shared: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.cluster} says host {self.host_index} of {self.num_hosts}"


def scontrol_hostnames(nodelist: str) -> list[str]:
    """The names in a SLURM node list, as ``scontrol show hostnames`` expands it."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsRefused(
            f"scontrol show hostnames {nodelist!r} failed ({error}): give --rendezvous HOST:PORT"
        ) from error
    return done.stdout.split()


def locate(environ: Mapping[str, str], options: Options, expand: Expand = scontrol_hostnames) -> Place:
    """This agent's place, from the options and, for what they leave open, from the cluster it runs under.

    Raises:
        SettingsRefused: something is missing, out of range or contradicts something else; says what was given and seen.
    """
    _check_options(options)
    if options.num_hosts == 1:
        return Place()
    complete = None not in (options.num_hosts, options.host_index, options.rendezvous)
    found = None if complete else detect(environ, expand)
    if found is None and options == Options():
        return Place()
    num_hosts, host_index, rendezvous = _merge(options, found)
    if num_hosts == 1:
        return Place()
    parse_address(rendezvous)
    return Place(num_hosts, host_index, rendezvous, _token(environ, found))


def detect(environ: Mapping[str, str], expand: Expand = scontrol_hostnames) -> Found | None:
    """What the cluster says that we run under; None if we run under none.

    Raises:
        SettingsRefused: it says too little, starts several agents on one host, or two clusters disagree.
    """
    seen = [found for found in (_open_mpi(environ), _kubernetes(environ), _slurm(environ, expand)) if found]
    if not seen:
        return None
    if any((found.num_hosts, found.host_index) != (seen[0].num_hosts, seen[0].host_index) for found in seen):
        raise SettingsRefused(
            f"{' but '.join(map(str, seen))}: give --num-hosts, --host-index and --rendezvous, which count before both"
        )
    return seen[0]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port.

    >>> parse_address("node-1:29400"), parse_address("[fd00::1]:29400")
    (('node-1', 29400), ('fd00::1', 29400))

    Raises:
        SettingsRefused: it is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    fits = plain and not any(c.isspace() for c in plain) and (bracketed or ":" not in host)
    if not fits or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise SettingsRefused(
            f"--rendezvous {text!r}: must be HOST:PORT, an address of host 0 and a free port on it, such as node1:29400"
        )
    return plain, int(port)


def _check_options(options: Options) -> None:
    num_hosts, index = options.num_hosts, options.host_index
    if num_hosts is not None and num_hosts < 1:
        raise SettingsRefused(f"--num-hosts {num_hosts}: must be at least 1")
    if index is not None and (index < 0 or (num_hosts is not None and index >= num_hosts)):
        last = "" if num_hosts is None else f" to {num_hosts - 1} with --num-hosts {num_hosts}"
        raise SettingsRefused(f"--host-index {index}: hosts are counted from 0{last}")


def _merge(options: Options, found: Found | None) -> tuple[int, int, str]:
    """Number of hosts, index and rendezvous: the option where given, else what the cluster says."""
    half = (options.num_hosts is None) != (options.host_index is None)
    if (
        found
        and half
        and (options.num_hosts, options.host_index)
        not in (
            (found.num_hosts, None),
            (None, found.host_index),
        )
    ):
        given = (
            f"--host-index {options.host_index}" if options.num_hosts is None else f"--num-hosts {options.num_hosts}"
        )
        raise SettingsRefused(f"{given}, but {found}: give both --num-hosts and --host-index, or neither")
    values = {
        "--num-hosts": options.num_hosts if options.num_hosts is not None else found and found.num_hosts,
        "--host-index": options.host_index if options.host_index is not None else found and found.host_index,
        "--rendezvous": options.rendezvous if options.rendezvous is not None else found and found.rendezvous,
    }
    if values["--num-hosts"] == 1:
        return 1, 0, ""
    missing = [name for name, value in values.items() if value is None]
    if missing:
        known = f"{found}" if found else "no SLURM, Kubernetes or Open MPI was found"
        raise SettingsRefused(
            f"a run on several hosts needs {' and '.join(missing)} too ({known}): give --num-hosts H --host-index I "
            "--rendezvous HOST:PORT, the first and the last alike on all hosts"
        )
    return int(values["--num-hosts"] or 0), int(values["--host-index"] or 0), str(values["--rendezvous"])


def _token(environ: Mapping[str, str], found: Found | None) -> str:
    """The secret that the run's agents share.

    The one derived from a SLURM job keeps runs apart; whoever can list jobs can derive it too. Open MPI's is random.
    """
    given = environ.get(TOKEN, "")
    if given:
        if len(given) < SHORTEST_TOKEN:
            raise SettingsRefused(
                f"{TOKEN} has less than {SHORTEST_TOKEN} characters: make one with openssl rand -hex 16"
            )
        return given
    if found is None or not found.shared:
        raise SettingsRefused(
            f"a run on several hosts needs the environment variable {TOKEN}, alike on all of them: "
            f"export {TOKEN}=$(openssl rand -hex 16) on one, and pass it on"
        )
    return sha256(f"{found.cluster} {found.shared}".encode()).hexdigest()


def _slurm(environ: Mapping[str, str], expand: Expand) -> Found | None:
    """The job step that srun started us in: one task on each of its nodes."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if "SLURM_STEP_NODELIST" not in environ:  # in the batch script itself, or in the shell of salloc
        num_nodes = _number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
        if num_nodes == 1:
            return Found("SLURM", 1, 0)
        raise SettingsRefused(
            f"SLURM job {job} has {num_nodes} nodes, but this is not a job step: start one agent on each node with "
            "srun --ntasks-per-node=1 lockstep train ..., or train on this host alone with --num-hosts 1"
        )
    num_nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    num_tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if num_tasks != num_nodes:
        raise SettingsRefused(
            f"SLURM started {num_tasks} tasks on {num_nodes} node(s), but there is one agent a host: use "
            "srun --ntasks-per-node=1, and --processes for more workers; or --num-hosts 1 if these are separate runs"
        )
    if num_nodes == 1:
        return Found("SLURM", 1, 0)
    index = _number(environ, "SLURM_NODEID")
    names = expand(environ["SLURM_STEP_NODELIST"])
    if len(names) != num_nodes or index >= num_nodes:
        raise SettingsRefused(
            f"SLURM_STEP_NUM_NODES = {num_nodes} and SLURM_NODEID = {index}, but scontrol lists {len(names)} nodes: "
            "give --num-hosts, --host-index and --rendezvous"
        )
    step = environ.get("SLURM_STEP_ID", "0")
    port = SLURM_PORTS[(int(job) * 16 + int(step)) % len(SLURM_PORTS)]
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return Found("SLURM", num_nodes, index, f"{names[0]}:{port}", f"{job}.{step}.{restarts}")


def _kubernetes(environ: Mapping[str, str]) -> Found | None:
    """A pod of an Indexed Job; the manifest says how many there are, and the name of the first (scripts/kubernetes)."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    if "LOCKSTEP_NUM_HOSTS" not in environ:
        raise SettingsRefused(
            "JOB_COMPLETION_INDEX is set, but LOCKSTEP_NUM_HOSTS is not: set it and LOCKSTEP_RENDEZVOUS in the pod as "
            "scripts/kubernetes/job.yaml.template does, or train on this host alone with --num-hosts 1"
        )
    num_hosts, index = _number(environ, "LOCKSTEP_NUM_HOSTS"), _number(environ, "JOB_COMPLETION_INDEX")
    if index >= num_hosts:
        raise SettingsRefused(
            f"JOB_COMPLETION_INDEX = {index}, but LOCKSTEP_NUM_HOSTS = {num_hosts}: "
            "set the latter to the Job's completions"
        )
    return Found("Kubernetes", num_hosts, index, environ.get("LOCKSTEP_RENDEZVOUS"))


def _open_mpi(environ: Mapping[str, str]) -> Found | None:
    """A process that mpirun started. Open MPI does not tell where the first one is."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    num_hosts, index = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    on_this_host = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if on_this_host != 1:
        raise SettingsRefused(
            f"mpirun started {on_this_host} processes on this host, but there is one agent a host: use "
            "mpirun --map-by ppr:1:node, and --processes for more workers"
        )
    if index >= num_hosts:
        raise SettingsRefused(f"OMPI_COMM_WORLD_RANK = {index}, but OMPI_COMM_WORLD_SIZE = {num_hosts}")
    secret = environ.get("OMPI_MCA_orte_precondition_transports", "")
    return Found("Open MPI", num_hosts, index, None, secret)


def _number(environ: Mapping[str, str], *names: str) -> int:
    """The first of the variables that is set."""
    for name in names:
        if name in environ:
            text = environ[name]
            if not (text.isascii() and text.isdecimal()):
                raise SettingsRefused(f"{name} = {text!r} in the environment is no number")
            return int(text)
    raise SettingsRefused(
        f"{names[0]} is not in the environment: give --num-hosts, --host-index and --rendezvous instead"
    )
