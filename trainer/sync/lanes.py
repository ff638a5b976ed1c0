"""Lanes: which leaves are exchanged by which codec, among whom, and in which form.

A lane takes each bucket of leaves to the members of its wire, where the codec exchanges it, and back:

- ``FlatLane``, for codecs that take flat vectors: reduce-scatter within the node, each device exchanges its own part,
  all-gather within the node: of the codes, where totals came as such, for every device can decode them. Where every
  replica is a member by itself, that is only a matter of packing.
- ``PartLane``, for codecs that take a device's part of a leaf: reduce-scatter within the node; what the codec then puts
  together are whole leaves already.
- ``LeafLane``, for codecs that need whole leaves: all-reduce within the node, whose devices then encode the same and
  share the sending (see wire.py).

Both also read and write what is kept for each owner, as it lies on one device: with a first dim of 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from trainer.config import CompressName
from trainer.sync import buckets, shards
from trainer.sync.buckets import Bucket, Shape
from trainer.sync.codecs.base import Codec, Exchanged
from trainer.sync.levels import Level, Topology
from trainer.sync.shards import Part
from trainer.sync.wire import EXACT, Direct, Shared


@dataclass(frozen=True)
class Group:
    """Leaves that are exchanged by one codec.

    owned: the field of ``SyncState`` that keeps what was not sent of them.
    """

    codec: Codec
    buckets: list[Bucket]
    owned: Literal["by_node", "by_shard", "by_replica"]


def plan(shapes: Sequence[Shape], codec: Codec, compress: CompressName, bucket_bytes: float) -> list[Group]:
    """Groups leaves by the codec that exchanges them: the given one, and exactly where it does not apply.

    A codec for whole leaves that are not bucketed (``bucket_bytes`` infinite) sends all of them in one message.
    """
    coded = [bool(codec.applies(shape)) for shape in shapes]

    def group(codec: Codec, wanted: bool) -> Group:
        chosen = [index for index, is_coded in enumerate(coded) if is_coded == wanted]
        found = buckets.plan([shapes[index] for index in chosen], bucket_bytes)
        owned = "by_replica" if compress == "all" else "by_node" if codec.unit == "leaf" else "by_shard"
        return Group(codec, [tuple(chosen[position] for position in bucket) for bucket in found], owned)

    return [found for found in (group(codec, True), group(EXACT, False)) if found.buckets]


class Spread(NamedTuple):
    """What an exchange leaves on a replica.

    totals:    whole leaves.
    sent:      as a lane collects values.
    states:    the codec's next ones.
    is_finite: whether those of the totals are that no other replica need check, a bool scalar.
    """

    totals: list[jax.Array]
    sent: list[jax.Array]
    states: list[Any]
    is_finite: jax.Array


def all_finite(pieces: Sequence[jax.Array]) -> jax.Array:
    """Whether everything is, a bool scalar."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(piece)) for piece in pieces]))


@dataclass(frozen=True)
class FlatLane:
    """Flat vectors among the members of ``wire``; ``within``: the level that is summed over first, if any."""

    wire: Direct
    within: Level | None

    @property
    def num_parts(self) -> int:
        """Devices that share a vector."""
        return 1 if self.within is None else self.within.size

    def collect(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """This member's part of the sum within the node: one vector. It is summed in messages that caches can hold."""
        runs = buckets.runs([leaf.shape for leaf in leaves])
        return [jnp.concatenate([self._part([leaves[index] for index in run]) for run in runs])]

    def exchange(
        self, codec: Codec, values: list[jax.Array], states: list[Any], key: jax.Array, shapes: Sequence[Shape]
    ) -> Spread:
        """By the codec, of the leaves of these shapes; each of a node's parts draws by itself."""
        if self.num_parts > 1 and self.within is not None:
            key = jax.random.fold_in(key, self.within.index())
        done = codec.exchange(values, states, key, self.wire)
        packed, rows = done.packed, self._gathered(handed_on(done))
        if packed is not None:
            rows = jnp.stack([packed.unpack(words)[0] for words in rows])
        totals = [shards.from_rows(part, shape) for part, shape in zip(self._split(rows, shapes), shapes, strict=True)]
        return Spread(totals, done.sent, done.states, all_finite(done.totals if packed is None else packed.own))

    def read(self, blocks: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """What is kept of a bucket, in the form of ``collect``."""
        return [jnp.concatenate([self._row(block[0], shape) for block, shape in zip(blocks, shapes, strict=True)])]

    def write(self, pieces: Sequence[jax.Array], like: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """Undoes ``read``, into blocks that lie as those of ``like``; those that are whole are put together."""
        parts = [part[0] for part in self._split(pieces[0][None], shapes)]
        whole = [not self._is_cut(block, shape) for block, shape in zip(like, shapes, strict=True)]
        blocks: list[jax.Array] = []
        if any(whole):
            chosen = [shape for shape, is_whole in zip(shapes, whole, strict=True) if is_whole]
            together = jnp.concatenate([part for part, is_whole in zip(parts, whole, strict=True) if is_whole])
            blocks = [
                shards.from_rows(rows, shape)
                for rows, shape in zip(self._split(self._gathered(together), chosen), chosen, strict=True)
            ]
        gathered = iter(blocks)
        return [
            next(gathered)[None] if is_whole else shards.row_to_part(part, self.num_parts, shape)[None]
            for part, shape, is_whole in zip(parts, shapes, whole, strict=True)
        ]

    def _part(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Of the sum within the node of a few leaves."""
        rows = jnp.concatenate([shards.to_rows(leaf, self.num_parts) for leaf in leaves], axis=1)
        return rows.reshape(-1) if self.num_parts == 1 or self.within is None else self.within.reduce_scatter(rows)

    def _gathered(self, row: jax.Array) -> jax.Array:
        """(n,) on each device -> (devices, n)."""
        if self.num_parts == 1 or self.within is None:
            return row[None]
        return self.within.all_gather(row).reshape(self.num_parts, -1)

    def _split(self, rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
        """The columns of each leaf."""
        parts, start = [], 0
        for shape in shapes:
            size = shards.row_size(shape, self.num_parts)
            parts.append(rows[:, start : start + size])
            start += size
        return parts

    def _is_cut(self, block: jax.Array, shape: Shape) -> bool:
        return self.num_parts > 1 and block.shape[1:] != shape

    def _row(self, kept: jax.Array, shape: Shape) -> jax.Array:
        if kept.shape != shape:
            return shards.part_to_row(kept, self.num_parts, shape)
        rows = shards.to_rows(kept, self.num_parts)
        if self.num_parts == 1 or self.within is None:
            return rows[0]
        return jax.lax.dynamic_index_in_dim(rows, self.within.index(), 0, keepdims=False)


@dataclass(frozen=True)
class PartLane(FlatLane):
    """Parts of leaves among the members of ``wire``, each on one of the devices of ``within``."""

    within: Level

    def exchange(
        self, codec: Codec, values: list[jax.Array], states: list[Any], key: jax.Array, shapes: Sequence[Shape]
    ) -> Spread:
        """By the codec, for which a node's devices draw alike; exactly, it is an exchange of vectors."""
        if codec.unit == "element":
            return super().exchange(codec, values, states, key, shapes)
        index = self.within.index()
        rows = zip(self._split(values[0][None], shapes), shapes, strict=True)
        parts = [Part(row[0], index, shape, self.num_parts) for row, shape in rows]
        done = codec.exchange(parts, states, key, Shared(self.wire, self.within))
        own = [self._row(total, shape) for total, shape in zip(done.totals, shapes, strict=True)]
        return Spread(done.totals, [jnp.concatenate(done.sent)], done.states, all_finite(own))


@dataclass(frozen=True)
class LeafLane:
    """Whole leaves among the members of ``wire``; ``within``: the level that is summed over first, if any."""

    wire: Direct | Shared
    within: Level | None

    def collect(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves' sums within the node, the same bits on each of its devices."""
        if self.within is None or self.within.size == 1:
            return list(leaves)
        return [self.within.all_reduce(leaf) for leaf in leaves]

    def exchange(
        self, codec: Codec, values: list[jax.Array], states: list[Any], key: jax.Array, shapes: Sequence[Shape]
    ) -> Spread:
        """By the codec, of the leaves of these shapes."""
        del shapes
        done = codec.exchange(values, states, key, self.wire)
        return Spread(done.totals, done.sent, done.states, all_finite(done.totals))

    def read(self, blocks: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """What is kept of a bucket, in the form of ``collect``."""
        del shapes
        return [block[0] for block in blocks]

    def write(self, pieces: Sequence[jax.Array], like: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """Undoes ``read``."""
        del like, shapes
        return [piece[None] for piece in pieces]


Lane = FlatLane | PartLane | LeafLane


def lane_of(codec: Codec, compress: CompressName, levels: Topology, algorithm: str) -> Lane:
    """The lane for a codec; ``algorithm``: the flat collective by which its wire sums."""
    if compress == "all":
        wire = Direct(levels.flat, algorithm)
        return FlatLane(wire, None) if codec.unit == "element" else LeafLane(wire, None)
    wire = Direct(levels.slow, algorithm)
    if codec.unit == "element":
        return FlatLane(wire, levels.fast)
    if codec.unit == "part" and levels.fast.size > 1:
        return PartLane(wire, levels.fast)
    return LeafLane(Shared(wire, levels.fast) if levels.fast.size > 1 else wire, levels.fast)


def handed_on(exchanged: Exchanged) -> jax.Array:
    """What a device of a ``FlatLane`` gives the others of its node of the totals: words, if there are any."""
    return exchanged.totals[0] if exchanged.packed is None else exchanged.packed.words


def pieces(codec: Codec, shapes: Sequence[Shape], num_parts: int) -> list[Shape]:
    """The shapes of what a lane collects of a bucket of leaves of these shapes."""
    if codec.unit == "leaf" or (codec.unit == "part" and num_parts == 1):
        return list(shapes)
    return [(sum(shards.row_size(shape, num_parts) for shape in shapes),)]
