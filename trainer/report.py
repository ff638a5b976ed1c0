"""What the host learns of a step: it leaves the program as one array, since each that is fetched costs a round trip."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.task import Sums


class Report(NamedTuple):
    """What the host learns of a step; the same on every replica.

    step, num_updates, consecutive_skips: after the step.
    metrics:      (sum, weight) of the loss and of the task's metrics.
    examples:     real examples in the batch.
    grad_norm:    global norm of the exchanged gradient, before clipping; of onebit_adam, of its direction.
    learning_rate: the one that the step's update uses.
    non_finite:   float32 of shape (replicas,): 1 where a replica's own contribution was not finite.
    applied:      whether the update was applied.
    example_ids:  int32 of shape (global_batch,), -1 for padding; or None.
    """

    step: jax.Array
    num_updates: jax.Array
    consecutive_skips: jax.Array
    metrics: Sums
    examples: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    non_finite: jax.Array
    applied: jax.Array
    example_ids: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedReport:
    """A Report as one array, to be read by ``read``.

    words: int32 of shape (num_words,): the bits of all leaves in the order of ``_by_dtype``, those below 32 bits
        widened.
    """

    words: jax.Array
    structure: Any = field(metadata={"static": True})
    leaves: tuple[jax.ShapeDtypeStruct, ...] = field(metadata={"static": True})


def pack(report: Report) -> PackedReport:
    """Packs a report on the device."""
    leaves, structure = jax.tree.flatten(report)
    words = []
    for dtype, indices in _by_dtype([leaf.dtype for leaf in leaves]):
        values = jnp.concatenate([leaves[index].astype(dtype).reshape(-1) for index in indices])
        words.append(jax.lax.bitcast_convert_type(values, jnp.int32).reshape(-1))
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return PackedReport(jnp.concatenate(words), structure, shapes)


def read(packed: PackedReport) -> Report:
    """The report on the host, in NumPy arrays, bit by bit as it was packed; waits for the step to be done."""
    words, leaves, start = np.asarray(packed.words), {}, 0
    for dtype, indices in _by_dtype([leaf.dtype for leaf in packed.leaves]):
        for index in indices:
            leaf = packed.leaves[index]
            end = start + leaf.size * dtype.itemsize // words.itemsize
            leaves[index] = words[start:end].view(dtype).reshape(leaf.shape).astype(leaf.dtype)
            start = end
    return jax.tree.unflatten(packed.structure, [leaves[index] for index in range(len(leaves))])


def _by_dtype(dtypes: Sequence[DTypeLike]) -> Iterator[tuple[np.dtype, list[int]]]:
    """Each widened dtype with the indices of those that become it, so that few operations pack them all."""
    wide = [np.dtype(_wide(dtype)) for dtype in dtypes]
    for dtype in dict.fromkeys(wide):
        yield dtype, [index for index, other in enumerate(wide) if other == dtype]


def _wide(dtype: DTypeLike) -> DTypeLike:
    """A dtype of 32 bits or more that holds every value of ``dtype``."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(dtype, jnp.int32)
