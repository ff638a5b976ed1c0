"""What ``algorithm = "auto"`` stands for: a choice by size, topology and measured links, with its reason."""

from typing import Any, NamedTuple

from trainer.sync.accounting import payload_bytes, traffic
from trainer.sync.collectives import ACROSS
from trainer.sync.cost import Profile, predict

BUCKET_MIB = 1.0
"""Between processes many small messages are what costs, while XLA copies large buffers together slowly on CPUs."""

LEAF_BY_LEAF = 0.0
"""The bucket size at which nothing is copied together."""

TREE_BYTES = 64 * 2**10
"""Without measured links: gradients below this are bound by the number of messages, not by bytes."""

CANDIDATES = [("xla", "ring"), ("ring", "ring"), ("tree", "ring"), *(("hierarchical", across) for across in ACROSS)]
"""(algorithm, across); of equals the first is taken."""


class Links(NamedTuple):
    """What an exchange has to cross.

    num_nodes, devices_per_node: of the mesh.
    num_processes: how many processes hold its devices.
    platform:      as JAX names it.
    """

    num_nodes: int
    devices_per_node: int
    num_processes: int
    platform: str

    @property
    def is_emulated(self) -> bool:
        """Whether all devices are CPU devices of one process, so that there are no links at all."""
        return self.platform == "cpu" and self.num_processes == 1


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

    >>> import numpy as np
    >>> choose(np.zeros(10**6), Links(4, 8, 32, "gpu")).reason
    'hierarchical over ring, since only 1/8 of the gradient then crosses the slow link between 4 nodes'
    """
    if isinstance(bucket_mib, str):
        bucket_mib = LEAF_BY_LEAF if links.is_emulated and algorithm in ("auto", "xla") else BUCKET_MIB
    if algorithm != "auto":
        known = across if across != "auto" else "ring"
        return Choice(algorithm, known, bucket_mib, f"{algorithm}, as the settings say")
    if links.num_nodes * links.devices_per_node == 1:
        return Choice("xla", "ring", bucket_mib, "nothing to exchange, for there is one replica")
    if links.is_emulated:
        return Choice("xla", "ring", bucket_mib, "xla, since all devices are in one process and no link is slow")
    if profile is not None:
        return _quickest(gradient, links, across, bucket_mib, profile)
    if links.num_nodes == 1:
        return Choice("xla", "ring", bucket_mib, "xla, since all devices are in one node and no link is slow")
    if payload_bytes(gradient) < TREE_BYTES:
        why = f"tree, since a gradient below {TREE_BYTES // 2**10} KiB is bound by the number of messages"
        return Choice("tree", "ring", bucket_mib, why)
    if links.devices_per_node == 1:
        return Choice("xla", "ring", bucket_mib, "xla, since nodes of one device have no fast link to make use of")
    known = across if across != "auto" else "ring"
    share = f"only 1/{links.devices_per_node} of the gradient"
    why = f"hierarchical over {known}, since {share} then crosses the slow link between {links.num_nodes} nodes"
    return Choice("hierarchical", known, bucket_mib, why)


def _quickest(gradient: Any, links: Links, across: str, bucket_mib: float, profile: Profile) -> Choice:
    """The candidate of least predicted time."""

    def seconds(candidate: tuple[str, str]) -> float:
        kind, over = candidate
        counted = traffic(
            gradient, links.num_nodes, links.devices_per_node, algorithm=kind, across=over, bucket_mib=bucket_mib
        )
        return predict(profile, counted)

    candidates = [(kind, over) for kind, over in CANDIDATES if kind != "hierarchical" or across in ("auto", over)]
    times = {candidate: seconds(candidate) for candidate in candidates}
    kind, over = min(times, key=lambda candidate: times[candidate])
    name = f"hierarchical over {over}" if kind == "hierarchical" else kind
    why = f"{name}, predicted from the measured links to take {1e3 * times[kind, over]:.3g} ms"
    if kind != "xla":
        why += f" where xla takes {1e3 * times['xla', 'ring']:.3g} ms"
    return Choice(kind, over, bucket_mib, why)
