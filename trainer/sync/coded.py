"""The exchange with a codec: lanes, error feedback, warm-up, and the guard against what is not finite."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.sync import error_feedback, lanes
from trainer.sync.buckets import Shape
from trainer.sync.codecs.base import Codec
from trainer.sync.compression import Compression, check_state, closed, opened
from trainer.sync.error_feedback import Memory, zero_unless
from trainer.sync.lanes import Lane, Spread, all_finite
from trainer.sync.levels import Topology
from trainer.sync.state import SyncState
from trainer.sync.wire import EXACT

Pieces = dict[str, list[jax.Array]]
"""By "residual" or "velocity": what is kept of each of the values that a codec is given."""


class _Turn(NamedTuple):
    """What an exchange has settled before its first bucket.

    owners:  how many there are.
    is_warm: whether the warm-up is over, a bool scalar that is the same everywhere.
    key:     of this exchange's random numbers, and then of a bucket's: the same everywhere.
    """

    how: Compression
    levels: Topology
    owners: int
    is_warm: jax.Array
    key: jax.Array


class _Done(NamedTuple):
    """What came of a bucket. memory: what is kept afterwards; is_finite: whether all is on this replica."""

    totals: list[jax.Array]
    states: list[Any]
    memory: Pieces
    is_finite: jax.Array


def exchange(
    how: Compression,
    levels: Topology,
    algorithm: str,
    bucket_bytes: float,
    updates: Any,
    state: SyncState,
    mask: Any = None,
    divisor: int = 1,
) -> tuple[list[jax.Array], SyncState]:
    """The sums of all replicas' contributions, as the codec left them, and the next state.

    Where anything is not finite, on any replica, all sums are NaN on every one, and the state is as it was.

    Args:
        algorithm: the flat collective by which vectors are summed that add up as they are.
        updates: a pytree of float32 contributions; the sums come as the list of its leaves.
        state: one owner's.
        mask: where it is False, sums are zero and nothing is kept; a tree of bools like ``updates``, or None for all.
        divisor: what the contributions are to be divided by; it is done once they are summed within the node.
    """
    check_state(how, updates, state, levels)
    values, structure = jax.tree.flatten(updates)
    masks = None if mask is None else structure.flatten_up_to(mask)
    shapes = [value.shape for value in values]
    kept, states = opened(structure, state)
    turn = _turn(how, levels, state)
    sums, finite = list(values), []
    after, next_states = {name: dict(blocks) for name, blocks in kept.items()}, dict(states)
    groups = lanes.plan(shapes, how.codec, how.compress, bucket_bytes)
    for number, (codec, owned, bucket) in enumerate((g.codec, g, b) for g in groups for b in g.buckets):
        lane, chosen = lanes.lane_of(codec, how.compress, levels, algorithm), [shapes[index] for index in bucket]
        blocks = {name: [kept[name][index] for index in bucket] for name in how.kept(owned)}
        done = _exchange_bucket(
            turn._replace(key=jax.random.fold_in(turn.key, number)),
            codec,
            lane,
            chosen,
            [piece / divisor for piece in lane.collect([values[index] for index in bucket])],
            {name: lane.read(found, chosen) for name, found in blocks.items()},
            [states[index] for index in bucket],
            None if masks is None else lane.read([masks[index][None] for index in bucket], chosen),
        )
        finite.append(done.is_finite)
        for index, total in zip(bucket, done.totals, strict=True):
            sums[index] = total if masks is None else zero_unless(masks[index], total)
        for name, found in blocks.items():
            after[name].update(zip(bucket, lane.write(done.memory[name], found, chosen), strict=True))
        if codec.unit != "element":
            next_states.update(zip(bucket, done.states, strict=True))
    is_finite = _everywhere(finite, levels)
    following = closed(structure, state, after, next_states)
    following = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), following, state)
    return [jnp.where(is_finite, total, jnp.nan) for total in sums], following


def _turn(how: Compression, levels: Topology, state: SyncState) -> _Turn:
    count, level = state.shared["count"], levels.slow if how.compress == "slow" else levels.flat
    key = jax.random.fold_in(jax.random.key(how.seed), count)
    return _Turn(how, levels, level.size, count >= how.warmup_steps, key)


def _exchange_bucket(
    turn: _Turn,
    codec: Codec,
    lane: Lane,
    shapes: Sequence[Shape],
    values: Sequence[jax.Array],
    memory: Pieces,
    states: list[Any],
    masks: Sequence[jax.Array] | None,
) -> _Done:
    """Adds what was kept back, exchanges, and keeps what was not sent."""

    def masked(pieces: Sequence[jax.Array]) -> list[jax.Array]:
        return list(pieces) if masks is None else [zero_unless(*pair) for pair in zip(masks, pieces, strict=True)]

    before = [Memory(**{name: pieces[at] for name, pieces in memory.items()}) for at in range(len(values))]
    begun = [
        error_feedback.accumulate(value, owned, turn.owners, turn.how.momentum)
        for value, owned in zip(values, before, strict=True)
    ]
    whole = [value for value, _ in begun]
    values = masked(whole)
    spread = _coded(turn, codec, lane, shapes, values, states if codec.unit != "element" else [()] * len(values))
    sent, is_forgotten = masked(spread.sent), turn.is_warm if codec.sparse else False
    after = [
        error_feedback.settle(value, sent, owned._replace(velocity=velocity), turn.owners, is_forgotten)
        for value, (_, velocity), sent, owned in zip(values, begun, sent, before, strict=True)
    ]
    kept = {name: masked([getattr(owned, name) for owned in after]) for name in memory}
    is_finite = spread.is_finite & all_finite([*whole, *jax.tree.leaves(kept)])
    return _Done(spread.totals, spread.states, kept, is_finite)


def _coded(
    turn: _Turn, codec: Codec, lane: Lane, shapes: Sequence[Shape], values: list[jax.Array], states: list[Any]
) -> Spread:
    """By the codec, once warm and where there is anybody to send to; otherwise exactly."""

    def run(by: Codec) -> Callable[[list[jax.Array], list[Any]], Spread]:
        return lambda values, states: lane.exchange(by, values, states, turn.key, shapes)

    if lane.wire.size == 1 or codec is EXACT:
        return run(EXACT)(values, states)
    if turn.how.warmup_steps == 0:
        return run(codec)(values, states)
    return jax.lax.cond(turn.is_warm, run(codec), run(EXACT), values, states)


def _everywhere(flags: Sequence[jax.Array], levels: Topology) -> jax.Array:
    """Whether all flags are set on all replicas."""
    if not flags:
        return jnp.bool_(True)
    failures = jnp.where(jnp.all(jnp.stack(list(flags))), 0, 1)
    return (levels.flat.all_reduce(failures) if levels.flat.size > 1 else failures) == 0
