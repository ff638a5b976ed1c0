"""What an exchange carries from step to step, found inside any optax state, and moved to another number of owners."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trainer.errors import SettingsRefused


class SyncState(NamedTuple):
    """What lossy codecs have not sent yet, kept per leaf and never per bucket; empty where nothing is compressed.

    by_node:    a pytree like the updates whose leaves have shape (nodes, *leaf.shape): one residual for each node.
    by_replica: likewise, (replicas, *leaf.shape): one residual for each replica.

    Residuals are in the units of a *mean*: where contributions are summed, they are multiplied by the number of owners
    before they are kept. So their mean is what still has to reach the parameters, whatever ``reduce`` says and however
    many owners there are.
    """

    by_node: Any = ()
    by_replica: Any = ()


def state_specs(state: Any, axes: tuple[str, ...] = ("node", "local")) -> Any:
    """Partition specs for any optax state: all is replicated, but for what an exchange keeps for each owner.

    Args:
        state: the state, or its shapes; ``SyncState`` may be anywhere inside ``chain``, ``masked`` and the like.
        axes: the axes that were given to ``all_reduce``: the last counts a node's devices, the others nodes.

    >>> state_specs({"count": 0, "sync": SyncState(by_node={"w": jnp.zeros((2, 3))})})["sync"].by_node
    {'w': P('node',)}
    """
    nodes = PartitionSpec(axes[0] if len(axes) == 2 else axes[:-1])

    def of(found: SyncState) -> SyncState:
        return SyncState(
            jax.tree.map(lambda _: nodes, found.by_node),
            jax.tree.map(lambda _: PartitionSpec(axes), found.by_replica),
        )

    return _map(of, lambda _: PartitionSpec(), state)


def resize(state: Any, num_owners: int) -> Any:
    """``state`` for another number of owners (nodes, or replicas, whichever own the residuals).

    Every new owner gets the mean residual of the old ones: of what linear codecs have kept back only the mean matters.
    With the number unchanged, so is the state. Everything but residuals is passed through.

    Raises:
        SettingsRefused: ``num_owners`` is less than 1.

    >>> old = SyncState(by_node={"w": jnp.array([[1.0], [3.0]])})
    >>> resize(old, 4).by_node["w"].tolist()
    [[2.0], [2.0], [2.0], [2.0]]
    """
    if num_owners < 1:
        raise SettingsRefused(f"num_owners = {num_owners}: there is at least 1")

    def leaf(residual: jax.Array) -> jax.Array:
        if residual.shape[0] == num_owners:
            return residual
        mean = jnp.mean(jnp.asarray(residual, jnp.float32), axis=0, keepdims=True)
        return jnp.broadcast_to(mean, (num_owners, *mean.shape[1:])).astype(residual.dtype)

    def of(found: SyncState) -> SyncState:
        return SyncState(jax.tree.map(leaf, found.by_node), jax.tree.map(leaf, found.by_replica))

    return _map(of, lambda other: other, state)


def _map(of_sync: Callable[[SyncState], Any], of_other: Callable[[Any], Any], state: Any) -> Any:
    """Applies one function to every ``SyncState`` within ``state``, and the other to all other leaves."""

    def is_sync(node: Any) -> bool:
        return isinstance(node, SyncState)

    return jax.tree.map(lambda node: of_sync(node) if is_sync(node) else of_other(node), state, is_leaf=is_sync)
