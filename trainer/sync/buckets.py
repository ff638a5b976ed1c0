"""Leaves <-> buckets: which leaves travel together, and in which order.

The backward pass finishes the last layer's gradient first, and trees are flattened in the forward order more often than
not, so buckets are filled from the last leaf to the first. Each bucket is exchanged by itself, as soon as its leaves
are there, while the rest of the backward pass still runs. The order is a guess only: a wrong one costs overlap, never
correctness.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Bucket = tuple[int, ...]
"""Indices of the leaves that travel together."""

Shape = tuple[int, ...]

BUCKET_MIB = 4.0
"""Many small messages cost between hosts; with a few large ones what is sent within a node waits for what crosses.
Within one process, too, summing each small leaf by itself costs more than copying them together."""


def plan(shapes: Sequence[Shape], bucket_bytes: float) -> list[Bucket]:
    """Groups leaves of these shapes into buckets of about ``bucket_bytes`` of float32, from the last leaf to the first.

    A leaf that fills half a bucket travels alone, and so uncopied. Leaves without elements do not travel at all.
    With ``bucket_bytes`` 0 every leaf travels alone.

    >>> plan([(1000,), (3,), (0,), (2, 2), (5,)], bucket_bytes=40)
    [(4,), (0,), (3, 1)]
    """
    buckets: list[Bucket] = []
    open_bucket, open_bytes = (), 0
    for index in reversed(range(len(shapes))):
        num_bytes = 4 * math.prod(shapes[index])
        if 2 * num_bytes >= bucket_bytes:
            buckets += [(index,)] if num_bytes else []
            continue
        if num_bytes == 0:
            continue
        if open_bytes + num_bytes > bucket_bytes:
            buckets.append(open_bucket)
            open_bucket, open_bytes = (), 0
        open_bucket, open_bytes = (*open_bucket, index), open_bytes + num_bytes
    return [*buckets, open_bucket] if open_bucket else buckets


def runs(shapes: Sequence[Shape], bucket_bytes: float = BUCKET_MIB * 2**20) -> list[Bucket]:
    """Groups neighbouring leaves into runs of no more than ``bucket_bytes`` of float32 or of one leaf.

    >>> runs([(1000,), (3,), (0,), (2, 2), (5,)], bucket_bytes=40)
    [(0,), (1, 2, 3), (4,)]
    """
    found: list[Bucket] = []
    num_bytes = math.inf
    for index, shape in enumerate(shapes):
        num_bytes += 4 * math.prod(shape)
        if num_bytes > bucket_bytes:
            found, num_bytes = [*found, ()], 4 * math.prod(shape)
        found[-1] = (*found[-1], index)
    return found


def pack(leaves: Sequence[jax.Array], transposed: bool = False) -> jax.Array:
    """One float32 vector of all the leaves' elements; a single float32 leaf is only reshaped.

    transposed: matrices go column by column, for the gradient of ``kernel`` in ``x @ kernel`` is computed as its
        transpose: a sum taken of that form leaves the product as it is, and the way back is fused into the optimizer.
    """
    vectors = [_turned(leaf, transposed).astype(jnp.float32).reshape(-1) for leaf in leaves]
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)


def unpack(vector: jax.Array, shapes: Sequence[Shape], transposed: bool = False) -> list[jax.Array]:
    """Undoes ``pack``, but for the dtypes."""
    leaves, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        turned = shape[::-1] if transposed and len(shape) == 2 else shape
        leaves.append(_turned(vector[start : start + size].reshape(turned), transposed))
        start += size
    return leaves


def _turned(leaf: jax.Array, transposed: bool) -> jax.Array:
    return leaf.T if transposed and leaf.ndim == 2 else leaf
