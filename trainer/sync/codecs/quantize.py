"""One byte, or half a byte, an element: integers on a symmetric grid, with a float32 scale for each block.

Codes are never added up as integers, which would wrap: members decode them and add up in float32.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from trainer.sync.codecs.arguments import block_size_of, rounding_of
from trainer.sync.codecs.base import Codec, Shape, reencoded
from trainer.sync.codecs.blocks import SMALLEST, largest, spread

Rounding = Literal["nearest", "stochastic"]


def int8(*, block_size: int = 256, rounding: Rounding = "nearest") -> Codec:
    """Integers from -127 to 127, one byte each.

    |decode(encode(x)) - x| <= s / 2 for "nearest" (ties to even) and < s for "stochastic", which rounds up or down so
    that the expectation is x. s is the block's largest magnitude over 127. Blocks too small for s to be a normal
    float32 become zero; a block with anything non-finite decodes to nothing finite.
    """
    return _integers("int8", 127, block_size, rounding, lambda codes: codes, lambda words, length: words)


def int4(*, block_size: int = 128, rounding: Rounding = "nearest") -> Codec:
    """Integers from -7 to 7, two to a byte. The bounds are those of ``int8`` with 7 in place of 127."""
    return _integers("int4", 7, block_size, rounding, _packed, _unpacked)


def _integers(
    name: str,
    top: int,
    block_size: int,
    rounding: str,
    pack: Callable[[jax.Array], jax.Array],
    unpack: Callable[[jax.Array, int], jax.Array],
) -> Codec:
    block_size = block_size_of(block_size)
    is_stochastic = rounding_of(rounding) == "stochastic"

    def encode(value: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        scales = largest(value, block_size) / top
        scales = jnp.where(scales < SMALLEST, 0.0, scales)
        steps = value / spread(jnp.where(scales == 0, jnp.inf, scales), block_size, value.shape[0])
        steps = jnp.floor(steps + _fractions(key, steps.shape)) if is_stochastic else jnp.round(steps)
        return pack(jnp.clip(steps, -top, top).astype(jnp.int8)), scales

    def decode(code: tuple[jax.Array, jax.Array], shape: Shape) -> jax.Array:
        words, scales = code
        return unpack(words, shape[0]).astype(jnp.float32) * spread(scales, block_size, shape[0])

    return reencoded(name, encode, decode)


def _fractions(key: jax.Array, shape: Shape) -> jax.Array:
    """Uniform numbers between 0 and 1, symmetric about 1/2. Sixteen random bits are enough, and cost half of 32."""
    return (jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) + 0.5) / 65536


def _packed(codes: jax.Array) -> jax.Array:
    """int8 (n,) from -8 to 7 -> uint8 (ceil(n / 2),), the first half of them in the lower halves of the bytes.

    That way neighbours stay neighbours, and the loops that pack and unpack keep their vectors.
    """
    nibbles = (jnp.pad(codes, (0, codes.shape[0] % 2)) + 8).astype(jnp.uint8).reshape(2, -1)
    return nibbles[0] | nibbles[1] << 4


def _unpacked(words: jax.Array, length: int) -> jax.Array:
    """Undoes ``_packed``."""
    nibbles = jnp.concatenate([words & 15, words >> 4])[:length]
    return nibbles.astype(jnp.int8) - 8
