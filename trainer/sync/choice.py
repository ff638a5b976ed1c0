"""What ``algorithm = "auto"`` stands for: a choice by size, topology and measured links, with its reason."""

from typing import Any, NamedTuple

from trainer.sync.accounting import payload_bytes, traffic
from trainer.sync.buckets import BUCKET_MIB
from trainer.sync.collectives import ACROSS, ALGORITHMS
from trainer.sync.cost import Profile, predict

RING_BUCKET_MIB = 32.0
"""A ring cuts a bucket into a chunk for each replica, and in each of its rounds all of them have to meet: its chunks
have the size of other buckets, up to this size of all together, for a bucket has to be there as a whole."""

TREE_BYTES = 64 * 2**10
"""Without measured links: gradients below this are bound by the number of messages, not by bytes."""

ACROSS_UNMEASURED = "xla"
"""How a hierarchical exchange goes across nodes where no link was measured: between hosts the libraries' own all-reduce
is quicker than the same bytes sent by permutes."""

CANDIDATES = [
    *((name, "ring") for name in ALGORITHMS if name in ACROSS),
    *(("hierarchical", across) for across in ACROSS),
]
"""(algorithm, across); of equals the first is taken."""


class Links(NamedTuple):
    """What an exchange has to cross.

    num_nodes, devices_per_node: of the mesh.
    num_processes: how many processes hold its devices.
    platform:      as JAX names it.
    num_hosts:     how many machines the processes are on; None: not known, and nodes are then taken at their word.
    """

    num_nodes: int
    devices_per_node: int
    num_processes: int
    platform: str
    num_hosts: int | None = None

    @property
    def has_no_network(self) -> bool:
        """Whether all devices are CPU devices of one machine: its "nodes" then have no link that is really slower."""
        return self.platform == "cpu" and self.num_hosts == 1

    @property
    def is_emulated(self) -> bool:
        """Whether all devices are CPU devices of one process, so that there are no links at all."""
        return self.platform == "cpu" and self.num_processes == 1

    @property
    def blocks_threads(self) -> bool:
        """Whether an exchange holds the thread that it runs on: between processes on CPUs."""
        return self.platform == "cpu" and self.num_processes > 1


class Choice(NamedTuple):
    """Settings with nothing left open, and in one sentence why."""

    algorithm: str
    across: str
    bucket_mib: float
    reason: str


def choose(
    gradient: Any,
    links: Links,
    *,
    algorithm: str = "auto",
    across: str = "auto",
    bucket_mib: float | str = "auto",
    profile: Profile | None = None,
) -> Choice:
    """Settles what is "auto", for a gradient of these shapes; what is given stays as it is.

    A profile is followed if it has a time for each byte of the links that this mesh crosses, and for a message of the
    slowest: a fit gives 0 to what it has not seen.

    >>> import numpy as np
    >>> choose(np.zeros(10**6), Links(4, 8, 32, "gpu")).reason
    'hierarchical over xla, since only 1/8 of the gradient then crosses the slow link between 4 nodes'
    """
    if algorithm != "auto":
        bucket = _bucket(links, algorithm, bucket_mib)
        known = across if across != "auto" else ACROSS_UNMEASURED
        choice = Choice(algorithm, known, bucket, f"{algorithm}, as the settings say")
        return choice if profile is None else _with_prediction(choice, gradient, links, profile)
    if links.num_nodes * links.devices_per_node == 1:
        why = "nothing to exchange, for there is one replica"
        return Choice("xla", "ring", _bucket(links, "xla", bucket_mib), why)
    unknown = "" if profile is None else _unmeasured(links, profile)
    if profile is not None and not links.is_emulated and not unknown:
        return _quickest(gradient, links, across, bucket_mib, profile)
    kind, over, why = _by_topology(gradient, links, across)
    choice = Choice(kind, over, _bucket(links, kind, bucket_mib), why)
    if unknown:
        return choice._replace(reason=f"{why} (the profile is not followed: it has 0 for {unknown})")
    return choice if profile is None else _with_prediction(choice, gradient, links, profile)


def _unmeasured(links: Links, profile: Profile) -> str:
    """What this mesh needs and the profile has no time for: by it, what costs most would be taken to cost nothing."""
    crossed = {"fast": links.devices_per_node > 1, "slow": links.num_nodes > 1}
    levels = {name: getattr(profile, name) for name, is_crossed in crossed.items() if is_crossed}
    for name, level in levels.items():
        if not level.seconds_per_byte:
            return f"{name}.seconds_per_byte"
    slowest, level = list(levels.items())[-1]
    return "" if level.seconds_per_message else f"{slowest}.seconds_per_message"


def _bucket(links: Links, algorithm: str, bucket_mib: float | str) -> float:
    if not isinstance(bucket_mib, str):
        return bucket_mib
    if algorithm == "ring":
        return min(RING_BUCKET_MIB, BUCKET_MIB * links.num_nodes * links.devices_per_node)
    return BUCKET_MIB


def _by_topology(gradient: Any, links: Links, across: str) -> tuple[str, str, str]:
    """(algorithm, across, why), where no link was measured."""
    if links.is_emulated:
        return "xla", "ring", "xla, since all devices are in one process and no link is slow"
    if links.num_nodes == 1:
        return "xla", "ring", "xla, since all devices are in one node and no link is slow"
    if links.has_no_network:
        return "xla", "ring", "xla, since all processes are on the CPU of one host and no link is known to be slow"
    if payload_bytes(gradient) < TREE_BYTES:
        why = f"tree, since a gradient below {TREE_BYTES // 2**10} KiB is bound by the number of messages"
        return "tree", "ring", why
    if links.devices_per_node == 1:
        return "xla", "ring", "xla, since nodes of one device have no fast link to make use of"
    known = across if across != "auto" else ACROSS_UNMEASURED
    share = f"only 1/{links.devices_per_node} of the gradient"
    why = f"hierarchical over {known}, since {share} then crosses the slow link between {links.num_nodes} nodes"
    return "hierarchical", known, why


def _seconds(gradient: Any, links: Links, profile: Profile, kind: str, over: str, bucket_mib: float) -> float:
    nodes, local = links.num_nodes, links.devices_per_node
    return predict(profile, traffic(gradient, nodes, local, algorithm=kind, across=over, bucket_mib=bucket_mib))


def _with_prediction(choice: Choice, gradient: Any, links: Links, profile: Profile) -> Choice:
    seconds = _seconds(gradient, links, profile, choice.algorithm, choice.across, choice.bucket_mib)
    return choice._replace(
        reason=f"{choice.reason}, predicted from the measured links to take {1e3 * seconds:.3g} ms a step",
    )


def _quickest(gradient: Any, links: Links, across: str, bucket_mib: float | str, profile: Profile) -> Choice:
    """The candidate of least predicted time."""
    buckets = {kind: _bucket(links, kind, bucket_mib) for kind, _ in CANDIDATES}
    times = {
        (kind, over): _seconds(gradient, links, profile, kind, over, buckets[kind])
        for kind, over in CANDIDATES
        if kind != "hierarchical" or across in ("auto", over)
    }
    kind, over = min(times, key=lambda candidate: times[candidate])
    name = f"hierarchical over {over}" if kind == "hierarchical" else kind
    why = f"{name}, predicted from the measured links to take {1e3 * times[kind, over]:.3g} ms a step"
    if kind != "xla":
        why += f" where xla takes {1e3 * times['xla', 'ring']:.3g} ms"
    return Choice(kind, over, buckets[kind], why)
