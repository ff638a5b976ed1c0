"""How a program is mapped over the replicas: by ``shard_map`` over the mesh's axes, or by ``pmap`` over one flat axis.

Its arguments and results are global arrays on the mesh either way, so that nobody outside can tell which it was.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.errors import SettingsRefused
from trainer.mesh import AXES

Mapping = Literal["shard_map", "pmap"]

Donated = int | tuple[int, ...]
"""The index of the argument whose memory a program's results may take, or of each; () for none."""

REPLICA = "replica"
"""The one axis of a pmap, over all replicas in order."""


def mapped_mesh(mesh: Mesh, mapping: Mapping) -> Mesh:
    """The mesh as the mapped function sees it: ``mesh`` itself, or its devices along the axis "replica" alone."""
    return mesh if mapping == "shard_map" else Mesh(mesh.devices.reshape(-1), (REPLICA,))


def mapped_axes(mapping: Mapping) -> tuple[str, ...]:
    """The axes over which the mapped function talks to the other replicas."""
    return AXES if mapping == "shard_map" else (REPLICA,)


def check(mesh: Mesh, mapping: Mapping) -> None:
    """Refuses what ``pmap`` cannot do: processes with different numbers of devices.

    Raises:
        SettingsRefused: they differ.
    """
    counts = Counter(device.process_index for device in mesh.devices.flat)
    if mapping == "pmap" and len(set(counts.values())) > 1:
        found = ", ".join(str(counts[rank]) for rank in sorted(counts))
        raise SettingsRefused(
            f'sync.mapping = "pmap" needs as many devices in each process, and they have {found}: '
            'set it to "shard_map", or give every process the same number'
        )


def program(
    body: Callable[..., Any], mesh: Mesh, mapping: Mapping, in_specs: tuple[Any, ...], out_specs: Any, donate: Donated
) -> Any:
    """The compiled form of ``body``, to be called with global arrays or first to be lowered with their shapes.

    Args:
        body: what each replica computes, from its blocks of the arguments to its blocks of the results.
        in_specs, out_specs: partition specs on ``mesh``, with ``body``'s arguments and results as in ``jax.shard_map``.
        donate: the arguments whose memory the results may take.
    """
    if mapping == "pmap":
        return PmapProgram(body, mesh, in_specs, out_specs, donate)
    # The result of an exchange by ring cannot be typed as replicated, hence no check.
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


class PmapProgram:
    """``body`` under ``jax.pmap``, compiled at its first use; for the arguments see ``program``.

    What is sharded on the mesh has one block for each replica in front of pmap's eyes: an array of shape
    (replicas, *block), whose leading dim it maps over. What is replicated it takes, and leaves, as it is.
    """

    def __init__(
        self, body: Callable[..., Any], mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any, donate: Donated
    ) -> None:
        self._border = Border(mesh, in_specs, out_specs)
        self._mapped = jax.pmap(
            body,
            axis_name=REPLICA,
            in_axes=_dims(in_specs),
            out_axes=_dims(out_specs),
            devices=tuple(mesh.devices.flat),
            donate_argnums=donate,
        )
        self._compiled: PmapCompiled | None = None

    def lower(self, *shapes: Any) -> "PmapLowered":
        """Traces the program for global arrays of these shapes."""
        return PmapLowered(self._border, self._mapped.lower(*self._border.stand_ins(shapes)))

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled = self.lower(*arguments).compile()
        return self._compiled(*arguments)


class PmapLowered(NamedTuple):
    """A traced program."""

    border: "Border"
    lowered: Any

    def compile(self) -> "PmapCompiled":
        """Compiles it."""
        return PmapCompiled(self.border, self.lowered.compile())


class PmapCompiled(NamedTuple):
    """A compiled program, from global arrays to global arrays."""

    border: "Border"
    compiled: Any

    def __call__(self, *arguments: Any) -> Any:
        return self.border.leave(self.compiled(*self.border.enter(arguments)))

    def memory_analysis(self) -> Any:
        """As XLA gives it."""
        return self.compiled.memory_analysis()


@dataclass(frozen=True)
class Border:
    """Between global arrays on ``mesh`` and the ones that a pmap over its devices maps."""

    mesh: Mesh
    in_specs: tuple[Any, ...]
    out_specs: Any

    def stand_ins(self, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments that a pmap can be lowered with: arrays of this process's devices, which take no memory."""
        num_local = len(self.mesh.local_devices)

        def stand_in(spec: PartitionSpec, leaf: Any) -> np.ndarray:
            block = NamedSharding(self.mesh, spec).shard_shape(leaf.shape)
            shape = block if _is_replicated(spec) else (num_local, *block)
            return np.broadcast_to(np.zeros((), leaf.dtype), shape)

        return _map(stand_in, self.in_specs, shapes)

    def enter(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as pmap's compiled program takes them."""
        by_replica = NamedSharding(self.mesh, PartitionSpec(AXES))

        def enter(spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
            if _is_replicated(spec):
                return leaf
            blocks = [shard.data[None] for shard in leaf.addressable_shards]
            shape = (self.mesh.size, *blocks[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, by_replica, blocks)

        return _map(enter, self.in_specs, arguments)

    def leave(self, results: Any) -> Any:
        """The compiled program's results as global arrays on the mesh."""

        def leave(spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
            sharding = NamedSharding(self.mesh, spec)
            blocks = [shard.data for shard in leaf.addressable_shards]
            if _is_replicated(spec):
                return jax.make_array_from_single_device_arrays(leaf.shape, sharding, blocks)
            blocks = [block.reshape(block.shape[1:]) for block in blocks]
            shape = tuple(size * self._num_blocks(spec, dim) for dim, size in enumerate(blocks[0].shape))
            return jax.make_array_from_single_device_arrays(shape, sharding, blocks)

        return _map(leave, self.out_specs, results)

    def _num_blocks(self, spec: PartitionSpec, dim: int) -> int:
        """How many blocks the mesh's devices hold along ``dim``, those that several hold alike counted once."""
        entry = spec[dim] if dim < len(spec) else None
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return math.prod(self.mesh.shape[axis] for axis in axes)


def _is_replicated(spec: PartitionSpec) -> bool:
    return spec == PartitionSpec()


def _dims(specs: Any) -> Any:
    """pmap's dims to map over: the leading one of what is sharded, none of what is replicated."""
    return jax.tree.map(lambda spec: None if _is_replicated(spec) else 0, specs)


def _map(function: Callable[[PartitionSpec, Any], Any], specs: Any, tree: Any) -> Any:
    """Applies ``function(spec, leaf)`` to every leaf of ``tree``, of which ``specs`` is a prefix."""
    return jax.tree.map(lambda spec, below: jax.tree.map(lambda leaf: function(spec, leaf), below), specs, tree)
