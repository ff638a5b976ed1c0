"""Which XLA flags a run needs, and how they join the user's own. Text only; runtime.py sets it before a backend starts.

XLA ends the process at a flag that it does not know, so each is given only to releases that are known to take it.
"""

import re
from collections.abc import Mapping
from itertools import takewhile

KNOWN_RELEASES = ((0, 10, 2), (0, 13))
"""From this jaxlib up to, not including, that one the flags below are known (tried with 0.10.2 and 0.12.0.1, whose
builds for the CPU parse the flags for GPUs too)."""

DEVICE_COUNT_FLAG = "xla_force_host_platform_device_count"
LIST_FLAG = "xla_disable_hlo_passes"
"""Its value is a list with commas between: ours is added to the user's."""

PATIENT: Mapping[str, str] = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "300",
    "xla_cpu_collective_call_terminate_timeout_seconds": "3600",
    "xla_cpu_collective_timeout_seconds": "3600",
}
"""When emulated devices reach a collective more than 20 s apart, as many of them on few cores do, XLA complains, and a
minute apart it aborts the process. Whether a worker is stuck is for the agent to judge, so these limits lie beyond its
own."""

APART_ON_CPU: Mapping[str, str] = {LIST_FLAG: "cpu-all-reduce-combiner"}
"""Left alone, XLA's CPU compiler merges all the all-reduces of a step into one at its end, so that none runs beside the
backward pass. Only between processes are they worth keeping apart: within one there is no link to keep busy."""

DEPTH_FIRST_ON_CPU: Mapping[str, str] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""Where one process has several devices, which share its cores: each device's program then finishes one thing before
the next, a bucket's whole exchange too. XLA's own order starts all that can be started, and first does the same to all
buckets; a process of a single device hides its exchange by that. All processes need the same order, so it follows the
mesh and not the number of cores."""

COMBINE_BYTES = 8 * 2**20
"""On GPUs, neighbouring exchanges are merged up to this size."""

APART_ON_GPU: Mapping[str, str] = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_all_reduce_combine_threshold_bytes": str(COMBINE_BYTES),
    "xla_gpu_all_gather_combine_threshold_bytes": str(COMBINE_BYTES),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(COMBINE_BYTES),
}
"""By XLA's own defaults (debug_options_flags.cc) the scheduler that starts an exchange early and waits for it late is
off, and exchanges are merged up to 30 MiB, which is all of a small model, so that nothing would be left to overlap.
The smaller size is a choice, not a measurement, for want of a GPU here; each of these flags can be set by the user."""


def chosen(
    jaxlib: str, *, emulated: bool, num_processes: int, num_devices: int = 1, num_gpus: int = 0
) -> dict[str, str]:
    """The flags for this process, by name.

    Args:
        jaxlib: its version.
        emulated: whether the devices are emulated on the CPU.
        num_devices: the emulated ones of each process.
        num_gpus: those this process could use, where they are not.

    >>> chosen("0.12.0", emulated=True, num_processes=2)["xla_disable_hlo_passes"]
    'cpu-all-reduce-combiner'
    >>> chosen("0.12.0", emulated=False, num_processes=1, num_gpus=1)
    {}
    """
    if not KNOWN_RELEASES[0] <= release(jaxlib) < KNOWN_RELEASES[1]:
        return {}
    if emulated:
        apart = APART_ON_CPU if num_processes > 1 else {}
        return {**PATIENT, **apart, **(DEPTH_FIRST_ON_CPU if num_devices > 1 else {})}
    return dict(APART_ON_GPU) if num_gpus and max(num_gpus, num_processes) > 1 else {}


def release(version_text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version.

    >>> release("0.12.0.dev20260101")
    (0, 12, 0)
    """
    return tuple(int(part) for part in takewhile(str.isdecimal, version_text.split(".")))


def names(flags: str) -> set[str]:
    """The names of the flags in the text of XLA_FLAGS, without dashes and values."""
    return {word.lstrip("-").split("=")[0] for word in flags.split()}


def merge(user: str, ours: Mapping[str, str]) -> str:
    """``user``, unchanged, with those of ``ours`` behind it that it does not set itself.

    The one flag that is a list gets ours added to the user's; an empty list of the user's stays empty, which is how to
    do without ours. XLA_FLAGS may also be the name of a file; that is left alone.

    >>> merge("--xla_a=1", {"xla_a": "2", "xla_b": "3"})
    '--xla_a=1 --xla_b=3'
    >>> merge("--xla_disable_hlo_passes=dce", {"xla_disable_hlo_passes": "cse"})
    '--xla_disable_hlo_passes=dce,cse'
    """
    if user.strip() and not user.lstrip().startswith("--"):
        return user
    taken = names(user)
    if LIST_FLAG in taken and LIST_FLAG in ours:
        user = _extended(user, ours[LIST_FLAG])
    return " ".join([*([user] if user else []), *(f"--{k}={v}" for k, v in ours.items() if k not in taken)])


def _extended(user: str, value: str) -> str:
    """``user`` with ``value`` added to each of its non-empty lists that lacks it."""

    def add(match: re.Match[str]) -> str:
        return match[0] if value in match[1].split(",") else f"{match[0]},{value}"

    return re.sub(rf"(?<!\S)--{LIST_FLAG}=(\S+)", add, user)
