"""What a model must offer to be trained here. Nothing else about a model is known to the trainer.

A task is plain JAX: parameters and model state are pytrees of arrays, and every method is pure. It is named in the
settings by import path (``[task] target = "package.module:Class"``) and built with ``[task.args]`` as keywords.

Losses and metrics are *sums*, never means: the trainer adds them over virtual replicas and replicas, adds the weights
likewise, and divides once. That is what makes the result independent of how a batch was split.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

PyTree = Any
"""Any nesting of dicts, lists and tuples with arrays as leaves."""

Batch = dict[str, jax.Array]
"""Named arrays whose first dim counts examples.

Always holds ``weight``, float32 of shape ``(rows,)``: 1 for a real example, 0 for padding.
The other names are those of the data source (``image`` and ``label``, or ``tokens``).
"""

Sums = dict[str, tuple[jax.Array, jax.Array]]
"""Metric name -> (sum, weight), two float32 scalars. The metric is sum / weight, after adding both up."""


class LossParts(NamedTuple):
    """What one forward pass over one virtual replica's rows contributes besides its loss.

    metrics:    further metrics as (sum, weight), for example ``accuracy``.
    statistics: a pytree of float32 arrays that *add up* over virtual replicas and replicas, and from which
                ``next_model_state`` makes the new model state; ``()`` for a model without state.
    """

    metrics: Sums
    statistics: PyTree


@runtime_checkable
class Task(Protocol):
    """A model with its loss, as the trainer sees it."""

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns fresh ``(params, model_state)``: nested dicts with string keys. ``model_state`` is ``{}`` if there is
        none. Depends on ``key`` alone, so that it is the same for every number of devices."""
        ...

    def weight(self, batch: Batch) -> jax.Array:
        """The number of real examples, or tokens, in ``batch``: a float32 scalar that depends on no parameter."""
        ...

    def loss(
        self, params: PyTree, model_state: PyTree, batch: Batch, *, key: jax.Array, axes: tuple[str, ...]
    ) -> tuple[jax.Array, LossParts]:
        """The training loss *summed* over ``batch`` (float32 scalar; rows of weight 0 count for nothing).

        key:  randomness for this step and this virtual replica (dropout, augmentation).
        axes: names of the mesh axes over which statistics may be summed with ``jax.lax.psum``; ``()`` outside a mesh.
        """
        ...

    def next_model_state(self, model_state: PyTree, statistics: PyTree) -> PyTree:
        """The model state after a step, given the statistics added up over the whole global batch."""
        ...

    def evaluate(self, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
        """Metrics in inference mode, ``loss`` among them, as (sum, weight)."""
        ...
