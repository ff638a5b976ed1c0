"""Initial parameters: normal numbers with a standard deviation that is fixed or follows from the kernel's shape.

They are drawn as one flat vector and then shaped. The numbers are those of a shaped draw, but XLA unrolls the random
bits of small dims on the CPU: for the eight kernels of a small convolutional net, 1.6 instead of 12.5 CPU seconds to
compile.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax.typing import Initializer


def normal(std: float) -> Initializer:
    """Normal numbers with mean 0 and this standard deviation."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None) -> jax.Array:
        return std * jax.random.normal(key, (math.prod(shape),), dtype).reshape(shape)

    return init


def fan_normal(fan: Literal["in", "out", "mean"], gain: float = 1.0) -> Initializer:
    """Normal numbers with variance ``gain / fan``, for kernels of shape (..., inputs, outputs).

    A fan counts the connections of one unit: ``in`` with gain 1 is LeCun's (1998), ``mean`` Glorot and Bengio's (2010),
    ``in`` or ``out`` with gain 2 He's (2015) for ReLU.
    """

    def init(key, shape, dtype=jnp.float32, out_sharding=None) -> jax.Array:
        window = math.prod(shape[:-2])
        fans = {"in": shape[-2], "out": shape[-1], "mean": (shape[-2] + shape[-1]) / 2}
        return normal(math.sqrt(gain / (window * fans[fan])))(key, shape, dtype)

    return init
