"""Leaves <-> rows: which part of a leaf each of a node's devices exchanges.

A leaf is cut along its first dim that the number of devices divides, so that a device's part of an array that lies
sharded on the mesh is just what it exchanges. A leaf without such a dim is cut as a flat vector, with zeros behind it.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from trainer.sync.buckets import Shape
from trainer.sync.ring import pad_to_multiple


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Part:
    """What one of a node's ``count`` devices has of a leaf.

    row:   the part as a flat vector, see ``to_rows``.
    index: which part it is, an int32 scalar.
    shape: the leaf's.
    """

    row: jax.Array
    index: jax.Array | int
    shape: Shape = field(metadata={"static": True})
    count: int = field(metadata={"static": True})


def cut_dim(shape: Shape, num_parts: int) -> int | None:
    """The dim along which a leaf of this shape is cut, or None if it is cut as a flat vector.

    >>> cut_dim((3, 8), 4), cut_dim((3, 5), 4), cut_dim((), 1)
    (1, None, None)
    """
    return next((dim for dim, size in enumerate(shape) if size and size % num_parts == 0), None)


def part_shape(shape: Shape, num_parts: int) -> Shape:
    """The shape of one part; that of the whole leaf where no dim can be cut.

    >>> part_shape((3, 8), 4), part_shape((3, 5), 4)
    ((3, 2), (3, 5))
    """
    cut = cut_dim(shape, num_parts)
    return tuple(size // num_parts if dim == cut else size for dim, size in enumerate(shape))


def row_size(shape: Shape, num_parts: int) -> int:
    """Elements in a row.

    >>> row_size((3, 8), 4), row_size((3, 5), 4)
    (6, 4)
    """
    return math.ceil(math.prod(shape) / num_parts)


def to_rows(leaf: jax.Array, num_parts: int) -> jax.Array:
    """The parts of a leaf as flat vectors: (num_parts, row_size)."""
    cut = cut_dim(leaf.shape, num_parts)
    flat = leaf.reshape(-1) if cut is None else jnp.moveaxis(leaf, cut, 0).reshape(-1)
    return pad_to_multiple(flat, num_parts).reshape(num_parts, -1)


def from_rows(rows: jax.Array, shape: Shape) -> jax.Array:
    """Undoes ``to_rows``."""
    cut = cut_dim(shape, rows.shape[0])
    if cut is None:
        return rows.reshape(-1)[: math.prod(shape)].reshape(shape)
    return _from_front(rows, shape, cut)


def part_to_row(part: jax.Array, num_parts: int, shape: Shape) -> jax.Array:
    """A part, cut out of a leaf of this shape along its ``cut_dim``, as its row."""
    cut = cut_dim(shape, num_parts)
    assert cut is not None
    return jnp.moveaxis(part, cut, 0).reshape(-1)


def row_to_part(row: jax.Array, num_parts: int, shape: Shape) -> jax.Array:
    """Undoes ``part_to_row``."""
    cut = cut_dim(shape, num_parts)
    assert cut is not None
    return _from_front(row, part_shape(shape, num_parts), cut)


def _from_front(values: jax.Array, shape: Shape, cut: int) -> jax.Array:
    front = (shape[cut], *shape[:cut], *shape[cut + 1 :])
    return jnp.moveaxis(values.reshape(front), 0, cut)
