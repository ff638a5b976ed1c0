"""What is compressed and how: the arguments of ``all_reduce`` that concern the codec, and the state that they need."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.config import WITH_CODEC, CompressName
from trainer.errors import SettingsRefused
from trainer.sync import codecs, lanes, shards
from trainer.sync.buckets import BUCKET_MIB, Shape
from trainer.sync.codecs.base import Codec
from trainer.sync.lanes import Group
from trainer.sync.levels import Topology
from trainer.sync.state import OWNED, SyncState
from trainer.sync.wire import EXACT, record

TINY = 1 / 16
"""Codes below this part of float32 are tiny."""

TINY_CODES_MIB = 32.0
"""The size of buckets of which only tiny codes are sent."""


class Compression(NamedTuple):
    """What is compressed and how; see ``all_reduce`` for the fields."""

    codec: Codec
    compress: CompressName = "slow"
    error_feedback: bool = False
    warmup_steps: int = 0
    momentum: float = 0.0
    seed: int = 0

    def bucket_bytes(self, bucket_mib: float | str) -> float:
        """Leaves are exchanged together up to this size.

        Codecs for whole leaves send small messages, best together. So do codecs for vectors whose code is tiny: in the
        usual buckets headers would be a good part of what they send.
        """
        if bucket_mib != "auto":
            return float(bucket_mib) * 2**20
        if self.codec.unit != "element":
            return math.inf
        return (TINY_CODES_MIB if _is_tiny(self.codec) else BUCKET_MIB) * 2**20

    def summing(self, algorithm: str, across: str) -> str:
        """The flat collective by which the members of an exchange sum what adds up as it is."""
        named = across if self.compress == "slow" else algorithm
        return "xla" if named == "auto" else named

    def kept(self, group: Group) -> list[str]:
        """What is kept of a group's leaves."""
        residual = ["residual"] if self.error_feedback and group.codec is not EXACT else []
        return residual + (["velocity"] if self.momentum else [])


def _is_tiny(codec: Codec) -> bool:
    """Whether what one of two members sends of a large vector is a small part of the vector."""
    length = 2**20
    sent = sum(message.num_bytes for message in record(codec, [(length,)], 2))
    return sent < 4 * length * TINY


Kept = dict[str, dict[int, jax.Array]]
"""By "residual" or "velocity", then by the leaf's index: one device's block of shape (1, *shape or part of it)."""


def initial(how: Compression, params: Any, num_owners: int) -> SyncState:
    """The state before the first exchange: nothing is kept back; ``num_owners`` is 1 for one owner's block."""
    leaves, structure = jax.tree.flatten(params)
    shapes = [leaf.shape for leaf in leaves]
    groups = lanes.plan(shapes, how.codec, how.compress, 0)

    def tree(of: Callable[[Group, Shape], Any]) -> Any:
        found = {index: of(group, shapes[index]) for group in groups for index in indices_of(group)}
        return structure.unflatten([found.get(index, ()) for index in range(len(leaves))])

    def kept(field: str, name: str) -> Any:
        def rows(group: Group, shape: Shape) -> Any:
            is_kept = group.owned == field and name in how.kept(group)
            return jnp.zeros((num_owners, *shape), jnp.float32) if is_kept else ()

        return tree(rows)

    def state(group: Group, shape: Shape) -> Any:
        return group.codec.init(shape) if group.codec.unit != "element" else ()

    fields = {field: _with_leaves({name: kept(field, name) for name in ("residual", "velocity")}) for field in OWNED}
    codec = _with_leaves({"codec": tree(state)}).get("codec", ())
    return SyncState(
        **{field: found or () for field, found in fields.items()},
        shared={"count": jnp.zeros((), jnp.int32), "codec": codec},
    )


def _with_leaves(trees: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tree for name, tree in trees.items() if jax.tree.leaves(tree)}


def choose(
    codec: str | Codec,
    codec_args: Mapping[str, Any],
    *,
    compress: CompressName = "slow",
    error_feedback: bool = False,
    warmup_steps: int = 0,
    momentum_correction: float = 0.0,
    seed: int = 0,
) -> Compression | None:
    """Settles what is compressed; None where nothing is.

    Raises:
        SettingsRefused: an unknown codec or argument, a value out of range, or one that would be ignored.
    """
    if compress not in WITH_CODEC:
        raise SettingsRefused(f"sync.compress = {compress!r}: choose {' or '.join(map(repr, WITH_CODEC))}")
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise SettingsRefused(f"sync.warmup_steps = {warmup_steps!r}: give a number of updates, 0 or more")
    if not 0 <= momentum_correction < 1:
        raise SettingsRefused(f"sync.momentum_correction = {momentum_correction!r}: give a number >= 0 and < 1")
    if codec == "none":
        ignored = {
            "args": codec_args,
            "error_feedback": error_feedback,
            "warmup_steps": warmup_steps,
            "momentum_correction": momentum_correction,
        }
        for name in (name for name, value in ignored.items() if value):
            raise SettingsRefused(f"sync.{name}: sync.codec = 'none' would ignore it; choose a codec or leave it out")
        return None
    if momentum_correction and not error_feedback:
        raise SettingsRefused(
            f"sync.momentum_correction = {momentum_correction}: it needs error feedback; set sync.error_feedback, or "
            "leave the momentum to the optimizer"
        )
    if isinstance(codec, Codec):
        if codec_args:
            raise SettingsRefused("codec_args are for a codec given by its name; a codec of your own has them already")
    else:
        codec = codecs.build(codec, codec_args)
    return Compression(codec, compress, error_feedback, warmup_steps, momentum_correction, seed)


def indices_of(group: Group) -> list[int]:
    """The leaves of all its buckets."""
    return [index for bucket in group.buckets for index in bucket]


def opened(structure: Any, state: SyncState) -> tuple[Kept, dict[int, Any]]:
    """What is kept of each leaf, and each leaf's codec state."""
    kept: Kept = {"residual": {}, "velocity": {}}
    for field in OWNED:
        for name, tree in (getattr(state, field) or {}).items():
            blocks = structure.flatten_up_to(tree)
            kept[name] |= {index: block for index, block in enumerate(blocks) if not isinstance(block, tuple)}
    codec = state.shared["codec"]
    states = structure.flatten_up_to(codec) if jax.tree.leaves(codec) else [()] * structure.num_leaves
    return kept, dict(enumerate(states))


def closed(structure: Any, like: SyncState, kept: Kept, states: dict[int, Any]) -> SyncState:
    """Undoes ``opened``: the state that follows on ``like``, one update later."""
    fields: dict[str, Any] = {}
    for field in OWNED:
        found = getattr(like, field)
        if not found:
            continue
        fields[field] = {}
        for name, tree in found.items():
            old = structure.flatten_up_to(tree)
            new = [block if isinstance(block, tuple) else kept[name][index] for index, block in enumerate(old)]
            fields[field][name] = structure.unflatten(new)
    codec = like.shared["codec"]
    codec = structure.unflatten([states[i] for i in range(len(states))]) if jax.tree.leaves(codec) else codec
    return SyncState(**fields, shared={"count": like.shared["count"] + 1, "codec": codec})


def check_state(how: Compression, updates: Any, state: Any, levels: Topology) -> None:
    """Refuses a state that is not one owner's, or not of these settings."""
    wanted = jax.eval_shape(lambda: initial(how, updates, 1))
    if jax.tree.structure(state) != jax.tree.structure(wanted):
        raise SettingsRefused(
            "the exchange's state was made for another codec, other arguments of all_reduce or other parameters: "
            "call init again with these, or give all_reduce the arguments that it was made with"
        )
    local = levels.fast.size
    for field in OWNED:
        found, expected = jax.tree.leaves(getattr(state, field)), jax.tree.leaves(getattr(wanted, field))
        for block, shape in zip(found, (leaf.shape for leaf in expected), strict=True):
            allowed = [shape, (1, *shards.part_shape(shape[1:], local))] if field == "by_shard" else [shape]
            if block.shape not in allowed:
                raise SettingsRefused(
                    f"the exchange's state has a leaf of shape {block.shape} where one owner's has {shape}: with "
                    "jax.shard_map give it in_specs and out_specs of trainer.sync.state_specs(state, mesh=mesh), with "
                    "jax.pmap call init inside the pmap"
                )
