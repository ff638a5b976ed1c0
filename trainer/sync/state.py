"""What an exchange carries from step to step, found inside any optax state, and moved to another number of owners."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from trainer.errors import SettingsRefused
from trainer.sync.shards import cut_dim


class SyncState(NamedTuple):
    """What lossy codecs have not sent yet, kept per leaf and never per bucket; empty where nothing is compressed.

    by_node:    dicts ``{"residual": tree, "velocity": tree}`` of what is kept; each tree is like the updates, with
                float32 leaves of shape (nodes, *leaf.shape), one row for each node, and () for leaves without any.
    by_shard:   likewise, of codecs for flat vectors and for parts: a node's devices exchange a part of each leaf, so
                each of them need hold no more than that (see ``state_specs``).
    by_replica: likewise, (replicas, *leaf.shape): one row for each replica.
    shared:     ``{"count": updates exchanged, an int32 scalar, "codec": the codec's states}``, the same everywhere.

    Residuals and velocities are in the units of a *mean*: where contributions are summed, they are multiplied by the
    number of owners before they are kept. So their mean is what still has to reach the parameters, whatever ``reduce``
    says and however many owners there are.
    """

    by_node: Any = ()
    by_shard: Any = ()
    by_replica: Any = ()
    shared: Any = ()


OWNED = ("by_node", "by_shard", "by_replica")
"""The fields whose leaves have one row for each owner."""


def state_specs(state: Any, axes: tuple[str, ...] = ("node", "local"), mesh: Mesh | None = None) -> Any:
    """Partition specs for any optax state: all is replicated, but for what an exchange keeps for each owner.

    Args:
        state: the state, or its shapes, as ``init`` returns it outside of the mapped function; ``SyncState`` may be
            anywhere inside ``chain``, ``masked`` and the like.
        axes: the axes that were given to ``all_reduce``: the last counts a node's devices, the others nodes.
        mesh: with it, what each of a node's devices needs only a part of is shared out between them. Without, each
            holds it whole, and the parts have to be put together within the node in every step.

    >>> state = {"count": 0, "sync": SyncState(by_shard={"w": jnp.zeros((2, 3, 8))})}
    >>> state_specs(state)["sync"].by_shard
    {'w': P('node',)}
    >>> mesh = jax.make_mesh((2, 4), ("node", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> state_specs(state, mesh=mesh)["sync"].by_shard
    {'w': P('node', None, 'local')}
    """
    nodes = axes[0] if len(axes) == 2 else axes[:-1]
    local = 1 if mesh is None else mesh.shape[axes[-1]]

    def part(leaf: Any) -> PartitionSpec:
        cut = None if local == 1 else cut_dim(leaf.shape[1:], local)
        return PartitionSpec(nodes) if cut is None else PartitionSpec(nodes, *[None] * cut, axes[-1])

    def of(found: SyncState) -> SyncState:
        return SyncState(
            by_node=jax.tree.map(lambda _: PartitionSpec(nodes), found.by_node),
            by_shard=jax.tree.map(part, found.by_shard),
            by_replica=jax.tree.map(lambda _: PartitionSpec(axes), found.by_replica),
            shared=jax.tree.map(lambda _: PartitionSpec(), found.shared),
        )

    return _map(of, lambda _: PartitionSpec(), state)


def resize(state: Any, num_owners: int) -> Any:
    """``state`` for another number of owners (nodes, or replicas, whichever own the residuals).

    Every new owner gets the mean of the old ones' residuals, and of their velocities. Of what linear codecs have kept
    back only the mean matters; of any codec's the sum of all that has still to be sent is kept. With the number
    unchanged, so is the state. Everything but residuals and velocities is passed through.

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

    return map_owned(leaf, state)


def from_pmap(state: Any, devices_per_node: int = 1) -> Any:
    """``state`` as ``init`` makes it outside, from one that a ``pmap`` returned; to be saved or resized.

    Of what is the same on all replicas, the first one's is taken; of what is kept by owners, each owner's.

    Args:
        state: any pytree with a leading dim of replicas; ``SyncState`` may be anywhere in it.
        devices_per_node: as ``all_reduce`` was given it.

    >>> state = SyncState(by_node={"w": jnp.array([[[1.0]], [[1.0]], [[3.0]], [[3.0]]])}, shared={"count": jnp.ones(4)})
    >>> one = from_pmap(state, devices_per_node=2)
    >>> one.by_node["w"].tolist(), one.shared["count"].tolist(), to_pmap(one, 4).by_node["w"].shape
    ([[1.0], [3.0]], 1.0, (4, 1, 1))
    """

    def first(leaf: Any) -> Any:
        return leaf[0]

    def of(found: SyncState) -> SyncState:
        return SyncState(
            by_node=jax.tree.map(lambda leaf: leaf[::devices_per_node, 0], found.by_node),
            by_shard=jax.tree.map(lambda leaf: leaf[::devices_per_node, 0], found.by_shard),
            by_replica=jax.tree.map(lambda leaf: leaf[:, 0], found.by_replica),
            shared=jax.tree.map(first, found.shared),
        )

    return _map(of, first, state)


def to_pmap(state: Any, num_replicas: int) -> Any:
    """Undoes ``from_pmap``: every replica's own, with a leading dim of replicas, as a ``pmap`` takes it."""

    def repeated(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, (num_replicas, *jnp.shape(leaf)))

    def own(leaf: Any) -> Any:
        return jnp.repeat(leaf, num_replicas // leaf.shape[0], axis=0)[:, None]

    def of(found: SyncState) -> SyncState:
        owned = {field: jax.tree.map(own, getattr(found, field)) for field in OWNED}
        return SyncState(**owned, shared=jax.tree.map(repeated, found.shared))

    return _map(of, repeated, state)


def num_owners(state: Any) -> int | None:
    """How many owners the residuals in ``state`` have, as ``init`` returns it outside; None if nothing is kept."""
    for found in _find(state):
        for leaf in jax.tree.leaves([getattr(found, field) for field in OWNED]):
            return leaf.shape[0]
    return None


def residual_norm(state: Any) -> jax.Array:
    """The global norm of a residual, as root mean square over the owners: what is still unsent, in gradients.

    A float32 scalar, in the units of a mean; at least the norm of the owners' mean residual. 0 where there is none.
    """
    total = jnp.zeros(())
    for found in _find(state):
        for field in OWNED:
            kept = getattr(found, field)
            for leaf in jax.tree.leaves(kept.get("residual", ()) if kept else ()):
                total += jnp.sum(jnp.square(leaf)) / leaf.shape[0]
    return jnp.sqrt(total)


def map_owned(function: Callable[[Any], Any], state: Any) -> Any:
    """``state`` with ``function`` applied to every array that has one row for each owner."""

    def of(found: SyncState) -> SyncState:
        return found._replace(**{field: jax.tree.map(function, getattr(found, field)) for field in OWNED})

    return _map(of, lambda other: other, state)


def _is_sync(node: Any) -> bool:
    return isinstance(node, SyncState)


def _find(state: Any) -> list[SyncState]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_sync) if _is_sync(node)]


def _map(of_sync: Callable[[SyncState], Any], of_other: Callable[[Any], Any], state: Any) -> Any:
    """Applies one function to every ``SyncState`` within ``state``, and the other to all other leaves."""
    return jax.tree.map(lambda node: of_sync(node) if _is_sync(node) else of_other(node), state, is_leaf=_is_sync)
