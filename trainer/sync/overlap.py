"""What lets exchanges between processes run beside the backward pass on CPUs. No bit of any value changes.

XLA's CPU runtime starts what is ready in turn, and an exchange blocks the thread that it runs on until the other
processes are there. So an exchange hides only if its thread has nothing else left to start, and if no product waits for
memory that the exchange still uses. Neither follows from the data alone; both functions add a dependency that XLA
cannot see through, by a flag that is never set. They cost a copy of what is sent, and hold all results at once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def behind_products(vector: jax.Array) -> jax.Array:
    """A float32 copy of ``vector``, float32 of shape (n,) with n > 0, to be exchanged in its place.

    The products that became ready together with a gradient stand before its copy, and so before the exchange, which
    only then gets into the line: other threads have the products by that time.

    >>> print(behind_products(jnp.arange(3.0)))
    [0. 1. 2.]
    """
    return _unless(never(vector), vector)


def all_at_once(sums: Sequence[jax.Array], last: jax.Array) -> list[jax.Array]:
    """``sums``, float32 arrays, none of which can be used before ``last``, of shape (n,) with n > 0, is there.

    last: the exchange that ends last. If results were used one by one, their memory would go to later products of the
        backward pass, which would then wait for the exchange.
    """
    unset = never(last)
    return [_unless(unset, total) for total in sums]


def never(values: jax.Array) -> jax.Array:
    """False, though only who knows what one bit can be sees it; of any values of 1 to 4 bytes, at least one."""
    word = jnp.dtype(f"uint{8 * values.dtype.itemsize}")
    return (jax.lax.bitcast_convert_type(values.reshape(-1)[0], word) & 1) > 1


def _unless(unset: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(unset, jnp.zeros((), values.dtype), values)
