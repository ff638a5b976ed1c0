"""Matrices as products of two thin ones, found by one step of a power iteration. Vogels et al. 2019 (PowerSGD)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.sync.buckets import pack, unpack
from trainer.sync.codecs.arguments import rank_of
from trainer.sync.codecs.base import Codec, Exchanged, Shape, Wire

_DEPENDENT = 1e-6
"""A column of which projection leaves less than this part is only rounding errors of float32."""


def powersgd(*, rank: int = 4) -> Codec:
    """Sends the projection of each matrix onto ``rank`` directions, which follow its largest ones from step to step.

    With M_i a member's matrix (m, n) and Q (n, r) the codec's state: P = orthonormal columns spanning sum_i M_i Q;
    the total is P (sum_i M_i^T P)^T, and a member's share of it P (M_i^T P)^T. A total of rank r comes back as it is,
    to rounding. The next Q is sum_i M_i^T P with its columns made orthonormal, which changes no result beside rounding.
    Directions of which nothing is left, as after a zero gradient, are drawn anew. The totals follow the members' sum
    alone, so where members always differ, a member's residual can become many times larger than the mean one.

    A leaf is cut into rows and columns between two of its dims, there where m + n is smallest: for dense kernels, and
    those of convolutions with many channels, before the last dim, which counts the outputs. The codec is used where
    r (m + n) < m n; other leaves, all vectors among them, are exchanged exactly. A rank above min(m, n) means that.
    """
    rank = rank_of(rank)

    def exchange(values: Sequence[jax.Array], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
        matrices = [value.reshape(_rows_and_columns(value.shape)) for value in values]
        keys = [jax.random.fold_in(key, index) for index in range(2 * len(values))]
        lefts = _summed([_product(m, q) for m, q in zip(matrices, states, strict=True)], wire)
        lefts = [orthonormal(left, key) for left, key in zip(lefts, keys[::2], strict=True)]
        mine = [_product(m.T, left) for m, left in zip(matrices, lefts, strict=True)]
        rights = _summed(mine, wire)

        def restored(factors: Sequence[jax.Array]) -> list[jax.Array]:
            pairs = zip(lefts, factors, values, strict=True)
            return [_product(left, right.T).reshape(value.shape) for left, right, value in pairs]

        states = [orthonormal(right, key) for right, key in zip(rights, keys[1::2], strict=True)]
        return Exchanged(restored(rights), restored(mine), states)

    def init(shape: Shape) -> jax.Array:
        m, n = _rows_and_columns(shape)
        return jax.random.normal(jax.random.key(0), (n, min(rank, m, n)))  # the same whatever a member's seed

    def applies(shape: Shape) -> bool:
        m, n = _rows_and_columns(shape)
        return min(rank, m, n) * (m + n) < m * n

    return Codec("powersgd", "leaf", linear=True, exchange=exchange, init=init, applies=applies)


def orthonormal(columns: jax.Array, key: jax.Array) -> jax.Array:
    """(m, r) with r <= m -> (m, r): orthonormal columns whose first j span the first j given ones.

    Gram-Schmidt, each column projected twice. Where a column depends on those before it, to float32 rounding, or is
    zero or not finite, a random one takes its place.
    """
    if columns.size == 0:
        return columns
    spare = jax.random.normal(key, columns.shape)

    def one(index: Any, done: jax.Array) -> jax.Array:
        candidates, is_independent = _orthogonal(jnp.stack([columns[:, index], spare[:, index]], axis=1), done)
        return done.at[:, index].set(jnp.where(is_independent[0], candidates[:, 0], candidates[:, 1]))

    return jax.lax.fori_loop(0, columns.shape[1], one, jnp.zeros_like(columns))


def _orthogonal(columns: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each column less its projection on those done, of length 1, and whether anything of it was left."""
    scales = jnp.max(jnp.abs(columns), axis=0)
    columns = columns / jnp.where(scales > 0, scales, 1.0)
    before = jnp.linalg.norm(columns, axis=0)
    for _ in range(2):
        columns = columns - _product(done, _product(done.T, columns))
    after = jnp.linalg.norm(columns, axis=0)
    is_independent = after > _DEPENDENT * before
    return columns / jnp.where(is_independent, after, 1.0), is_independent


def _rows_and_columns(shape: Shape) -> tuple[int, int]:
    """How a leaf is cut into a matrix: vectors and scalars become one column."""
    cuts = [(math.prod(shape[:dim]), math.prod(shape[dim:])) for dim in range(max(1, len(shape)), 0, -1)]
    return min(cuts[1:] or cuts, key=sum)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")


def _summed(arrays: Sequence[jax.Array], wire: Wire) -> list[jax.Array]:
    """The members' sums of several arrays, in one message."""
    return unpack(wire.sum(pack(arrays)), [array.shape for array in arrays])
