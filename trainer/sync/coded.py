"""The exchange with a codec: lanes, error feedback, warm-up, and the guard against what is not finite."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.sync import error_feedback, lanes
from trainer.sync.codecs.base import Codec, Exchanged, Wire
from trainer.sync.compression import Compression, check_state, closed, opened
from trainer.sync.error_feedback import Memory
from trainer.sync.lanes import Lane
from trainer.sync.levels import Topology
from trainer.sync.state import SyncState
from trainer.sync.wire import EXACT


def exchange(
    how: Compression, levels: Topology, algorithm: str, bucket_bytes: float, updates: Any, state: SyncState
) -> tuple[list[jax.Array], SyncState]:
    """The sums of all replicas' contributions, as the codec left them, and the next state.

    Where anything is not finite, on any replica, all sums are NaN on every one, and the state is as it was.

    Args:
        algorithm: the flat collective by which vectors are summed that add up as they are.
        updates: a pytree of float32 contributions; the sums come as the list of its leaves.
        state: one owner's.
    """
    values, structure = jax.tree.flatten(updates)
    shapes = [value.shape for value in values]
    check_state(how, updates, state, levels)
    kept, states = opened(structure, state)
    count, owners = state.shared["count"], (levels.slow if how.compress == "slow" else levels.flat).size
    step_key = jax.random.fold_in(jax.random.key(how.seed), count)
    sums, after, finite = list(values), {name: dict(blocks) for name, blocks in kept.items()}, []
    numbered = [
        (group, bucket)
        for group in lanes.plan(shapes, how.codec, how.compress, bucket_bytes)
        for bucket in group.buckets
    ]
    for number, (group, bucket) in enumerate(numbered):
        lane = lanes.lane_of(group.codec, how.compress, levels, algorithm)
        chosen, sizes = [values[index] for index in bucket], [shapes[index] for index in bucket]
        memory = {name: lane.read([kept[name][i] for i in bucket], sizes) for name in how.kept(group)}
        key = _key(step_key, number, lane, levels)
        code_states = [states[index] for index in bucket]
        done, memory, to_send = _exchange_bucket(
            how, group.codec, lane, chosen, memory, code_states, key, count, owners
        )
        finite += [jnp.all(jnp.isfinite(piece)) for piece in (*done.totals, *to_send, *jax.tree.leaves(memory))]
        for name, pieces in memory.items():
            blocks = lane.write(pieces, [kept[name][index] for index in bucket], sizes)
            after[name].update(zip(bucket, blocks, strict=True))
        for index, total in zip(bucket, lane.spread(done.totals, sizes), strict=True):
            sums[index] = total
        if group.codec.unit == "leaf":
            states = states | dict(zip(bucket, done.states, strict=True))
    is_finite = _everywhere(finite, levels)
    following = closed(structure, state, after, states, count + 1)
    following = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), following, state)
    return [jnp.where(is_finite, total, jnp.nan) for total in sums], following


def _exchange_bucket(
    how: Compression,
    codec: Codec,
    lane: Lane,
    leaves: Sequence[jax.Array],
    memory: dict[str, list[jax.Array]],
    states: list[Any],
    key: jax.Array,
    count: jax.Array,
    owners: int,
) -> tuple[Exchanged, dict[str, list[jax.Array]], list[jax.Array]]:
    """What came of one bucket; its memory afterwards; and what was to be sent."""
    values = lane.collect(leaves)
    before = [Memory(**{name: pieces[position] for name, pieces in memory.items()}) for position in range(len(values))]
    begun = [
        error_feedback.accumulate(value, owned, owners, how.momentum)
        for value, owned in zip(values, before, strict=True)
    ]
    to_send = [value for value, _ in begun]
    warm = count >= how.warmup_steps
    if codec.unit == "element":
        states = [()] * len(to_send)
    done = _coded(how, codec, to_send, states, key, lane.wire, warm)
    is_forgotten = jnp.logical_and(codec.sparse, warm)
    settled = [
        error_feedback.settle(value, sent, owned._replace(velocity=velocity), owners, is_forgotten)
        for (value, velocity), sent, owned in zip(begun, done.sent, before, strict=True)
    ]
    return done, {name: [getattr(owned, name) for owned in settled] for name in memory}, to_send


def _coded(
    how: Compression,
    codec: Codec,
    values: list[jax.Array],
    states: list[Any],
    key: jax.Array,
    wire: Wire,
    warm: jax.Array,
) -> Exchanged:
    """By the codec, once warm and where there is anybody to send to; otherwise exactly."""
    if wire.size == 1:
        return EXACT.exchange(values, states, key, wire)
    if how.warmup_steps == 0 or codec is EXACT:
        return codec.exchange(values, states, key, wire)

    def run(by: Codec) -> Any:
        return lambda values, states: by.exchange(values, states, key, wire)

    return jax.lax.cond(warm, run(codec), run(EXACT), values, states)


def _key(step_key: jax.Array, bucket: int, lane: Lane, levels: Topology) -> jax.Array:
    """One key for each bucket, the same on all members of its wire; each of a node's parts draws by itself."""
    key = jax.random.fold_in(step_key, bucket)
    is_part = isinstance(lane, lanes.FlatLane) and lane.num_parts > 1
    return jax.random.fold_in(key, levels.fast.index()) if is_part else key


def _everywhere(flags: Sequence[jax.Array], levels: Topology) -> jax.Array:
    """Whether all flags are set on all replicas."""
    if not flags:
        return jnp.bool_(True)
    here = jnp.where(jnp.all(jnp.stack(list(flags))), 0, 1)
    return (levels.flat.all_reduce(here) if levels.flat.size > 1 else here) == 0
