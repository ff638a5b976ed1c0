"""What a codec is: how contributions are written on the wire, summed there, and read back.

A codec is one function, ``exchange``, that may send what it likes over a ``Wire`` to the other members. Most are made
from a pair of pure functions, ``encode`` and ``decode``, by one of two combinators: ``reencoded`` for codes that do not
add up, and ``gathered`` for codes so small that everybody can have everybody's.

Whatever a codec drops is accounted for: the members' ``sent`` add up to ``total``, so that ``value - sent`` is just
what a member still owes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from trainer.sync.overlap import never
from trainer.sync.ring import joined, summed

Shape = tuple[int, ...]

Encode = Callable[[jax.Array, jax.Array], Any]
"""(float32 value, random key) -> code: a pytree of arrays whose shapes depend on the value's shape alone."""

Decode = Callable[[Any, Shape], jax.Array]
"""(code, shape of the value) -> float32 value."""


class Wire(Protocol):
    """What the members of an exchange can send each other. It counts in bytes exactly what it is given."""

    @property
    def size(self) -> int:
        """Members."""
        ...

    def index(self) -> jax.Array:
        """This member's index, an int32 scalar."""
        ...

    def total(self, summand: jax.Array) -> jax.Array:
        """The sum of the float32 vectors of shape (n,) of all members' devices, with the same bits on each."""
        ...

    def own_and_total(self, summand: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sum over the devices of this member alone, and ``total``."""
        ...

    def share(self, words: jax.Array) -> jax.Array:
        """The uint8 vectors of shape (n,) of a member's devices, in order: (devices, n)."""
        ...

    def sum(self, vector: jax.Array) -> jax.Array:
        """The sum of the members' float32 vectors of shape (n,), with the same bits on each."""
        ...

    def gather(self, words: jax.Array) -> jax.Array:
        """The members' uint8 vectors of shape (n,), in order: (size, n)."""
        ...

    def swap(self, words: jax.Array) -> jax.Array:
        """uint8 (size, n): row j goes to member j; row i of the result came from member i."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Totals as they came over the wire: what is to be handed on may travel in fewer bytes, and be decoded there.

    words:  uint8 of shape (n,), the same bits on each member.
    unpack: such words, of these members or of others -> their totals.
    own:    of the totals, what this member encoded: if that is finite on each member, so are the totals.
    """

    words: jax.Array
    unpack: Callable[[jax.Array], list[jax.Array]] = field(metadata={"static": True})
    own: list[jax.Array]


class Exchanged(NamedTuple):
    """What an exchange leaves on a member, each as long as the values.

    totals: the sums over all members as they could be decoded; the same bits on each member.
    sent:   this member's shares of the totals: all members' shares add up to them.
    states: the codec's next states; the same bits on each member.
    packed: the totals as words, where they have such a form.
    """

    totals: list[jax.Array]
    sent: list[jax.Array]
    states: list[Any]
    packed: Packed | None = None


Exchange = Callable[[Sequence[Any], Sequence[Any], jax.Array, Wire], Exchanged]
"""(float32 values, one codec state for each, random key that is the same on all members, wire) -> Exchanged."""


def stateless(shape: Shape) -> Any:
    """The state of a codec that keeps none."""
    del shape
    return ()


def everything(shape: Shape) -> bool:
    """The ``applies`` of a codec that can write any value."""
    del shape
    return True


@dataclass(frozen=True)
class Codec:
    """A way to write contributions.

    name:     as in the settings.
    unit:     "element": takes flat vectors, cut anywhere; "leaf": takes whole leaves, in their own shapes; "part":
              takes whole leaves too, or a device's part of each (``shards.Part``). Totals are whole leaves then too,
              and what was sent are rows like those of the parts.
    linear:   whether the totals depend on the sum of the members' values alone, given the codec's state and the key.
    exchange: see ``Exchange``.
    init:     a value's shape -> the codec's state for it, a pytree of arrays.
    applies:  a leaf's shape -> whether to use the codec on it; other leaves are exchanged exactly.
    sparse:   whether it sends some entries and nothing at all of the others.
    """

    name: str
    unit: Literal["element", "leaf", "part"]
    linear: bool
    exchange: Exchange
    init: Callable[[Shape], Any] = stateless
    applies: Callable[[Shape], bool] = everything
    sparse: bool = False


def to_words(code: Any) -> jax.Array:
    """The bytes of a code's arrays, one after another: uint8 of shape (n,)."""
    return jnp.concatenate([_bytes_of(leaf) for leaf in jax.tree.leaves(code)])


def from_words(words: jax.Array, like: Any) -> Any:
    """Undoes ``to_words``, for a code of these shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    values, start = [], 0
    for leaf in leaves:
        size = leaf.dtype.itemsize
        part = words[start : start + leaf.size * size]
        part = part.reshape(*leaf.shape, size) if size > 1 else part.reshape(leaf.shape)
        values.append(jax.lax.bitcast_convert_type(part, leaf.dtype))
        start += leaf.size * size
    return structure.unflatten(values)


def _bytes_of(leaf: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(-1)


def reencoded(name: str, encode: Encode, decode: Decode, *, linear: bool = False) -> Codec:
    """A codec for flat vectors whose codes do not add up.

    Each member gets everybody's code of its own part, adds them up in float32, and encodes the sum once more for all.
    What that drops counts as not sent by the member that did it.
    """

    def one(value: jax.Array, key: jax.Array, wire: Wire) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(the totals' words, of shape (size, n), what was sent, what this member encoded of the totals)."""
        size, me = wire.size, wire.index()
        parts = _parts(value, size)
        shape = parts.shape[1:]
        mine = jax.random.fold_in(key, me)  # what members round off must not be the same everywhere
        first, second = jax.random.split(mine)
        like = _code(encode, shape)
        codes = _computed_once(jax.vmap(encode)(parts, jax.random.split(first, size)))
        received = wire.swap(jax.vmap(to_words)(codes))
        total = summed(size, lambda member: decode(from_words(received[member], like), shape))
        code = _computed_once(encode(total, second))
        own = decode(code, shape)  # as everybody decodes it

        def sent(member: jax.Array | int) -> jax.Array:
            code = jax.tree.map(lambda rows: rows[member], codes)
            return decode(code, shape) + jnp.where(me == member, own - total, 0.0)

        return wire.gather(to_words(code)), joined(size, sent)[: value.shape[0]], own

    def total(words: jax.Array, length: int) -> jax.Array:
        shape = (-(-length // words.shape[0]),)
        like = _code(encode, shape)
        return joined(len(words), lambda member: decode(from_words(words[member], like), shape))[:length]

    def exchange(values: Sequence[jax.Array], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
        keys = [jax.random.fold_in(key, index) for index in range(len(values))]
        done = [one(value, key, wire) for value, key in zip(values, keys, strict=True)]
        lengths, sizes = [value.shape[0] for value in values], [words.size for words, _, _ in done]

        def unpack(words: jax.Array) -> list[jax.Array]:
            parts = jnp.split(words, np.cumsum(sizes)[:-1])
            return [total(part.reshape(wire.size, -1), length) for part, length in zip(parts, lengths, strict=True)]

        words = jnp.concatenate([words.reshape(-1) for words, _, _ in done])
        packed = Packed(words, unpack, [own for _, _, own in done])
        return Exchanged(unpack(words), [sent for _, sent, _ in done], list(states), packed)

    return Codec(name, "element", linear, exchange)


def _computed_once(code: Any) -> Any:
    """``code``, which XLA's CPU compiler would else compute anew, element by element, in every loop that it is used in.

    It is a branch that is never taken, which XLA cannot see.
    """
    leaves = [leaf for leaf in jax.tree.leaves(code) if leaf.size]

    def held(code: Any) -> Any:
        return jax.lax.cond(never(leaves[0]), lambda code: jax.tree.map(jnp.zeros_like, code), lambda code: code, code)

    return jax.lax.platform_dependent(code, cpu=held, default=lambda code: code) if leaves else code


def _code(encode: Encode, shape: Shape) -> Any:
    """The shapes and dtypes of a value's code."""
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32), jax.random.key(0))


def _parts(value: jax.Array, size: int) -> jax.Array:
    """(n,) -> (size, ceil(n / size)), filled up with the last element: no block's scale suffers by it, as by zeros."""
    if value.shape[0] == 0:
        return value.reshape(size, 0)
    return jnp.pad(value, (0, -value.shape[0] % size), mode="edge").reshape(size, -1)


def gathered(
    name: str,
    encode: Encode,
    decode: Decode,
    *,
    unit: Literal["element", "leaf"],
    applies: Callable[[Shape], bool] = everything,
    sparse: bool = False,
) -> Codec:
    """A codec whose codes all members send to all, in one message, and add up decoded, in the members' order."""

    def exchange(values: Sequence[jax.Array], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
        keys = [jax.random.fold_in(key, index) for index in range(len(values))]
        codes = [encode(value, key) for value, key in zip(values, keys, strict=True)]

        def decoded(codes: Any) -> list[jax.Array]:
            return [decode(code, value.shape) for code, value in zip(codes, values, strict=True)]

        everybodys = wire.gather(to_words(codes))
        totals = [jnp.zeros_like(value) for value in values]
        for member in range(wire.size):
            theirs = decoded(from_words(everybodys[member], codes))
            totals = [total + one for total, one in zip(totals, theirs, strict=True)]
        return Exchanged(totals, decoded(codes), list(states))

    return Codec(name, unit, False, exchange, applies=applies, sparse=sparse)
