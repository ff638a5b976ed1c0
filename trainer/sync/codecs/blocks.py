"""Flat vectors cut into blocks of equal length, each with a scale of its own; the last one may be shorter."""

import jax
import jax.numpy as jnp

SMALLEST = float(jnp.finfo(jnp.float32).tiny)
"""The smallest normal float32. What lies below is flushed to zero on some devices, so no scale may."""


def in_blocks(vector: jax.Array, block_size: int, fill: float = 0.0) -> jax.Array:
    """(n,) -> (ceil(n / block_size), block_size), the last block filled up."""
    length = vector.shape[0]
    padded = jnp.pad(vector, (0, -length % block_size), constant_values=fill)
    return padded.reshape(num_blocks(length, block_size), block_size)


def spread(per_block: jax.Array, block_size: int, length: int) -> jax.Array:
    """A block's number for each of its elements: (ceil(length / block_size),) -> (length,)."""
    return jnp.broadcast_to(per_block[:, None], (per_block.shape[0], block_size)).reshape(-1)[:length]


def largest(vector: jax.Array, block_size: int) -> jax.Array:
    """Each block's largest magnitude."""
    return jnp.max(jnp.abs(in_blocks(vector, block_size)), axis=1, initial=0.0)


def num_blocks(length: int, block_size: int) -> int:
    """Blocks in a vector, the last, shorter one among them."""
    return -(-length // block_size)
