"""Batch normalisation (Ioffe and Szegedy, 2015) whose result does not depend on how the batch was split.

Rows are weighted, so that padding does not count. Moments are float32, in two passes (first the mean, then the squared
distances from it), which loses nothing when the mean is large. With scope ``global`` both passes are summed over the
mesh; with ``virtual_replica`` they stay within the rows of one call, whatever the number of devices.

A training pass does not touch the running statistics. It records sums, which the trainer adds up over virtual replicas
and replicas, and ``next_running`` then makes the new ones from the total: the same on every replica, in both scopes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nnx_task import Mode, PyTree, Statistics

SCOPES = ("global", "virtual_replica")


class BatchNorm(nnx.Module):
    """Normalises the last dim over all others, then scales and shifts.

    scope:      'global' or 'virtual_replica', see above.
    zero_scale: start with a scale of 0 instead of 1.
    dtype:      of the result; the moments are float32 in any case.
    """

    def __init__(
        self, features: int, *, scope: str = "global", epsilon: float = 1e-5, zero_scale: bool = False, dtype: Any
    ):
        self.scope, self.epsilon, self.dtype = scope, epsilon, dtype
        self.scale = nnx.Param(jnp.zeros(features) if zero_scale else jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))

    def __call__(self, x: jax.Array, mode: Mode) -> jax.Array:
        """x: (rows, ..., features). Training needs ``mode.weight``, and records ``statistics``."""
        mean, var = self.mean[...], self.var[...]
        if mode.key is not None:
            assert mode.weight is not None
            axes = mode.axes if self.scope == "global" else ()
            mean, var, weight = weighted_moments(x, mode.weight, axes)
            self.statistics = Statistics({"mean": weight * mean, "var": weight * var, "weight": weight})
            # Padding had no share in these moments. Scaled by them, 1 / sqrt(epsilon) at worst, it could overflow
            # within a few layers, and 0 * inf is a NaN in the gradient. So it is set to the mean: out comes the bias.
            x = jnp.where(_like(x, mode.weight) > 0, x, mean)
        factor = self.scale[...] * jax.lax.rsqrt(var + self.epsilon)
        return ((x - mean) * factor + self.bias[...]).astype(self.dtype)


def weighted_moments(x: jax.Array, weight: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the mean and the (biased) variance over all dims but the last, and the weight of *these* rows.

    x: (rows, ..., features); weight: (rows,), shared by all positions of a row. Mean and variance are float32
    (features,), over the rows of all replicas along ``axes``; without any weight they are 0. The third is a float32
    scalar that counts this call's rows only, so that ``weight * mean`` adds up over replicas.
    """
    x = x.astype(jnp.float32)
    dims = tuple(range(x.ndim - 1))
    weight_of_x = _like(x, weight)
    local_weight = jnp.sum(weight) * math.prod(x.shape[1:-1])
    total, global_weight = _sum_over(axes, (jnp.sum(x * weight_of_x, dims), local_weight))
    divisor = jnp.where(global_weight > 0, global_weight, 1)
    mean = total / divisor
    var = _sum_over(axes, jnp.sum(jnp.square(x - mean) * weight_of_x, dims)) / divisor
    return mean, var, local_weight


def next_running(model_state: PyTree, statistics: PyTree, momentum: float) -> PyTree:
    """Returns ``momentum * old + (1 - momentum) * new`` for each layer's running mean and variance.

    model_state: nested dicts, ``{"mean", "var"}`` for each layer; statistics: in their place
    ``{"statistics": {"mean", "var", "weight"}}``, added up over the global batch. ``new`` is the weighted mean of the
    recorded moments. A layer of total weight 0 keeps what it has.
    """
    if "statistics" not in statistics:
        return {name: next_running(model_state[name], statistics[name], momentum) for name in model_state}
    recorded = statistics["statistics"]
    weight = recorded["weight"]
    divisor = jnp.where(weight > 0, weight, 1)
    return {
        name: jnp.where(weight > 0, momentum * old + (1 - momentum) * recorded[name] / divisor, old)
        for name, old in model_state.items()
    }


def _like(x: jax.Array, weight: jax.Array) -> jax.Array:
    """(rows,) -> (rows, 1, ..., 1), to go with x."""
    return weight.reshape(-1, *[1] * (x.ndim - 1))


def _sum_over(axes: tuple[str, ...], tree: PyTree) -> PyTree:
    return jax.lax.psum(tree, axes) if axes else tree
