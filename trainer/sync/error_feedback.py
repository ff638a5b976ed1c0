"""Error feedback: what a codec dropped is added to the next contribution.

The residual is local: each owner keeps what *it* did not send. Kept against the averaged update instead, it grows
without bound as soon as owners see different data. See Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes
SignSGD and other gradient compression schemes" (2019).

With momentum correction, the momentum is applied by each owner before anything is dropped, and what was sent is
forgotten by the velocity too (Lin, Han, Mao, Wang and Dally, "Deep gradient compression", 2018). There everything sent
is sparse; a codec that sends all entries, rounded, keeps its velocity.

Both are kept in the units of a mean (see state.py), while values are summed over ``num_owners``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Memory(NamedTuple):
    """What one owner keeps of one value, in the value's shape; None what it does not keep."""

    residual: jax.Array | None = None
    velocity: jax.Array | None = None


def accumulate(
    value: jax.Array, memory: Memory, num_owners: int, momentum: float = 0.0
) -> tuple[jax.Array, jax.Array | None]:
    """What is to be sent now, and the next velocity.

    >>> memory = Memory(residual=jnp.array(2.0), velocity=jnp.array(4.0))
    >>> [float(part) for part in accumulate(jnp.array(1.0), memory, num_owners=2, momentum=0.5)]
    [3.0, 4.0]
    """
    residual, velocity = memory
    if velocity is not None:
        velocity = momentum * velocity + num_owners * value
        value = velocity / num_owners
    return (value if residual is None else value + residual / num_owners), velocity


def settle(
    value: jax.Array, sent: jax.Array, memory: Memory, num_owners: int, is_forgotten: jax.Array | bool = False
) -> Memory:
    """The memory after ``sent`` of what was to be sent; ``memory.velocity`` is the one that ``accumulate`` returned.

    is_forgotten: whether the velocity is cleared where anything was sent.

    >>> memory = settle(jnp.array([3.0, 1.0]), jnp.array([3.0, 0.0]), Memory(jnp.zeros(2), jnp.ones(2)), 2, True)
    >>> memory.residual.tolist(), memory.velocity.tolist()
    ([0.0, 2.0], [0.0, 1.0])
    """
    residual, velocity = memory
    if residual is not None:
        residual = num_owners * (value - sent)
    if velocity is not None:
        velocity = jnp.where(jnp.logical_and(is_forgotten, sent != 0), 0, velocity)
    return Memory(residual, velocity)


def zero_unless(mask: jax.Array, value: jax.Array) -> jax.Array:
    """``value`` where ``mask`` is True, elsewhere zero."""
    return jnp.where(mask, value, jnp.zeros_like(value))
