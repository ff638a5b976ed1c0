"""The device mesh ``(node, local)``, the shardings on it, and which rows of a batch are whose.

``node`` counts nodes, between which the link is slow; ``local`` counts the devices within one. A replica's index is
its position in row-major order, so replica ``r`` sits on node ``r // L``. Devices are sorted by process, so that every
process holds neighbouring replicas, and thereby one contiguous slice of every global batch.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config import Mesh as MeshSettings
from trainer.errors import SettingsRefused

AXES = ("node", "local")


def make(settings: MeshSettings) -> Mesh:
    """The mesh that ``[mesh]`` asks for, over all devices there are.

    Raises:
        SettingsRefused: the devices are fewer or more than ``nodes * devices_per_node``.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    nodes, local = settings.nodes, settings.devices_per_node
    if local == "auto":
        local = len(devices) // nodes
    if nodes * local != len(devices):
        raise SettingsRefused(
            f"mesh.nodes = {nodes} x mesh.devices_per_node = {settings.devices_per_node} does not fit the "
            f"{len(devices)} {devices[0].platform} devices of {jax.process_count()} process(es): "
            f"set them so that their product is {len(devices)}, or start another number of processes"
        )
    return Mesh(np.array(devices).reshape(nodes, local), AXES)


def devices_per_node(mesh: Mesh) -> int:
    """The devices within one node."""
    return mesh.devices.shape[-1]


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_replica(mesh: Mesh) -> NamedSharding:
    """Dim 0 is shared out over the replicas."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def local_rows(mesh: Mesh, num_rows: int) -> slice:
    """The rows, of ``num_rows`` shared out over the replicas, that this process's devices hold."""
    mine = [index for index, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    rows_per_replica = num_rows // mesh.size
    return slice(mine[0] * rows_per_replica, (mine[-1] + 1) * rows_per_replica)


def place_rows(mesh: Mesh, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes global arrays, sharded by replica, of the rows that each process holds."""
    sharding = by_replica(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in rows.items()}


def place_replicated(mesh: Mesh, tree: Any) -> Any:
    """Copies a pytree of arrays, equal in every process, onto every device of the mesh."""
    return place(tree, jax.tree.map(lambda _: replicated(mesh), tree))


def place(tree: Any, shardings: Any) -> Any:
    """Makes global arrays of a pytree of arrays, equal in every process, each by its sharding.

    They go through the host, since a process cannot address the others' devices.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(put, tree, shardings)


def rank_of_replica(mesh: Mesh, replica: int) -> int:
    """The process that holds a replica."""
    return mesh.devices.flat[replica].process_index
