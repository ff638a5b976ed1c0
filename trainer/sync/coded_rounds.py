"""The rounds of an exchange with a codec, whose messages are learned by tracing it."""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from trainer.sync import buckets, lanes, ring, shards
from trainer.sync.buckets import Shape
from trainer.sync.codecs.base import Codec
from trainer.sync.compression import Compression
from trainer.sync.lanes import Group
from trainer.sync.rounds import Groups, Round, everybody, flat_rounds, groups_of, in_groups, within
from trainer.sync.wire import EXACT, Message, Recorder, record


def coded_rounds(
    how: Compression, shapes: Sequence[Shape], groups: Sequence[Group], num_nodes: int, local: int, summing: str
) -> Iterator[Round]:
    """The messages of an exchange with a codec, bucket by bucket, and those that agree on whether all is finite."""
    if num_nodes * local == 1:
        return
    nodes, columns = groups_of(num_nodes, local)
    flat = [list(range(num_nodes * local))]
    is_slow = how.compress == "slow"
    size, num_parts, members = (num_nodes, local, columns) if is_slow else (num_nodes * local, 1, flat)
    for group in groups:
        for bucket in group.buckets:
            chosen = [shapes[index] for index in bucket]
            pieces = lanes.pieces(group.codec, chosen, num_parts)
            unit, piece_bytes = group.codec.unit, 4 * sum(math.prod(piece) for piece in pieces)
            is_cut = num_parts > 1 and unit != "leaf"
            if is_cut:
                for run in buckets.runs(chosen):
                    num_elements = sum(shards.row_size(chosen[index], local) for index in run)
                    yield Round(in_groups(everybody(local), nodes), 4 * num_elements)
            elif num_parts > 1:
                yield Round(in_groups(ring.neighbours(local), nodes), piece_bytes / local, 2 * (local - 1))
            shared_by = 1 if unit == "element" else num_parts
            values, parts = (chosen, num_parts) if unit == "part" else (pieces, 1)
            for message in record(group.codec, values, size, parts) if size > 1 else []:
                yield from _message_rounds(message, size, summing, members, shared_by, nodes)
            if is_cut:
                uncut = [shape for shape in chosen if shards.cut_dim(shape, local) is None]
                whole = 4 * sum(shards.row_size(shape, local) for shape in uncut)  # what is kept of these, put together
                totals = 0 if unit == "part" and size > 1 else _handed_on_bytes(group.codec, pieces, size)
                for num_bytes in (totals, *[whole] * len(how.kept(group))):
                    yield Round(in_groups(ring.neighbours(local), nodes), num_bytes, local - 1)
    yield from flat_rounds("xla", 1, num_nodes * local)


def _handed_on_bytes(codec: Codec, pieces: Sequence[Shape], size: int) -> int:
    """What a device gives the others of its node of the totals of these pieces."""

    def handed_on(values: list[jax.Array], key: jax.Array) -> jax.Array:
        by = codec if size > 1 else EXACT
        return lanes.handed_on(by.exchange(values, [()] * len(values), key, Recorder(size)))

    values = [jax.ShapeDtypeStruct(piece, jnp.float32) for piece in pieces]
    given = jax.eval_shape(handed_on, values, jax.random.key(0))
    return given.size * given.dtype.itemsize


def _message_rounds(
    message: Message, size: int, summing: str, members: Groups, shared_by: int, nodes: Groups
) -> Iterator[Round]:
    """One message of each member; where the devices of a node share it, with what they then gather."""
    if message.kind in ("total", "own_and_total"):
        part, copies = math.ceil(message.num_bytes / 4 / shared_by), 1 if message.kind == "total" else 2
        yield Round(in_groups(everybody(shared_by), nodes), 4 * part)
        yield from within(members, flat_rounds(summing, part, size))
        yield Round(in_groups(ring.neighbours(shared_by), nodes), copies * 4 * part, shared_by - 1)
        return
    if message.kind == "share":
        yield Round(in_groups(ring.neighbours(shared_by), nodes), message.num_bytes, shared_by - 1)
        return
    words = 4 if message.kind == "sum" else 1
    part = math.ceil(message.num_bytes / words / shared_by)
    if message.kind == "sum":
        yield from within(members, flat_rounds(summing, part, size))
    elif message.kind == "gather":
        yield Round(in_groups(ring.neighbours(size), members), part, size - 1)
    else:
        yield Round(in_groups(everybody(size), members), part)
    if shared_by > 1:
        gathered = words * part * (1 if message.kind == "sum" else size)
        yield Round(in_groups(ring.neighbours(shared_by), nodes), gathered, shared_by - 1)
