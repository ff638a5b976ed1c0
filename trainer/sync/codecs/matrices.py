"""Leaves as matrices, each of which the devices of a node may hold in parts that add up to it.

Products with thin factors are linear in the matrix, so each device takes those of its own part, as summands of the
whole matrix's: no device ever needs the others' parts.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trainer.sync.buckets import Shape
from trainer.sync.ring import pad_to_multiple
from trainer.sync.shards import Part, cut_dim, part_to_row, row_to_part


def cut(shape: Shape) -> int:
    """The number of dims that count a leaf's rows, the others its columns; vectors and scalars are one column.

    It is cut where rows and columns together are fewest: dense kernels, and those of convolutions with many channels,
    before the last dim, which counts the outputs.

    >>> cut((64, 4, 16)), cut((3, 3, 16, 32)), cut((7,))
    (1, 3, 1)
    """
    places = range(max(1, len(shape)), 0, -1)
    sides = {place: math.prod(shape[:place]) + math.prod(shape[place:]) for place in places}
    return min(list(places)[1:] or places, key=sides.__getitem__)


def rows_and_columns(shape: Shape) -> tuple[int, int]:
    """A leaf's size as a matrix.

    >>> rows_and_columns((3, 3, 16, 32)), rows_and_columns(())
    ((144, 32), (1, 1))
    """
    return math.prod(shape[: cut(shape)]), math.prod(shape[cut(shape) :])


@dataclass(frozen=True)
class _Side:
    """The rows, or the columns, of a matrix that a part lies in: counted by ``dims``, a stretch of one of them or all.

    dim: the dim of which the part has the ``index``-th of ``count`` equal stretches; None: it has all.
    """

    dims: Shape
    dim: int | None
    count: int
    index: jax.Array | int

    def of(self, factor: jax.Array) -> jax.Array:
        """The rows of the factor, (all, r), that meet the part."""
        if self.dim is None:
            return factor
        length, folded = self.dims[self.dim] // self.count, factor.reshape(*self.dims, -1)
        met = jax.lax.dynamic_slice_in_dim(folded, self.index * length, length, self.dim)
        return met.reshape(-1, factor.shape[1])

    def within(self, rows: jax.Array) -> jax.Array:
        """Undoes ``of``, with zeros in all other rows."""
        if self.dim is None:
            return rows
        length, rank = self.dims[self.dim] // self.count, rows.shape[1]
        lengths = [length if dim == self.dim else size for dim, size in enumerate(self.dims)]
        nothing, folded = jnp.zeros((*self.dims, rank), rows.dtype), rows.reshape(*lengths, rank)
        whole = jax.lax.dynamic_update_slice_in_dim(nothing, folded, self.index * length, self.dim)
        return whole.reshape(-1, rank)


@dataclass(frozen=True)
class Matrix:
    """A leaf, or a device's part of it, as a matrix of ``rows_and_columns``.

    values: the rows and columns that the part lies in, without the others. A part that is no block of rows or columns
        is a whole matrix, zero where other parts are.
    given:  what it was made of.
    """

    values: jax.Array
    rows: _Side
    columns: _Side
    given: jax.Array | Part

    @property
    def shape(self) -> Shape:
        """The leaf's."""
        return self.given.shape

    def times(self, right: jax.Array) -> jax.Array:
        """The part's summand of M right: (n, r) -> (m, r)."""
        return self.rows.within(product(self.values, self.columns.of(right)))

    def transposed_times(self, left: jax.Array) -> jax.Array:
        """The part's summand of M^T left: (m, r) -> (n, r)."""
        return self.columns.within(product(self.values.T, self.rows.of(left)))

    def place_of(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """What left right^T has where the part lies, in the form in which the part was given."""
        values = product(self.rows.of(left), self.columns.of(right).T)
        if not isinstance(self.given, Part):
            return values.reshape(self.shape)
        row, count = self.given.row, self.given.count
        if cut_dim(self.shape, count) is not None:
            lengths = jax.eval_shape(lambda row: row_to_part(row, count, self.shape), row).shape
            return part_to_row(values.reshape(lengths), count, self.shape)
        flat = pad_to_multiple(values.reshape(-1), count)
        return jax.lax.dynamic_slice_in_dim(flat, self.given.index * row.shape[0], row.shape[0])


def matrix(given: jax.Array | Part) -> Matrix:
    """A float32 leaf, or a part of one, as a matrix."""
    if not isinstance(given, Part):
        return _matrix(given, given, None)
    dim = cut_dim(given.shape, given.count)
    if dim is not None:
        return _matrix(given, row_to_part(given.row, given.count, given.shape), dim)
    length = given.row.shape[0]
    nothing = jnp.zeros(given.count * length, given.row.dtype)
    whole = jax.lax.dynamic_update_slice_in_dim(nothing, given.row, given.index * length, 0)
    return _matrix(given, whole[: math.prod(given.shape)], None)


def _matrix(given: jax.Array | Part, values: jax.Array, dim: int | None) -> Matrix:
    """``dim``: of the leaf, along which it is cut into parts."""
    shape, place = given.shape, cut(given.shape)
    count, index = (given.count, given.index) if isinstance(given, Part) else (1, 0)
    rows = _Side(shape[:place], dim if dim is not None and dim < place else None, count, index)
    columns = _Side(shape[place:], dim - place if dim is not None and dim >= place else None, count, index)
    m = math.prod(rows.dims) // (1 if rows.dim is None else count)
    return Matrix(values.reshape(m, -1 if values.size else 0), rows, columns, given)


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """The matrix product in full float32."""
    return jnp.matmul(left, right, precision="highest")
