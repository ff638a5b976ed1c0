"""Wires: what a codec sends, sent over levels; and a wire that sends nothing and counts.

``Direct`` is for members that are single devices. ``Shared`` is for members that are nodes, each of whose devices holds
the same message: each takes a part of it across the slow link, and the parts are put together within the node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from trainer.sync import shards
from trainer.sync.codecs.base import Codec, Exchanged, Wire
from trainer.sync.collectives import FLAT
from trainer.sync.levels import Level
from trainer.sync.ring import pad_to_multiple


@dataclass(frozen=True)
class Direct:
    """The members of one level; vectors are summed by the named one of ``collectives.FLAT``."""

    level: Level
    algorithm: str

    @property
    def size(self) -> int:
        """Members."""
        return self.level.size

    def index(self) -> jax.Array:
        """This member's index, an int32 scalar."""
        return self.level.index()

    def total(self, summand: jax.Array) -> jax.Array:
        """The sum, for a member is one device."""
        return self.sum(summand)

    def own_and_total(self, summand: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The vector, and the sum."""
        return summand, self.sum(summand)

    def share(self, words: jax.Array) -> jax.Array:
        """The vector, likewise: (1, n)."""
        return words[None]

    def sum(self, vector: jax.Array) -> jax.Array:
        """The sum of the members' vectors."""
        return FLAT[self.algorithm](vector, self.level)

    def gather(self, words: jax.Array) -> jax.Array:
        """The members' vectors, in order: (size, n)."""
        return self.level.all_gather(words).reshape(self.size, -1)

    def swap(self, words: jax.Array) -> jax.Array:
        """Row j goes to member j; row i of the result came from member i."""
        return self.level.all_to_all(words)


@dataclass(frozen=True)
class Shared:
    """Nodes as members: ``across`` joins the nodes' n-th devices, ``within`` the devices of one node.

    All devices of a node have to send the same; each sends its part of it across.
    """

    across: Direct
    within: Level

    @property
    def size(self) -> int:
        """Nodes."""
        return self.across.size

    def index(self) -> jax.Array:
        """This node's index, an int32 scalar."""
        return self.across.index()

    def total(self, summand: jax.Array) -> jax.Array:
        """The sum over all nodes' devices, each of which takes a part of it across."""
        return self._all_parts(self.across.sum(self._part_of_sum(summand)))[: summand.shape[0]]

    def own_and_total(self, summand: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sum over the node's devices, and that over all."""
        own = self._part_of_sum(summand)
        parts = self._all_parts(jnp.concatenate([own, self.across.sum(own)])).reshape(self.within.size, 2, -1)
        owned, total = (parts[:, which].reshape(-1)[: summand.shape[0]] for which in range(2))
        return owned, total

    def share(self, words: jax.Array) -> jax.Array:
        """The vectors of the node's devices, in order: (devices, n)."""
        return self._all_parts(words).reshape(self.within.size, -1)

    def sum(self, vector: jax.Array) -> jax.Array:
        """The sum of the nodes' vectors."""
        return self._all_parts(self.across.sum(self._part(vector)))[: vector.shape[0]]

    def gather(self, words: jax.Array) -> jax.Array:
        """The nodes' vectors, in order: (size, n)."""
        mine = self.across.gather(self._part(words))
        return self._columns(mine)[:, : words.shape[0]]

    def swap(self, words: jax.Array) -> jax.Array:
        """Row j goes to node j; row i of the result came from node i."""
        mine = self.across.swap(jax.vmap(self._part)(words))
        return self._columns(mine)[:, : words.shape[1]]

    def _part(self, vector: jax.Array) -> jax.Array:
        parts = pad_to_multiple(vector, self.within.size).reshape(self.within.size, -1)
        return jax.lax.dynamic_index_in_dim(parts, self.within.index(), 0, keepdims=False)

    def _part_of_sum(self, summand: jax.Array) -> jax.Array:
        return self.within.reduce_scatter(pad_to_multiple(summand, self.within.size).reshape(self.within.size, -1))

    def _all_parts(self, part: jax.Array) -> jax.Array:
        return part if self.within.size == 1 else self.within.all_gather(part)

    def _columns(self, mine: jax.Array) -> jax.Array:
        """(size, n / L) on each of a node's L devices -> (size, n)."""
        blocks = self._all_parts(mine.reshape(-1)).reshape(self.within.size, *mine.shape)
        return jnp.swapaxes(blocks, 0, 1).reshape(self.size, -1)


class Message(NamedTuple):
    """What one member passed to its wire, or each of its devices: ``num_bytes``; of a swap, for each of the members."""

    kind: Literal["total", "own_and_total", "share", "sum", "gather", "swap"]
    num_bytes: int


@dataclass(frozen=True)
class Recorder:
    """A wire of ``size`` members of ``num_parts`` devices each that only writes down in ``messages`` what it is given.

    To be traced, not run.
    """

    size: int
    num_parts: int = 1
    messages: list[Message] = field(default_factory=list)

    def index(self) -> jax.Array:
        """Any member's index."""
        return jnp.int32(0)

    def total(self, summand: jax.Array) -> jax.Array:
        """Something of the right shape."""
        self.messages.append(Message("total" if self.num_parts > 1 else "sum", summand.nbytes))
        return summand

    def own_and_total(self, summand: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Something of the right shapes."""
        self.messages.append(Message("own_and_total" if self.num_parts > 1 else "sum", summand.nbytes))
        return summand, summand

    def share(self, words: jax.Array) -> jax.Array:
        """Something of the right shape."""
        if self.num_parts > 1:
            self.messages.append(Message("share", words.nbytes))
        return jnp.broadcast_to(words, (self.num_parts, *words.shape))

    def sum(self, vector: jax.Array) -> jax.Array:
        """Something of the right shape."""
        self.messages.append(Message("sum", vector.nbytes))
        return vector

    def gather(self, words: jax.Array) -> jax.Array:
        """Something of the right shape."""
        self.messages.append(Message("gather", words.nbytes))
        return jnp.broadcast_to(words, (self.size, *words.shape))

    def swap(self, words: jax.Array) -> jax.Array:
        """Something of the right shape."""
        self.messages.append(Message("swap", words.nbytes // self.size))
        return words


def record(codec: Codec, shapes: Sequence[tuple[int, ...]], size: int, num_parts: int = 1) -> list[Message]:
    """The messages that one exchange of values of these shapes sends, in order; nothing is computed.

    num_parts: how many devices share each value, of a codec for parts.
    """
    wire = Recorder(size, num_parts)

    def exchange(values: Sequence[Any], states: Sequence[Any], key: jax.Array) -> Exchanged:
        return codec.exchange(values, states, key, wire)

    def value(shape: tuple[int, ...]) -> Any:
        row = jnp.zeros(shards.row_size(shape, num_parts))
        return jnp.zeros(shape) if num_parts == 1 else shards.Part(row, jnp.int32(0), shape, num_parts)

    values = jax.eval_shape(lambda: [value(shape) for shape in shapes])
    states = [jax.eval_shape(lambda shape=shape: codec.init(shape)) for shape in shapes]
    jax.eval_shape(exchange, values, states, jax.random.key(0))
    return wire.messages


def _exactly(values: Sequence[jax.Array], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
    del key
    totals = [wire.sum(value.reshape(-1)).reshape(value.shape) for value in values]
    return Exchanged(totals, list(values), list(states))


EXACT = Codec("none", "element", True, _exactly)
"""Float32, all of it: what is sent where nothing is to be compressed."""
