"""Dropout (Srivastava et al., 2014) as a pure function of a key."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes each element with probability ``rate`` and divides the others by ``1 - rate``; identity if key is None."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def split_key(key: jax.Array | None, num: int) -> list[jax.Array] | list[None]:
    """Returns ``num`` independent keys, or as many Nones in inference."""
    return [None] * num if key is None else list(jax.random.split(key, num))
