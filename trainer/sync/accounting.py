"""Messages and wire bytes of an exchange, per device and level, counted from shapes.

Everything is on the wire in float32. XLA's own all-reduce and all-gather are counted as rings, which is what Gloo and
NCCL do with large vectors, and its all-to-all as one message to each other member; whether a library sends small
vectors in fewer, larger messages is not visible here.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.sync import buckets, ring, tree
from trainer.sync.levels import Pairs


def payload_bytes(gradient: Any) -> int:
    """The size in bytes of a gradient tree as it is exchanged: in float32, whatever its leaves' dtypes.

    >>> import jax.numpy as jnp
    >>> payload_bytes({"kernel": jnp.zeros((3, 4), jnp.bfloat16), "bias": jnp.zeros(4)})
    64
    """
    return sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(gradient))


class Round(NamedTuple):
    """Messages of ``num_bytes`` that are under way together, along ``pairs`` of replicas; ``times`` such rounds."""

    pairs: Pairs
    num_bytes: float
    times: int = 1


class LevelTraffic(NamedTuple):
    """What one exchange sends over one level (fast: within nodes; slow: across nodes), all buckets together.

    messages, wire_bytes: sent by each replica; arrays of shape (replicas,).
    rounds:         rounds of messages, one after another.
    critical_bytes: bytes that the busiest link carries, added up over the rounds. A link of the fast level is a
                    device's own; the link of a node to the slow level is shared by its devices.
    """

    messages: np.ndarray
    wire_bytes: np.ndarray
    rounds: int
    critical_bytes: float


class Traffic(NamedTuple):
    """What one exchange sends. ``num_buckets`` buckets, ``payload_bytes`` on each replica before any padding."""

    fast: LevelTraffic
    slow: LevelTraffic
    num_buckets: int
    payload_bytes: int

    @property
    def wire_bytes_fast(self) -> int:
        """Bytes that the busiest device sends within its node."""
        return math.ceil(self.fast.wire_bytes.max())

    @property
    def wire_bytes_slow(self) -> int:
        """Bytes that the busiest device sends to other nodes."""
        return math.ceil(self.slow.wire_bytes.max())

    def node_bytes(self, num_nodes: int) -> np.ndarray:
        """Bytes that leave each node, which is what its network card counts: shape (num_nodes,)."""
        return self.slow.wire_bytes.reshape(num_nodes, -1).sum(axis=1)


def traffic(
    gradient: Any, num_nodes: int, devices_per_node: int, *, algorithm: str, across: str = "ring", bucket_mib: float = 0
) -> Traffic:
    """Counts the exchange of one tree of arrays, or of their shapes.

    Args:
        algorithm: one of ``collectives.ALGORITHMS``; ``across`` matters to "hierarchical" alone.
        bucket_mib: as ``all_reduce`` uses it; 0: leaf by leaf.

    >>> eight = jax.ShapeDtypeStruct((1024,), np.float32)
    >>> traffic(eight, 1, 8, algorithm="ring").wire_bytes_fast / 4096
    1.75
    >>> traffic(eight, 2, 4, algorithm="hierarchical").wire_bytes_slow / 4096
    0.25
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(gradient)]
    plan = buckets.plan(shapes, bucket_mib * 2**20)
    sizes = [sum(math.prod(shapes[index]) for index in bucket) for bucket in plan]
    rounds = [r for size in sizes for r in exchange_rounds(size, num_nodes, devices_per_node, algorithm, across)]
    fast, slow = (_on_level(rounds, num_nodes, devices_per_node, is_slow) for is_slow in (False, True))
    return Traffic(fast, slow, len(plan), payload_bytes(gradient))


def exchange_rounds(
    num_elements: int, num_nodes: int, devices_per_node: int, algorithm: str, across: str
) -> Iterator[Round]:
    """The messages that exchange one vector of ``num_elements`` float32, in order."""
    total, local = num_nodes * devices_per_node, devices_per_node
    if total == 1 or num_elements == 0:
        return
    if algorithm != "hierarchical":
        yield from _flat_rounds(algorithm, num_elements, total)
        return
    nodes = [list(range(node * local, (node + 1) * local)) for node in range(num_nodes)]
    shard = math.ceil(num_elements / local)
    if local > 1:
        everybody = [(sender, receiver) for sender in range(local) for receiver in range(local) if sender != receiver]
        yield Round(_in_groups(everybody, nodes), 4 * shard)
    columns = [list(column) for column in zip(*nodes, strict=True)]
    for pairs, num_bytes, times in _flat_rounds(across, shard, num_nodes):
        yield Round(_in_groups(pairs, columns), num_bytes, times)
    if local > 1:
        yield Round(_in_groups(ring.neighbours(local), nodes), 4 * shard, local - 1)


def _flat_rounds(algorithm: str, num_elements: int, size: int) -> Iterator[Round]:
    """One level of ``size`` members; pairs are member indices."""
    whole = 4 * num_elements
    if size == 1:
        return
    if algorithm == "ring":
        yield Round(ring.neighbours(size), 4 * math.ceil(num_elements / size), 2 * (size - 1))
    elif algorithm == "xla":
        yield Round(ring.neighbours(size), whole / size, 2 * (size - 1))
    elif algorithm == "central":
        yield from (Round([(member, 0)], whole) for member in range(1, size))
        yield from (Round([(0, member)], whole) for member in range(1, size))
    else:
        yield from _tree_rounds(num_elements, size)


def _tree_rounds(num_elements: int, size: int) -> Iterator[Round]:
    fold, distances = tree.fold_pairs(size), tree.distances(size)
    power = tree.largest_power_of_two(size)
    whole = 4 * num_elements
    if fold:
        yield Round(fold, whole)
    if whole < tree.HALVING_BYTES:
        yield from (Round(tree.partners(size, distance), whole) for distance in distances)
    else:
        padded = 4 * math.ceil(num_elements / power) * power
        parts = [(distance, padded // (2 * distance)) for distance in distances]
        yield from (Round(tree.partners(size, distance), part) for distance, part in [*parts, *reversed(parts)])
    if fold:
        yield Round([(receiver, sender) for sender, receiver in fold], whole)


def _in_groups(pairs: Pairs, groups: Sequence[Sequence[int]]) -> Pairs:
    return [(group[sender], group[receiver]) for group in groups for sender, receiver in pairs]


def _on_level(rounds: Sequence[Round], num_nodes: int, local: int, is_slow: bool) -> LevelTraffic:
    total = num_nodes * local
    messages, wire_bytes, num_rounds, critical = np.zeros(total, int), np.zeros(total), 0, 0.0
    for pairs, num_bytes, times in rounds:
        senders = [sender for sender, receiver in pairs if (sender // local != receiver // local) == is_slow]
        if not senders:
            continue
        sent = np.bincount(senders, minlength=total)
        messages += times * sent
        wire_bytes += times * num_bytes * sent
        link = sent.reshape(num_nodes, local).sum(axis=1) if is_slow else sent
        num_rounds += times * int(sent.max())
        critical += float(times * num_bytes * link.max())
    return LevelTraffic(messages, wire_bytes, num_rounds, critical)
