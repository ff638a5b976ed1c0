"""Two bytes an element: bfloat16, and float16 with a power of two for each block.

The halves travel as bits, so that no compiler can widen them on the way. They are rounded by ``reduce_precision``
first: a conversion to a narrower type and back may be optimised away, and the residual would be lost with it.
"""

import jax
import jax.numpy as jnp

from trainer.sync.codecs.arguments import block_size_of
from trainer.sync.codecs.base import Codec, Shape, reencoded
from trainer.sync.codecs.blocks import largest, spread

_EXPONENTS = 126
"""Powers of two from 2^-126 to 2^126 are normal float32 numbers, and so are their inverses."""

_HEADROOM = 13
"""A block's largest magnitude, below 4 once divided by its power of two, becomes at most 2^15 in float16."""


def bf16() -> Codec:
    """Rounds to the nearest bfloat16, ties to even: |decode(encode(x)) - x| <= |x| / 2^8 for normal x.

    Magnitudes above the largest bfloat16, 3.39e38, become infinite.
    """

    def encode(value: jax.Array, key: jax.Array) -> jax.Array:
        del key
        rounded = jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
        return jax.lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16)

    def decode(code: jax.Array, shape: Shape) -> jax.Array:
        del shape
        return jax.lax.bitcast_convert_type(code, jnp.bfloat16).astype(jnp.float32)

    return reencoded("bf16", encode, decode)


def fp16(*, block_size: int = 256) -> Codec:
    """Rounds to the nearest float16 after each block was divided by a power of two, sent as one byte.

    |decode(encode(x)) - x| <= max(|x| / 2^11, m / 2^27), where m is the block's largest magnitude: it neither
    overflows, nor loses anything that float32 sums beside m would have kept.
    """
    block_size = block_size_of(block_size)

    def encode(value: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        exponents = _exponents(largest(value, block_size))
        scaled = value * spread(_power(-exponents), block_size, value.shape[0]) * 2.0**_HEADROOM
        rounded = jax.lax.reduce_precision(scaled, exponent_bits=5, mantissa_bits=10)
        return jax.lax.bitcast_convert_type(rounded.astype(jnp.float16), jnp.uint16), exponents.astype(jnp.int8)

    def decode(code: tuple[jax.Array, jax.Array], shape: Shape) -> jax.Array:
        halves, exponents = code
        scaled = jax.lax.bitcast_convert_type(halves, jnp.float16).astype(jnp.float32) * 2.0**-_HEADROOM
        return scaled * spread(_power(exponents.astype(jnp.int32)), block_size, shape[0])

    return reencoded("fp16", encode, decode)


def _exponents(magnitudes: jax.Array) -> jax.Array:
    """int32 e with 2^e <= magnitude < 2^(e + 1), kept where 2^e and 2^-e are normal."""
    biased = jax.lax.bitcast_convert_type(magnitudes, jnp.int32) >> 23
    return jnp.clip(biased - 127, -_EXPONENTS, _EXPONENTS)


def _power(exponents: jax.Array) -> jax.Array:
    """2^exponent as a float32, exactly."""
    return jax.lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)
