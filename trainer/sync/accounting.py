"""Messages and wire bytes of an exchange, per device and level, counted from shapes.

Without a codec everything is on the wire in float32; what a codec sends is counted by tracing it. XLA's own all-reduce and all-gather are counted as rings, which is what Gloo and
NCCL do with large vectors, and its all-to-all as one message to each other member; whether a library sends small
vectors in fewer, larger messages is not visible here.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from trainer.sync import buckets, lanes, ring, shards, tree
from trainer.sync.buckets import Shape
from trainer.sync.compression import Compression
from trainer.sync.lanes import Group
from trainer.sync.levels import Pairs
from trainer.sync.wire import Message, record


Groups = Sequence[Sequence[int]]
"""Replicas that exchange among themselves."""


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
    gradient: Any,
    num_nodes: int,
    devices_per_node: int,
    *,
    algorithm: str,
    across: str = "ring",
    bucket_mib: float | Literal["auto"] = 0,
    compression: Compression | None = None,
) -> Traffic:
    """Counts the exchange of one tree of arrays, or of their shapes.

    Args:
        algorithm: one of ``collectives.ALGORITHMS``; ``across`` matters to "hierarchical" alone.
        bucket_mib: as ``all_reduce`` uses it; 0: leaf by leaf; "auto" only with a codec.
        compression: what is compressed, as ``compression.choose`` settled it; then ``algorithm`` and ``across`` may be
            "auto" too. Counted is an exchange after the warm-up, with the state sharded as ``state_specs`` says with a
            mesh.

    >>> eight = jax.ShapeDtypeStruct((1024,), np.float32)
    >>> traffic(eight, 1, 8, algorithm="ring").wire_bytes_fast / 4096
    1.75
    >>> traffic(eight, 2, 4, algorithm="hierarchical").wire_bytes_slow / 4096
    0.25
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(gradient)]
    if compression is not None:
        summing = compression.summing(algorithm, across)
        groups = lanes.plan(shapes, compression.codec, compression.compress, compression.bucket_bytes(bucket_mib))
        rounds = list(_coded_rounds(compression, shapes, groups, num_nodes, devices_per_node, summing))
        num_buckets = sum(len(group.buckets) for group in groups)
        return _counted(rounds, num_nodes, devices_per_node, num_buckets, payload_bytes(gradient))
    assert bucket_mib != "auto"
    plan = buckets.plan(shapes, bucket_mib * 2**20)
    sizes = [sum(math.prod(shapes[index]) for index in bucket) for bucket in plan]
    rounds = [r for size in sizes for r in exchange_rounds(size, num_nodes, devices_per_node, algorithm, across)]
    return _counted(rounds, num_nodes, devices_per_node, len(plan), payload_bytes(gradient))


def _counted(rounds: Sequence[Round], num_nodes: int, local: int, num_buckets: int, num_bytes: int) -> Traffic:
    fast, slow = (_on_level(rounds, num_nodes, local, is_slow) for is_slow in (False, True))
    return Traffic(fast, slow, num_buckets, num_bytes)


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
    nodes, columns = _groups(num_nodes, local)
    shard = math.ceil(num_elements / local)
    if local > 1:
        yield Round(_in_groups(_everybody(local), nodes), 4 * shard)
    yield from _within(columns, _flat_rounds(across, shard, num_nodes))
    if local > 1:
        yield Round(_in_groups(ring.neighbours(local), nodes), 4 * shard, local - 1)


def _coded_rounds(
    how: Compression, shapes: Sequence[Shape], groups: Sequence[Group], num_nodes: int, local: int, summing: str
) -> Iterator[Round]:
    """The messages of an exchange with a codec, bucket by bucket, and those that agree on whether all is finite."""
    if num_nodes * local == 1:
        return
    nodes, columns = _groups(num_nodes, local)
    everybody = [list(range(num_nodes * local))]
    is_slow = how.compress == "slow"
    size, num_parts, members = (num_nodes, local, columns) if is_slow else (num_nodes * local, 1, everybody)
    for group in groups:
        for bucket in group.buckets:
            chosen = [shapes[index] for index in bucket]
            pieces = lanes.pieces(group.codec, chosen, num_parts)
            is_flat, piece_bytes = group.codec.unit == "element", 4 * sum(math.prod(piece) for piece in pieces)
            if num_parts > 1 and is_flat:
                yield Round(_in_groups(_everybody(local), nodes), piece_bytes)
            elif num_parts > 1:
                yield Round(_in_groups(ring.neighbours(local), nodes), piece_bytes / local, 2 * (local - 1))
            shared_by = 1 if is_flat else num_parts
            for message in record(group.codec, pieces, size) if size > 1 else []:
                yield from _message_rounds(message, size, summing, members, shared_by, nodes)
            whole = sum(
                4 * shards.row_size(shape, local) for shape in chosen if shards.cut_dim(shape, local) is None
            ) * len(how.kept(group))
            if num_parts > 1 and is_flat:
                for num_bytes in (piece_bytes, whole):
                    yield Round(_in_groups(ring.neighbours(local), nodes), num_bytes, local - 1)
    yield from _flat_rounds("xla", 1, num_nodes * local)


def _message_rounds(
    message: Message, size: int, summing: str, members: Groups, shared_by: int, nodes: Groups
) -> Iterator[Round]:
    """One message of each member; where the devices of a node share it, with what they then gather."""
    words = 4 if message.kind == "sum" else 1
    part = math.ceil(message.num_bytes / words / shared_by)
    if message.kind == "sum":
        yield from _within(members, _flat_rounds(summing, part, size))
    elif message.kind == "gather":
        yield Round(_in_groups(ring.neighbours(size), members), part, size - 1)
    else:
        yield Round(_in_groups(_everybody(size), members), part)
    if shared_by > 1:
        gathered = words * part * (1 if message.kind == "sum" else size)
        yield Round(_in_groups(ring.neighbours(shared_by), nodes), gathered, shared_by - 1)


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


def _groups(num_nodes: int, local: int) -> tuple[Groups, Groups]:
    """The replicas node by node, and the nodes' n-th devices for each n."""
    nodes = [list(range(node * local, (node + 1) * local)) for node in range(num_nodes)]
    return nodes, [list(column) for column in zip(*nodes, strict=True)]


def _everybody(size: int) -> Pairs:
    """Everybody sends to everybody else."""
    return [(sender, receiver) for sender in range(size) for receiver in range(size) if sender != receiver]


def _within(groups: Groups, rounds: Iterable[Round]) -> Iterator[Round]:
    for pairs, num_bytes, times in rounds:
        yield Round(_in_groups(pairs, groups), num_bytes, times)


def _in_groups(pairs: Pairs, groups: Groups) -> Pairs:
    return [(group[sender], group[receiver]) for group in groups for sender, receiver in pairs]


def _on_level(rounds: Sequence[Round], num_nodes: int, local: int, is_slow: bool) -> LevelTraffic:
    total = num_nodes * local
    messages, wire_bytes, num_rounds, critical = np.zeros(total, int), np.zeros(total), 0, 0.0
    for pairs, num_bytes, times in rounds:
        senders = [sender for sender, receiver in pairs if (sender // local != receiver // local) == is_slow]
        if not senders or not num_bytes:
            continue
        sent = np.bincount(senders, minlength=total)
        messages += times * sent
        wire_bytes += times * num_bytes * sent
        link = sent.reshape(num_nodes, local).sum(axis=1) if is_slow else sent
        num_rounds += times * int(sent.max())
        critical += float(times * num_bytes * link.max())
    return LevelTraffic(messages, wire_bytes, num_rounds, critical)
