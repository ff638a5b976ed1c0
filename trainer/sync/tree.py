"""The tree: log2 N rounds of pairwise sums, at distance 1, 2, 4, …, the nearest pairs first.

Small vectors travel whole (recursive doubling: log2 N messages of the whole vector). Large ones are halved in each
round and put together again on the way back (halving and doubling: 2 log2 N messages, together the ring's bytes). See
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005). In both each
number is summed as ((0 + 1) + (2 + 3)) + …, so that the bits do not depend on the vector's size.

When N is no power of two, with P the largest one below it, members 1, 3, 5, … of the first 2(N - P) first give their
vector to the neighbour below, stand aside, and get the result back: two more messages of the whole vector. The
neighbour is on the same node wherever nodes have an even number of devices, which spares the slow link.
"""

import jax
import jax.numpy as jnp

from trainer.sync.levels import Level, Pairs
from trainer.sync.ring import pad_to_multiple

HALVING_BYTES = 64 * 2**10
"""Vectors of this size and more are halved. Over loopback, where bytes cost next to nothing, four processes are as
quick either way at 256 KiB; on a link of 1 Gbit/s with 0.1 ms a message, halving saves time from some 50 KiB on."""


def largest_power_of_two(size: int) -> int:
    """The largest power of two that is at most ``size``."""
    return 1 << (size.bit_length() - 1)


def fold_pairs(size: int) -> Pairs:
    """Who gives its vector to whom before the rounds; empty for a power of two."""
    return [(2 * index + 1, 2 * index) for index in range(size - largest_power_of_two(size))]


def distances(size: int) -> list[int]:
    """The distance of the pairs in each round."""
    return [1 << round_ for round_ in range(size.bit_length() - 1)]


def partners(size: int, distance: int) -> Pairs:
    """Who sends to whom (and the other way round) in the round of this distance."""
    active = _active(size)
    return [(active[position], active[position ^ distance]) for position in range(len(active))]


def all_reduce(vector: jax.Array, level: Level) -> jax.Array:
    """The sum of the members' vectors, float32 of shape (n,). Partners add the same two numbers: identical bits."""
    size, fold = level.size, fold_pairs(level.size)
    if size == 1:
        return vector
    if fold:
        vector = vector + level.permute(vector, fold)
    total = _halving(vector, level) if vector.nbytes >= HALVING_BYTES else _doubling(vector, level)
    if fold:
        result = level.permute(total, [(receiver, sender) for sender, receiver in fold])
        total = jnp.where(_member_of(level, [sender for sender, _ in fold]), result, total)
    return total


def _doubling(vector: jax.Array, level: Level) -> jax.Array:
    for distance in distances(level.size):
        vector = vector + level.permute(vector, partners(level.size, distance))
    return vector


def _halving(vector: jax.Array, level: Level) -> jax.Array:
    """Those who stand aside compute zeros and nonsense here, which nobody receives."""
    size = level.size
    active = _active(size)
    part, uppers = pad_to_multiple(vector, len(active)), []
    for distance in distances(size):
        # Of each pair the upper member keeps the second half.
        upper = _member_of(level, [member for position, member in enumerate(active) if position & distance])
        half = part.shape[0] // 2
        kept, given = upper * half, (1 - upper) * half
        received = level.permute(jax.lax.dynamic_slice_in_dim(part, given, half), partners(size, distance))
        part = jax.lax.dynamic_slice_in_dim(part, kept, half) + received
        uppers.append((distance, upper))
    for distance, upper in reversed(uppers):
        other = level.permute(part, partners(size, distance))
        first, second = jnp.where(upper == 1, other, part), jnp.where(upper == 1, part, other)
        part = jnp.concatenate([first, second])
    return part[: vector.shape[0]]


def _active(size: int) -> list[int]:
    """The members that take part in the rounds, a power of two of them."""
    aside = {sender for sender, _ in fold_pairs(size)}
    return [member for member in range(size) if member not in aside]


def _member_of(level: Level, members: list[int]) -> jax.Array:
    """1 on the members listed, 0 on the others: an int32 scalar."""
    return jnp.asarray([int(member in members) for member in range(level.size)], jnp.int32)[level.index()]
