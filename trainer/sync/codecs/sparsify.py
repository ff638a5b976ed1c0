"""A few elements in full: the largest of a leaf, or some chosen by a random key that all members share."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.sync.buckets import pack, unpack
from trainer.sync.codecs.arguments import ratio_of
from trainer.sync.codecs.base import Codec, Exchanged, Shape, Wire, from_words, to_words
from trainer.sync.shards import Part, from_rows


def topk(*, ratio: float = 0.01) -> Codec:
    """Sends of each leaf exactly k = max(1, round(ratio n)) of its n elements, the largest by magnitude.

    Of equal ones the first are taken. Where the devices of a node hold parts of a leaf, each offers the largest of its
    own, and the largest of those are the leaf's; the first are then those of the first part. Values travel as float32,
    and their positions in as few bytes as the leaf needs; leaves that would get no smaller by it are exchanged exactly.
    Whatever is not sent is dropped whole: ||decode(encode(x)) - x||^2 <= (1 - k/n) ||x||^2. Stich et al. 2018, Lin et
    al. 2018.

    All members get all codes, so a device sends (members - 1) of them: against an exact all-reduce the advantage falls
    as 1 / members.
    """
    ratio = ratio_of(ratio)

    def exchange(values: Sequence[Any], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
        del key
        parts = [_part(value) for value in values]
        mine = [_candidates(part, ratio) for part in parts]
        theirs = jax.vmap(lambda words: from_words(words, mine))(wire.share(to_words(mine)))
        codes = [_best(part, found, ratio) for part, found in zip(parts, theirs, strict=True)]
        everybodys = wire.gather(to_words(codes))
        received = [from_words(everybodys[member], codes) for member in range(wire.size)]
        totals = [_total(part, code) for part, *code in zip(parts, *received, strict=True)]
        sent = [_sent(part, code) for part, code in zip(parts, codes, strict=True)]
        given = zip(sent, values, strict=True)
        return Exchanged(
            totals,
            [row if isinstance(value, Part) else row.reshape(value.shape) for row, value in given],
            list(states),
        )

    def applies(shape: Shape) -> bool:
        length = math.prod(shape)
        return _num_kept(length, ratio) * (4 + jnp.dtype(_position_dtype(length)).itemsize) < 4 * length

    return Codec("topk", "part", linear=False, exchange=exchange, applies=applies, sparse=True)


def randomk(*, ratio: float = 0.01) -> Codec:
    """Sends exactly k = max(1, round(ratio n)) elements of each vector of n, one from each of k equal stretches.

    All members choose the same ones, from their common key, so the values alone travel and add up by all-reduce.
    Each has a chance of about k/n; it's sent as it is, not n/k times it, for error feedback sends the others later.
    Without error feedback the expected total is therefore only k/n of the sum. Stich et al. 2018.
    """
    ratio = ratio_of(ratio)

    def exchange(values: Sequence[jax.Array], states: Sequence[Any], key: jax.Array, wire: Wire) -> Exchanged:
        lengths = [value.shape[0] for value in values]
        keys = [jax.random.fold_in(key, index) for index in range(len(values))]
        chosen = [_one_of_each(key, n, _num_kept(n, ratio)) for key, n in zip(keys, lengths, strict=True)]
        mine = [value[positions] for value, positions in zip(values, chosen, strict=True)]
        summed = unpack(wire.sum(pack(mine)), [each.shape for each in mine])
        return Exchanged(
            [_scattered(*one) for one in zip(summed, chosen, lengths, strict=True)],
            [_scattered(*one) for one in zip(mine, chosen, lengths, strict=True)],
            list(states),
        )

    return Codec("randomk", "element", linear=True, exchange=exchange, sparse=True)


def _num_kept(length: int, ratio: float) -> int:
    return min(length, max(1, round(ratio * length)))


def _position_dtype(length: int) -> Any:
    return next((t for t in (jnp.uint8, jnp.uint16) if length <= jnp.iinfo(t).max + 1), jnp.int32)


Code = tuple[jax.Array, jax.Array]
"""(float32 values, their positions), of shape (k,) both."""


def _part(value: Any) -> Part:
    """A leaf as its only part, if it is not a part already."""
    return value if isinstance(value, Part) else Part(value.reshape(-1), 0, value.shape, 1)


def _candidates(part: Part, ratio: float) -> Code:
    """What a device offers of its part; positions are those in its row."""
    length = part.row.shape[0]
    count = min(length, _num_kept(math.prod(part.shape), ratio))
    positions = _largest(part.row, count)
    return part.row[positions], positions.astype(_position_dtype(length))


def _best(part: Part, offered: Code, ratio: float) -> Code:
    """A leaf's code, of what each device of the node offered: positions are those in all rows, one after another."""
    values, positions = offered
    starts = part.row.shape[0] * jnp.arange(part.count)
    num_elements = math.prod(part.shape)
    chosen = _largest(values.reshape(-1), _num_kept(num_elements, ratio))
    places = (positions.astype(jnp.int32) + starts[:, None]).reshape(-1)[chosen]
    return values.reshape(-1)[chosen], places.astype(_position_dtype(num_elements))


def _total(part: Part, codes: Sequence[Code]) -> jax.Array:
    """The leaf that the members' codes add up to, in their order."""
    rows = jnp.zeros((part.count * part.row.shape[0],), jnp.float32)
    for values, positions in codes:
        rows = rows.at[positions.astype(jnp.int32)].add(values, unique_indices=True)
    return from_rows(rows.reshape(part.count, -1), part.shape)


def _sent(part: Part, code: Code) -> jax.Array:
    """What a code has of the part: a row."""
    values, positions = code
    length = part.row.shape[0]
    places = positions.astype(jnp.int32) - part.index * length
    is_inside = (places >= 0) & (places < length)
    nothing = jnp.zeros((length,), jnp.float32)
    return nothing.at[jnp.where(is_inside, places, length)].set(values, mode="drop")


def _largest(vector: jax.Array, count: int) -> jax.Array:
    """int32 positions of the largest magnitudes, of equal ones the first."""
    return jax.lax.top_k(jnp.abs(vector), count)[1]


def _one_of_each(key: jax.Array, length: int, count: int) -> jax.Array:
    """int32 (count,): a random position in each of ``count`` stretches, whose lengths differ by at most one."""
    if count == 0:
        return jnp.zeros((0,), jnp.int32)
    index, (shortest, longer) = jnp.arange(count), divmod(length, count)
    starts = index * shortest + jnp.minimum(index, longer)
    return starts + jax.random.randint(key, (count,), 0, shortest + (index < longer))


def _scattered(values: jax.Array, positions: jax.Array, length: int) -> jax.Array:
    """The values at their positions, none of which occurs twice, and zeros elsewhere."""
    return jnp.zeros((length,), jnp.float32).at[positions].set(values, unique_indices=True)
