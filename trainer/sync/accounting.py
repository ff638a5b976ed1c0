"""Messages and wire bytes of an exchange, per device and level, counted from shapes.

Without a codec everything is on the wire in float32. XLA's own all-reduce and all-gather are counted as rings (see
rounds.py); whether a library sends small vectors in fewer, larger messages is not visible here.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from trainer.sync import buckets, lanes
from trainer.sync.coded_rounds import coded_rounds
from trainer.sync.compression import Compression
from trainer.sync.rounds import Round, exchange_rounds


def payload_bytes(gradient: Any) -> int:
    """The size in bytes of a gradient tree as it is exchanged: in float32, whatever its leaves' dtypes.

    >>> import jax.numpy as jnp
    >>> payload_bytes({"kernel": jnp.zeros((3, 4), jnp.bfloat16), "bias": jnp.zeros(4)})
    64
    """
    return sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(gradient))


class LevelTraffic(NamedTuple):
    """What one exchange sends over one level (fast: within nodes; slow: across nodes), all buckets together.

    messages, wire_bytes: sent by each replica; arrays of shape (replicas,).
    rounds:         rounds of messages that have to be waited for, one after another.
    critical_bytes: bytes that the busiest link carries, added up over these rounds. A link of the fast level is a
                    device's own; the link of a node to the slow level is shared by its devices.

    Where a round has messages within nodes and across them, as in a ring through all devices, only those across are
    waited for: ``rounds`` and ``critical_bytes`` count it on the slow level alone.
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
        rounds = list(coded_rounds(compression, shapes, groups, num_nodes, devices_per_node, summing))
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


def _on_level(rounds: Sequence[Round], num_nodes: int, local: int, is_slow: bool) -> LevelTraffic:
    total = num_nodes * local
    messages, wire_bytes, num_rounds, critical = np.zeros(total, int), np.zeros(total), 0, 0.0
    for pairs, num_bytes, times in rounds:
        crossing = [sender for sender, receiver in pairs if sender // local != receiver // local]
        staying = [sender for sender, receiver in pairs if sender // local == receiver // local]
        senders = crossing if is_slow else staying
        if not senders or not num_bytes:
            continue
        sent = np.bincount(senders, minlength=total)
        messages += times * sent
        wire_bytes += times * num_bytes * sent
        if crossing and not is_slow:
            continue
        link = sent.reshape(num_nodes, local).sum(axis=1) if is_slow else sent
        num_rounds += times * int(sent.max())
        critical += float(times * num_bytes * link.max())
    return LevelTraffic(messages, wire_bytes, num_rounds, critical)
