"""The ring: each replica sends 2(N-1)/N of the vector, in 2(N-1) messages to its right-hand neighbour.

Reduce-scatter, then all-gather, as in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009). Any N.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from trainer.sync.levels import Level, Pairs

T = TypeVar("T")

UNROLL_LIMIT = 16
"""Longer rings are compiled as loops: unrolled, 512 replicas take seconds to compile for every bucket."""


def neighbours(size: int) -> Pairs:
    """Everybody sends to the next one."""
    return [(member, (member + 1) % size) for member in range(size)]


def pad_to_multiple(vector: jax.Array, of: int) -> jax.Array:
    """``vector`` with zeros behind it, so that its length is a multiple of ``of``; the vector itself if it is one."""
    missing = -vector.shape[0] % of
    return jnp.pad(vector, (0, missing)) if missing else vector


def all_reduce(vector: jax.Array, level: Level) -> jax.Array:
    """The sum of the members' vectors, float32 of shape (n,). Each chunk is summed in one place: identical bits."""
    size = level.size
    if size == 1:
        return vector
    padded = pad_to_multiple(vector, size)
    chunks, me, pairs = padded.reshape(size, -1), level.index(), neighbours(size)

    def add(step: jax.Array | int, partial: jax.Array) -> jax.Array:
        return level.permute(partial, pairs) + _row(chunks, (me - 1 - step) % size)

    # Member i starts with its own chunk i, and ends with the whole sum of chunk i + 1.
    total = _repeat(size - 1, add, _row(chunks, me))

    def hand_on(step: jax.Array | int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        gathered, passing = carry
        passing = level.permute(passing, pairs)
        return jax.lax.dynamic_update_index_in_dim(gathered, passing, (me - step) % size, 0), passing

    gathered = jax.lax.dynamic_update_index_in_dim(jnp.zeros_like(chunks), total, (me + 1) % size, 0)
    gathered, _ = _repeat(size - 1, hand_on, (gathered, total))
    return gathered.reshape(padded.shape)[: vector.shape[0]]


def summed(size: int, of: Callable[[jax.Array | int], jax.Array]) -> jax.Array:
    """of(0) + of(1) + … in this order.

    Written out it is one pass over everything. Of a sum along the first dim XLA's CPU compiler makes a loop without
    vectors, where what is added has to be decoded first.
    """
    return _repeat(size - 1, lambda index, total: total + of(index + 1), of(0))


def joined(size: int, of: Callable[[jax.Array | int], jax.Array]) -> jax.Array:
    """of(0), of(1), … one after another; vectors of one length.

    Written out they become one vector that is computed once. What computes rows of a matrix XLA's CPU compiler repeats
    wherever the flattened matrix is used, in loops that its index arithmetic keeps from having vectors.
    """
    if size >= UNROLL_LIMIT:
        return jax.lax.map(of, jnp.arange(size)).reshape(-1)
    return jnp.stack([of(index) for index in range(size)]).reshape(-1)


def _row(chunks: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(chunks, index, 0, keepdims=False)


def _repeat(times: int, step: Callable[[jax.Array | int, T], T], carry: T) -> T:
    if times >= UNROLL_LIMIT:
        return jax.lax.fori_loop(0, times, step, carry)
    for index in range(times):
        carry = step(index, carry)
    return carry
