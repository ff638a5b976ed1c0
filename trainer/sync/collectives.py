"""The algorithms: each sums one float32 vector over all replicas, and leaves identical bits on every one of them.

Ring and tree have files of their own; here are the others, and the table of all.
"""

from collections.abc import Callable, Mapping
from typing import get_args

import jax
import jax.numpy as jnp

from trainer.config import AcrossName, AlgorithmName
from trainer.sync import ring, tree
from trainer.sync.levels import Level, Topology
from trainer.sync.ring import pad_to_multiple

Collective = Callable[[jax.Array, Level], jax.Array]
"""(float32 vector of shape (n,), level) -> the sum over the level's groups, the same shape and bits on each member."""


def xla(vector: jax.Array, level: Level) -> jax.Array:
    """What XLA makes of a plain sum."""
    return level.all_reduce(vector)


def central(vector: jax.Array, level: Level) -> jax.Array:
    """Everything to member 0, which adds it up, and back: 2(N-1) messages of the whole vector on one link.

    This is what a single parameter server does, and is here to be measured against.
    """
    total = vector
    for member in range(1, level.size):
        total = total + level.permute(vector, [(member, 0)])
    for member in range(1, level.size):
        total = jnp.where(level.index() == member, level.permute(total, [(0, member)]), total)
    return total


FLAT: Mapping[str, Collective] = {"central": central, "ring": ring.all_reduce, "tree": tree.all_reduce, "xla": xla}
"""The algorithms that see a single level."""

ACROSS: tuple[AcrossName, ...] = get_args(AcrossName)
"""Those that ``hierarchical`` may use across nodes."""

ALGORITHMS: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
"""All of them, hierarchical among them."""


def hierarchical(vector: jax.Array, topology: Topology, across: str) -> jax.Array:
    """Reduce-scatter within the node, the exchange of 1/L across nodes, all-gather within the node.

    With L devices on each of M nodes, 2(M-1)/M of the vector's L-th part is all that each sends over the slow link.
    """
    local = topology.fast.size
    padded = pad_to_multiple(vector, local)
    shard = padded if local == 1 else topology.fast.reduce_scatter(padded.reshape(local, -1))
    if topology.slow.size > 1:
        shard = FLAT[across](shard, topology.slow)
    return shard if local == 1 else topology.fast.all_gather(shard)[: vector.shape[0]]


def all_reduce(vector: jax.Array, topology: Topology, algorithm: str, across: str) -> jax.Array:
    """The sum of all replicas' vectors by one of ``ALGORITHMS``; ``across`` matters to ``hierarchical`` alone."""
    if algorithm == "hierarchical":
        return hierarchical(vector, topology, across)
    return FLAT[algorithm](vector, topology.flat)
