"""Timing: several things in turn, in all processes at once, often enough to take a median."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from trainer import runtime

Action = Callable[[], Any]
"""Does one thing and returns its arrays, which need not be there yet."""

FEWEST_REPEATS = 3
MOST_REPEATS = 200


class Machine(NamedTuple):
    """What was measured on. ``cores``: CPU cores that rank 0 may use."""

    nodes: int
    devices_per_node: int
    processes: int
    hosts: int
    platform: str
    device_kind: str
    cores: int

    @property
    def shares_cores(self) -> bool:
        """Whether the devices are emulated, several on a host, so that they take the cores from one another."""
        return self.platform == "cpu" and self.nodes * self.devices_per_node > self.hosts

    def describe(self) -> str:
        """One line."""
        text = (
            f"{_count(self.nodes, 'node')} x {self.devices_per_node} {self.device_kind} devices, "
            f"{_count(self.processes, 'process')} on {_count(self.hosts, 'host')}"
        )
        if not self.shares_cores:
            return text
        return f"{text}; cores shared: the devices are emulated on {self.cores} cores, so more of them add no speed"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def machine(mesh: Mesh) -> Machine:
    """What ``mesh`` lies on; every process must call it."""
    device = mesh.devices.flat[0]
    return Machine(
        nodes=mesh.shape["node"],
        devices_per_node=mesh.shape["local"],
        processes=runtime.num_processes(),
        hosts=runtime.num_hosts(),
        platform=device.platform,
        device_kind=device.device_kind,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def once(action: Action) -> float:
    """The seconds until what the action returns is there."""
    begin = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - begin


def agreed_repeats(first_seconds: float | None, budget_seconds: float) -> int:
    """How often to repeat what takes ``first_seconds``: the same number in every process, and each must call it.

    None for a process that takes no part.
    """
    longest = max(seconds for seconds in runtime.agree("first time", first_seconds) if seconds is not None)
    return min(max(round(budget_seconds / longest), FEWEST_REPEATS), MOST_REPEATS)


def in_turn(actions: Mapping[str, Action], repeats: int, meet: Action) -> dict[str, list[float]]:
    """The seconds that each action takes, ``repeats`` times over, one after another so that drift hits all alike.

    meet: lets the processes that take part begin each action together.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            jax.block_until_ready(meet())
            times[name].append(once(action))
    return times


def slowest(of_processes: Sequence[Sequence[float]]) -> float:
    """The median, over the repeats, of the time of the process that took longest."""
    return statistics.median(max(times) for times in zip(*of_processes, strict=True))
