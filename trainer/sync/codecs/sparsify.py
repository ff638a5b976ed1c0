"""A few elements in full: the largest of a leaf, or some chosen by a random key that all members share."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.sync.buckets import pack, unpack
from trainer.sync.codecs.arguments import ratio_of
from trainer.sync.codecs.base import Codec, Exchanged, Shape, Wire, gathered


def topk(*, ratio: float = 0.01) -> Codec:
    """Sends of each leaf exactly k = max(1, round(ratio n)) of its n elements, the largest by magnitude.

    Of equal ones the first are taken. Values travel as float32, and their positions in as few bytes as the leaf needs;
    leaves that would get no smaller by it are exchanged exactly. Whatever is not sent is dropped whole:
    ||decode(encode(x)) - x||^2 <= (1 - k/n) ||x||^2. Stich et al. 2018, Lin et al. 2018.

    All members get all codes, so a device sends (members - 1) of them: against an exact all-reduce the advantage falls
    as 1 / members.
    """
    ratio = ratio_of(ratio)

    def encode(value: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        flat = value.reshape(-1)
        positions = _largest(flat, _num_kept(flat.shape[0], ratio))
        return flat[positions], positions.astype(_position_dtype(flat.shape[0]))

    def decode(code: tuple[jax.Array, jax.Array], shape: Shape) -> jax.Array:
        values, positions = code
        return _scattered(values, positions.astype(jnp.int32), math.prod(shape)).reshape(shape)

    def applies(shape: Shape) -> bool:
        length = math.prod(shape)
        return _num_kept(length, ratio) * (4 + jnp.dtype(_position_dtype(length)).itemsize) < 4 * length

    return gathered("topk", encode, decode, unit="leaf", applies=applies, sparse=True)


def randomk(*, ratio: float = 0.01) -> Codec:
    """Sends exactly k = max(1, round(ratio n)) elements of each vector of n, one from each of k equal stretches.

    All members choose the same ones, from their common key, so the values alone travel and add up by all-reduce.
    Each has a chance of about k/n; it's sent as it is, not n/k times it, for error feedback sends the others later.
    Without error feedback the expected total is therefore only k/n of the sum. Stich et al. 2018.
    """
    ratio = ratio_of(ratio)

    def exchange(values: Sequence[jax.Array], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
        lengths = [value.shape[0] for value in values]
        keys = [jax.random.fold_in(key, index) for index in range(len(values))]
        chosen = [_one_of_each(key, n, _num_kept(n, ratio)) for key, n in zip(keys, lengths, strict=True)]
        mine = [value[positions] for value, positions in zip(values, chosen, strict=True)]
        summed = unpack(wire.sum(pack(mine)), [each.shape for each in mine])
        return Exchanged(
            [_scattered(*one) for one in zip(summed, chosen, lengths, strict=True)],
            [_scattered(*one) for one in zip(mine, chosen, lengths, strict=True)],
            list(states),
        )

    return Codec("randomk", "element", linear=True, exchange=exchange, sparse=True)


def _num_kept(length: int, ratio: float) -> int:
    return min(length, max(1, round(ratio * length)))


def _position_dtype(length: int) -> Any:
    return next((t for t in (jnp.uint8, jnp.uint16) if length <= jnp.iinfo(t).max + 1), jnp.int32)


def _largest(vector: jax.Array, count: int) -> jax.Array:
    """int32 positions of the largest magnitudes, of equal ones the first."""
    return jax.lax.top_k(jnp.abs(vector), count)[1]


def _one_of_each(key: jax.Array, length: int, count: int) -> jax.Array:
    """int32 (count,): a random position in each of ``count`` stretches, whose lengths differ by at most one."""
    if count == 0:
        return jnp.zeros((0,), jnp.int32)
    index, (shortest, longer) = jnp.arange(count), divmod(length, count)
    starts = index * shortest + jnp.minimum(index, longer)
    return starts + jax.random.randint(key, (count,), 0, shortest + (index < longer))


def _scattered(values: jax.Array, positions: jax.Array, length: int) -> jax.Array:
    """The values at their positions, none of which occurs twice, and zeros elsewhere."""
    return jnp.zeros((length,), jnp.float32).at[positions].set(values, unique_indices=True)
