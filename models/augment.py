"""Augmentation of images on the device, drawn from a key: the same rows and key give the same images anywhere."""

import jax
import jax.numpy as jnp


def random_shift(image: jax.Array, pixels: int, key: jax.Array) -> jax.Array:
    """Shifts each image by its own whole number of pixels in [-pixels, pixels], up or down and left or right.

    image: (rows, height, width, channels), returned in the same shape and dtype; what is shifted in is zero.
    """
    if pixels == 0:
        return image
    rows, *size = image.shape
    padded = jnp.pad(image, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
    start = jax.random.randint(key, (rows, 2), 0, 2 * pixels + 1)
    return jax.vmap(lambda image, start: jax.lax.dynamic_slice(image, (*start, 0), size))(padded, start)
