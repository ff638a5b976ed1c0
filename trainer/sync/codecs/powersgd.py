"""Matrices as products of two thin ones, found by one step of a power iteration. Vogels et al. 2019 (PowerSGD)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.sync.buckets import pack, unpack
from trainer.sync.codecs.arguments import rank_of
from trainer.sync.codecs.base import Codec, Exchanged, Shape, Wire
from trainer.sync.codecs.matrices import matrix, product, rows_and_columns

_DEPENDENT = 1e-6
"""A column of which projection leaves less than this part is only rounding errors of float32."""


def powersgd(*, rank: int = 4) -> Codec:
    """Sends the projection of each matrix onto ``rank`` directions, which follow its largest ones from step to step.

    With M_i a member's matrix (m, n) and Q (n, r) the codec's state: P = orthonormal columns spanning sum_i M_i Q;
    the total is P (sum_i M_i^T P)^T, and a member's share of it P (M_i^T P)^T. A total of rank r comes back as it is,
    to rounding. The next Q is sum_i M_i^T P with its columns made orthonormal, which changes no result beside rounding.
    Directions of which nothing is left, as after a zero gradient, are drawn anew. The totals follow the members' sum
    alone, so where members always differ, a member's residual can become many times larger than the mean one.

    How a leaf becomes a matrix: see ``matrices.cut``. The codec is used where r (m + n) < m n; other leaves, all
    vectors among them, are exchanged exactly. A rank above min(m, n) means that.
    """
    rank = rank_of(rank)

    def exchange(values: Sequence[Any], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
        members = [matrix(value) for value in values]
        keys = jax.random.split(key, 2)
        pairs = zip(members, states, strict=True)
        summands = [m.times(right) for m, right in pairs]
        lefts = _orthonormal(_unpacked(wire.total(pack(summands)), summands), keys[0])
        pairs = zip(members, lefts, strict=True)
        summands = [m.transposed_times(left) for m, left in pairs]
        mine, rights = (_unpacked(packed, summands) for packed in wire.own_and_total(pack(summands)))
        factors = list(zip(members, lefts, rights, mine, strict=True))
        totals = [product(left, right.T).reshape(m.shape) for m, left, right, _ in factors]
        sent = [m.place_of(left, own) for m, left, _, own in factors]
        return Exchanged(totals, sent, _orthonormal(rights, keys[1]))

    def init(shape: Shape) -> jax.Array:
        m, n = rows_and_columns(shape)
        return jax.random.normal(jax.random.key(0), (n, min(rank, m, n)))  # the same whatever a member's seed

    def applies(shape: Shape) -> bool:
        m, n = rows_and_columns(shape)
        return min(rank, m, n) * (m + n) < m * n

    return Codec("powersgd", "part", linear=True, exchange=exchange, init=init, applies=applies)


def orthonormal(matrices: jax.Array, key: jax.Array) -> jax.Array:
    """(k, m, r) with r <= m -> (k, m, r): of each, orthonormal columns whose first j span the first j given ones.

    Where a column depends on those before it, to float32 rounding, or is zero or not finite, a random one takes its
    place; where there is none of these, which is nearly always, Householder's way is taken, which is quicker.
    """
    if matrices.size == 0:
        return matrices
    scales = jnp.max(jnp.abs(matrices), axis=1, keepdims=True)
    columns = matrices / jnp.where(scales > 0, scales, 1.0)
    found, triangles = jnp.linalg.qr(columns)
    lefts, before = jnp.abs(jnp.diagonal(triangles, axis1=1, axis2=2)), jnp.linalg.norm(columns, axis=1)
    is_independent = jnp.all(lefts > _DEPENDENT * before)

    def one_by_one() -> jax.Array:
        return jax.vmap(_one_by_one)(matrices, jax.random.split(key, matrices.shape[0]))

    return jax.lax.cond(is_independent, lambda: found, one_by_one)


def _one_by_one(columns: jax.Array, key: jax.Array) -> jax.Array:
    """Gram-Schmidt, each column projected twice: (m, r) -> (m, r)."""
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
        columns = columns - product(done, product(done.T, columns))
    after = jnp.linalg.norm(columns, axis=0)
    is_independent = after > _DEPENDENT * before
    return columns / jnp.where(is_independent, after, 1.0), is_independent


def _orthonormal(factors: Sequence[jax.Array], key: jax.Array) -> list[jax.Array]:
    """``orthonormal`` of each. Those of one shape are taken together: one by one their many small steps cost most."""
    done = list(factors)
    for number, shape in enumerate(dict.fromkeys(factor.shape for factor in factors)):
        alike = [index for index, factor in enumerate(factors) if factor.shape == shape]
        found = orthonormal(jnp.stack([factors[index] for index in alike]), jax.random.fold_in(key, number))
        for index, columns in zip(alike, found, strict=True):
            done[index] = columns
    return done


def _unpacked(packed: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    return unpack(packed, [array.shape for array in like])
