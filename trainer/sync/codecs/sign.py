"""One bit an element: its sign, with a float32 scale for each block. Karimireddy et al. 2019."""

import jax
import jax.numpy as jnp
import numpy as np

from trainer.sync.codecs.arguments import block_size_of
from trainer.sync.codecs.base import Codec, Shape, reencoded
from trainer.sync.codecs.blocks import in_blocks, spread


def sign(*, block_size: int = 1024) -> Codec:
    """Sends each element as plus or minus its block's mean magnitude, eight to a byte.

    ||decode(encode(x)) - x||^2 = ||x||^2 - ||x||_1^2 / n over a block of n: never more than x itself. A block of which
    all elements have the same magnitude comes back exactly, and so does one of zeros. A zero among other numbers is
    sent as plus the scale: with error feedback the next step takes that back. Not to be used without: it can diverge.
    """
    block_size = block_size_of(block_size)

    def encode(value: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        return jnp.packbits(value < 0), _mean_magnitudes(value, block_size)

    def decode(code: tuple[jax.Array, jax.Array], shape: Shape) -> jax.Array:
        bits, scales = code
        scales = spread(scales, block_size, shape[0])
        return jnp.where(jnp.unpackbits(bits, count=shape[0]) == 1, -scales, scales)

    return reencoded("sign", encode, decode)


def _mean_magnitudes(vector: jax.Array, block_size: int) -> jax.Array:
    """Each block's mean magnitude, as its smallest plus the mean of what exceeds it: exact where all are the same."""
    magnitudes = in_blocks(jnp.abs(vector), block_size, fill=jnp.inf)
    smallest = jnp.min(magnitudes, axis=1, initial=jnp.inf)
    starts = block_size * np.arange(magnitudes.shape[0])
    counts = np.minimum(vector.shape[0] - starts, block_size)
    is_element = np.arange(block_size) < counts[:, None]
    excess = jnp.where(is_element, (magnitudes - smallest[:, None]) / counts[:, None], 0.0)
    return smallest + jnp.sum(excess, axis=1)
