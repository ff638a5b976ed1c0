"""The arguments of ``all_reduce``, and what of them is refused: at once, or where the surrounding loop is traced."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from trainer.config import WITH_CODEC
from trainer.errors import SettingsRefused
from trainer.sync import collectives
from trainer.sync.compression import Compression
from trainer.sync.cost import Profile
from trainer.sync.levels import divide


class Settings(NamedTuple):
    """The arguments of ``all_reduce``."""

    algorithm: str
    across: str
    axes: tuple[str, ...]
    devices_per_node: int | None
    bucket_mib: float | str
    reduce: str
    output_dtype: DTypeLike | None
    profile: Profile | None
    num_hosts: int | None
    compression: Compression | None


def check(settings: Settings) -> None:
    """Refuses what no mesh could make right."""
    algorithm, across, bucket_mib = settings.algorithm, settings.across, settings.bucket_mib
    if algorithm not in ("auto", *collectives.ALGORITHMS):
        known = ", ".join(sorted(collectives.ALGORITHMS))
        raise SettingsRefused(f"sync.algorithm = {algorithm!r}: choose one of auto, {known}")
    if across not in ("auto", *collectives.ACROSS):
        raise SettingsRefused(f"sync.across = {across!r}: choose one of auto, {', '.join(collectives.ACROSS)}")
    if across != "auto" and algorithm not in ("auto", "hierarchical"):
        raise SettingsRefused(
            f"sync.across = {across!r}: sync.algorithm = {algorithm!r} would ignore it; it is for 'hierarchical'"
        )
    if bucket_mib != "auto" and not (isinstance(bucket_mib, int | float) and 0 < bucket_mib < math.inf):
        raise SettingsRefused(f"sync.bucket_mib = {bucket_mib!r}: give a size above 0 in MiB, or 'auto'")
    if settings.reduce not in ("mean", "sum"):
        raise SettingsRefused(f"reduce = {settings.reduce!r}: choose 'mean' or 'sum'")
    if not settings.axes or len(set(settings.axes)) < len(settings.axes):
        raise SettingsRefused(f"axes = {settings.axes}: name each axis to reduce over once")
    if settings.output_dtype is not None and not jnp.issubdtype(settings.output_dtype, jnp.floating):
        raise SettingsRefused(f"output_dtype = {settings.output_dtype!r}: choose a floating-point dtype")
    if how := settings.compression:
        allowed = ("auto", *WITH_CODEC[how.compress])
        if algorithm not in allowed:
            raise SettingsRefused(
                f"sync.algorithm = {algorithm!r}: with sync.codec and sync.compress = {how.compress!r} "
                f"choose one of {', '.join(allowed)}"
            )
        if across != "auto" and how.compress == "all":
            raise SettingsRefused(f"sync.across = {across!r}: sync.compress = 'all' would ignore it; leave it out")
    if algorithm == "hierarchical" and len(settings.axes) == 1 and settings.devices_per_node is None:
        raise SettingsRefused(
            f"sync.algorithm = 'hierarchical' needs two levels, and axes = {settings.axes} is one: "
            "set devices_per_node, or take a mesh with an axis for nodes and one for the devices within"
        )


def check_sizes(settings: Settings, sizes: Sequence[int]) -> None:
    """Refuses nodes that do not fit the axes."""
    divide(sizes, settings.devices_per_node)


def sizes_in(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """The sizes of the axes in ``mesh``, or a refusal if it lacks one."""
    if missing := [axis for axis in axes if axis not in mesh.axis_names]:
        raise SettingsRefused(f"axes = {axes}: the mesh has no axis {missing[0]!r}, only {tuple(mesh.axis_names)}")
    return [mesh.shape[axis] for axis in axes]


def sizes_here(settings: Settings, mesh: Mesh | None) -> list[int]:
    """The sizes of the axes where this is being traced, or a refusal if it is no place to exchange anything."""
    axes = settings.axes
    try:
        sizes, index = [jax.lax.axis_size(axis) for axis in axes], jax.lax.axis_index(axes)
    except NameError as error:
        raise SettingsRefused(
            f"the exchange was called where the axes {axes} are not mapped: call it inside jax.shard_map over a mesh "
            "that has them, or inside jax.pmap with that axis_name, and give all_reduce those axes"
        ) from error
    if mesh is not None and sizes != sizes_in(mesh, axes):
        raise SettingsRefused(
            f"all_reduce was given a mesh whose axes {axes} have sizes {sizes_in(mesh, axes)}, and is called where "
            f"they have {sizes}: give it the mesh of the surrounding shard_map"
        )
    if jax.typeof(index).manual_axis_type.varying:
        raise SettingsRefused(
            "the exchange was called inside jax.shard_map(..., check_vma=True): set check_vma=False, for the result of "
            "an exchange by messages cannot be typed as replicated, and gradients would be summed twice"
        )
    return sizes


def check_leaves(updates: Any) -> None:
    """Refuses leaves that are no floating-point numbers, by name."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise SettingsRefused(
                f"the leaf {jax.tree_util.keystr(path)} has dtype {leaf.dtype}: only floating-point leaves can be "
                "exchanged; wrap the transformation in optax.masked to leave others out"
            )
