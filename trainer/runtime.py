"""The only user of ``jax.distributed`` and of XLA flags: start, stop, agree."""

import json
import math
import os
import platform as machine
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from trainer import xla_flags
from trainer.config import MOST_DEVICES, Mesh
from trainer.errors import SettingsRefused
from trainer.placement import Placement

HEARTBEAT_SECONDS = 100.0
"""How long JAX waits for a sign of life of a process, unless ``start`` is told otherwise."""

CACHE_MIN_COMPILE_SECONDS = 0.1
"""Programs that compile faster are not worth a file."""


def start(
    mesh: Mesh,
    placement: Placement,
    *,
    init_seconds: float,
    shutdown_seconds: float,
    cache_dir: Path | None,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> None:
    """Starts JAX in this process as ``placement`` says, with this process's share of the devices of ``mesh``.

    Must be called before anything that starts a JAX backend (``jax.devices()``, any array).

    init_seconds:     limit on the wait for the other processes.
    shutdown_seconds: limit on the wait for them in ``stop``.
    cache_dir:        where compiled programs are kept for the next start (see ``cache_directory``); None: nowhere.
    heartbeat_seconds: limit on the silence of a process, after which JAX aborts all.

    Raises:
        SettingsRefused: the devices cannot be shared out equally, a GPU is demanded and there is none, JAX cannot start
            on what JAX_PLATFORMS names, or JAX_DISABLE_JIT is on.
    """
    if os.environ.get("JAX_DISABLE_JIT", "").lower() in ("1", "y", "yes", "t", "true", "on"):
        raise SettingsRefused("JAX_DISABLE_JIT is on, but training needs compiled steps: unset it")
    emulated = uses_cpu(mesh, os.environ)
    num_gpus = 0 if emulated else visible_gpus(os.environ)
    if emulated:
        emulate_devices(mesh, placement)
        spare_a_thread(mesh, placement)
    set_flags(emulated, mesh, placement, num_gpus)
    if cache_dir is not None:
        keep_compiled_programs(cache_dir)
    if placement.num_processes > 1:
        local_ids = None if emulated else gpu_share(num_gpus, mesh, placement)
        connect(placement, local_ids, init_seconds, shutdown_seconds, heartbeat_seconds)
    if mesh.platform == "gpu":
        demand_gpu()
    elif not emulated:  # emulated devices start whatever JAX_PLATFORMS says
        first_platform(mesh.platform)


def stop() -> None:
    """Leaves the group of processes, waiting for the others to do so too. Nothing to do for a single process."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def is_of_a_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` came of another process's end, in an exchange over Gloo; JAX raises it as a ValueError."""
    return "Gloo" in str(error)


def rank() -> int:
    """This process's index."""
    return jax.process_index()


def num_processes() -> int:
    """How many processes the run has."""
    return jax.process_count()


def agree(name: str, value: Any) -> list[Any]:
    """What every process passed as ``value`` (anything that JSON holds), by rank; the same list everywhere.

    Every process must call it, in the same order; ``name`` says what about, and is checked. Tuples become lists.
    """
    payload = np.frombuffer(json.dumps([name, value]).encode(), np.uint8)
    if num_processes() == 1:
        return [json.loads(payload.tobytes())[1]]
    lengths = np.asarray(multihost_utils.process_allgather(np.asarray(len(payload), np.int32)))
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(payload)] = payload
    rows = np.asarray(multihost_utils.process_allgather(padded))
    pairs = [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
    names = [pair[0] for pair in pairs]
    assert set(names) == {name}, f"the processes came to agree about different things: {names}"
    return [pair[1] for pair in pairs]


def num_hosts() -> int:
    """How many machines the processes are on, told by their names. Every process must call it."""
    return len(set(agree("host name", socket.gethostname())))


def barrier(name: str) -> None:
    """Waits until every process is here."""
    agree(f"barrier {name}", None)


def uses_cpu(mesh: Mesh, environ: Mapping[str, str]) -> bool:
    """Whether the devices are emulated on the CPU. Tells without starting a backend, for that fixes the devices."""
    if mesh.platform != "auto":
        return mesh.platform == "cpu"
    wanted = environ.get("JAX_PLATFORMS", "")
    if wanted:
        return wanted.split(",")[0] == "cpu"
    # JAX for GPUs registers itself under this entry point; without it a GPU in the machine is of no use.
    present = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
    return not (present and entry_points(group="jax_plugins"))


def emulate_devices(mesh: Mesh, placement: Placement) -> None:
    """Gives this process its CPU devices, unless the user's XLA_FLAGS give it a number of their own."""
    jax.config.update("jax_platforms", "cpu")
    if xla_flags.DEVICE_COUNT_FLAG not in xla_flags.names(os.environ.get("XLA_FLAGS", "")):
        jax.config.update("jax_num_cpu_devices", cpu_share(mesh, placement.num_processes))


def spare_a_thread(mesh: Mesh, placement: Placement) -> None:
    """Gives XLA a thread more than this process has devices, unless the user's NPROC says how many.

    It has one for each core, and on each device an exchange between processes holds one until all are there: on few
    cores nothing would be left to go on with the backward pass.
    """
    wanted = cpu_share(mesh, placement.num_processes) + 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if placement.num_processes > 1 and cores < wanted:
        os.environ.setdefault("NPROC", str(wanted))


def set_flags(emulated: bool, mesh: Mesh, placement: Placement, num_gpus: int) -> None:
    """Sets the XLA flags that the user's own XLA_FLAGS leave open."""
    processes = placement.num_processes
    ours = xla_flags.chosen(
        version("jaxlib"),
        emulated=emulated,
        num_processes=processes,
        num_devices=cpu_share(mesh, processes) if emulated else 1,
        num_gpus=num_gpus,
    )
    if ours:
        os.environ["XLA_FLAGS"] = xla_flags.merge(os.environ.get("XLA_FLAGS", ""), ours)


def cpu_share(mesh: Mesh, processes: int) -> int:
    """How many emulated devices each process has.

    Raises:
        SettingsRefused: they cannot be shared out equally, or are too many.
    """
    per_node = 1 if mesh.devices_per_node == "auto" else mesh.devices_per_node
    most = MOST_DEVICES["cpu"]
    if mesh.nodes * per_node > most:  # known only now where the platform is "auto"
        raise SettingsRefused(
            f"mesh.nodes * mesh.devices_per_node = {mesh.nodes * per_node}: at most {most} on the CPU"
        )
    return equal_share(mesh.nodes * per_node, processes, f"{mesh.nodes} x {per_node} devices of [mesh]")


def gpu_share(num_visible: int, mesh: Mesh, placement: Placement) -> list[int]:
    """Which of this host's ``num_visible`` GPUs are this process's: a contiguous range, as long for every rank.

    Every host has equally many processes, so it has the mesh's devices in equal parts too.

    Raises:
        SettingsRefused: there are too few, or they cannot be shared out equally.
    """
    available = num_visible * placement.num_processes // placement.num_local
    total = available if mesh.devices_per_node == "auto" else mesh.nodes * mesh.devices_per_node
    if total > available:
        raise SettingsRefused(
            f"mesh.nodes * mesh.devices_per_node = {total}, but this host has {num_visible} GPUs for "
            f"{placement.num_local} of {placement.num_processes} processes: make the mesh smaller"
        )
    share = equal_share(total, placement.num_processes, f"{total} GPUs")
    return list(range(placement.local_rank * share, (placement.local_rank + 1) * share))


def equal_share(total: int, processes: int, what: str) -> int:
    """total / processes, if that is a whole number of at least 1."""
    if total % processes or total < processes:
        fitting = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0) or "none"
        raise SettingsRefused(
            f"--processes {processes}: {what} cannot be shared out equally between {processes} processes; "
            f"numbers that can: {fitting}"
        )
    return total // processes


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many NVIDIA GPUs this process may use, counted without starting a backend."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([entry for entry in listed.split(",") if entry.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def first_platform(wanted: str) -> str:
    """Starts JAX's devices, and says what they are: 'cpu', 'gpu' or the like.

    wanted: mesh.platform, for the message.

    Raises:
        SettingsRefused: JAX cannot start them.
    """
    try:
        return jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, for a known platform that is missing
        reason = " ".join(str(error).split()) or "no such device"
        chosen = os.environ.get("JAX_PLATFORMS", "")
        raise SettingsRefused(
            f'mesh.platform = "{wanted}", but JAX cannot start with JAX_PLATFORMS={chosen!r}: '
            f'{reason}; unset JAX_PLATFORMS, or set mesh.platform = "cpu"'
        ) from error


def demand_gpu() -> None:
    """Raises SettingsRefused unless JAX has a GPU, and would use it."""
    found = first_platform("gpu")
    if found != "gpu":
        raise SettingsRefused(
            f'mesh.platform = "gpu", but JAX finds only {found} devices: install the "cuda" extra, check '
            'that JAX_PLATFORMS does not exclude it, or set mesh.platform = "cpu"'
        )


def cache_directory(environ: Mapping[str, str]) -> Path | None:
    """Where compiled programs are kept unless the user's JAX_COMPILATION_CACHE_DIR says otherwise.

    LOCKSTEP_COMPILATION_CACHE=off switches it off. Machines of different CPUs that share a home have a directory each,
    because a program compiled for one may not run on another.
    """
    if environ.get("LOCKSTEP_COMPILATION_CACHE", "").lower() in ("off", "0", "false"):
        return None
    root = environ.get("XDG_CACHE_HOME") or environ.get("HOME")
    if not root:
        return None
    base = Path(root) if environ.get("XDG_CACHE_HOME") else Path(root) / ".cache"
    return base / "lockstep" / "xla" / cpu_fingerprint()


def cpu_fingerprint() -> str:
    """A short name for this machine's kind of CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    except OSError:
        wanted = [machine.processor()]
    return f"{machine.machine()}-{sha256(repr(sorted(set(wanted))).encode()).hexdigest()[:8]}"


def keep_compiled_programs(directory: Path) -> None:
    """Switches the persistent compilation cache on; what the user set in JAX's own variables stays.

    A directory that cannot be written is done without. On CPUs with several processes JAX keeps rank 0's programs only.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        if not os.access(directory, os.W_OK):
            return
        jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHE_MIN_COMPILE_SECONDS)


def connect(
    placement: Placement,
    local_device_ids: list[int] | None,
    init_seconds: float,
    shutdown_seconds: float,
    heartbeat_seconds: float,
) -> None:
    """Meets the other processes, with every argument given so that JAX detects nothing by itself."""
    # With the service on, SIGTERM would be swallowed: the worker would run on as if nothing had happened.
    jax.config.update("jax_enable_preemption_service", False)
    with without_proxies():
        jax.distributed.initialize(
            coordinator_address=placement.coordinator,
            num_processes=placement.num_processes,
            process_id=placement.rank,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(init_seconds),
            heartbeat_timeout_seconds=math.ceil(heartbeat_seconds),
            shutdown_timeout_seconds=math.ceil(shutdown_seconds),
            coordinator_bind_address=placement.coordinator,  # JAX's own default is every address of the host
        )


@contextmanager
def without_proxies() -> Iterator[None]:
    """Hides proxy variables for a while: the handshake would go through the proxy, and stall.

    Only for a while, because data or checkpoints may well have to be fetched through it.
    """
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if "_proxy" in name.lower()}
    try:
        yield
    finally:
        os.environ.update(hidden)
