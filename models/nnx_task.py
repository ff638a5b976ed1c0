"""From a flax NNX module to pure functions over nested dicts: what every task here is built on.

The module's structure (its graph definition) is found by abstract evaluation, so that building a task allocates nothing
and starts no backend. Parameters and model state are plain nested dicts with string keys, such as
``params["blocks"]["0"]["attention"]["query"]["kernel"]``. Modules keep no random state: keys are passed with each call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

PyTree = Any
Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]
M = TypeVar("M", bound=nnx.Module)


class LossParts(NamedTuple):
    """What a forward pass gives besides its loss; the same fields as the trainer's type of this name."""

    metrics: Sums
    statistics: PyTree


class Mode(NamedTuple):
    """How one forward pass is made.

    key:    randomness for dropout; None means inference, where batch-norm uses its running statistics.
    weight: (rows,) float32, 0 for padding; needed in training by batch-norm only.
    axes:   names of mesh axes over which batch-norm may sum; () outside a mesh.
    """

    key: jax.Array | None = None
    weight: jax.Array | None = None
    axes: tuple[str, ...] = ()


class Statistics(nnx.Variable):
    """What a layer records during a training pass: arrays that add up over replicas."""


@dataclass(frozen=True)
class PureModule(Generic[M]):
    """A module without its arrays. ``build`` makes it from a stream of keys, and must not keep the stream."""

    build: Callable[[nnx.Rngs], M]

    @cached_property
    def _graphdef(self) -> nnx.GraphDef[M]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        abstract = nnx.eval_shape(lambda key: self.build(nnx.Rngs(params=key)), key)
        return nnx.split(abstract, nnx.Param, nnx.BatchStat)[0]

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns fresh ``(params, model_state)``, which depend on ``key`` alone."""
        module = self.build(nnx.Rngs(params=key))
        _, params, model_state = nnx.split(module, nnx.Param, nnx.BatchStat)
        return _plain(params), _plain(model_state)

    def bind(self, params: PyTree, model_state: PyTree) -> M:
        """Returns a module of its own that holds these arrays; to be used, and thrown away, inside one traced call."""
        # Without the copy, recording statistics inside a trace raises TraceContextError.
        return nnx.merge(self._graphdef, nnx.restore_int_paths(params), nnx.restore_int_paths(model_state), copy=True)


def recorded_statistics(module: nnx.Module) -> PyTree:
    """Returns what the module's layers recorded in its last training pass, as nested dicts; ``()`` if nothing."""
    return _plain(nnx.state(module, Statistics)) or ()


def clear_padding(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns ``rows`` with zeros wherever a row's weight is 0.

    Done on a model's *input*, because a non-finite padding row would otherwise reach the parameters' gradients as
    0 * NaN however well the loss ignores it.
    """
    counts = (weight > 0).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(counts, rows, 0)


def require_names(batch: Batch, *names: str) -> None:
    """Raises ValueError if the batch lacks one of ``names``."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(
            f"this task needs {' and '.join(missing)} in each batch, but [data] source gives {', '.join(sorted(batch))}"
            ": choose another source, or another [task] target"
        )


def _plain(state: nnx.State) -> PyTree:
    """Nested dicts of arrays. A module list's positions become strings, which sort and print like any other name."""
    return _string_keys(nnx.to_pure_dict(state))


def _string_keys(tree: PyTree) -> PyTree:
    return {str(key): _string_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
