"""Members of an exchange for the tests, emulated on one device: a mapped dim, and a wire of lax collectives over it."""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "member"


@dataclass(frozen=True)
class Members:
    """A ``Wire`` between the members of the axis ``AXIS``; ``num_bytes``: what each sends, message by message."""

    size: int
    num_bytes: list[float] = field(default_factory=list)

    def index(self):
        return jax.lax.axis_index(AXIS)

    def total(self, summand):
        return self.sum(summand)

    def own_and_total(self, summand):
        return summand, self.sum(summand)

    def share(self, words):
        return words[None]

    def sum(self, vector):
        assert vector.dtype == jnp.float32
        assert vector.ndim == 1
        self.num_bytes.append(2 * (self.size - 1) / self.size * 4 * vector.size)
        return jax.lax.psum(vector, AXIS)

    def gather(self, words):
        assert words.dtype == jnp.uint8
        assert words.ndim == 1
        self.num_bytes.append((self.size - 1) * words.size)
        return jax.lax.all_gather(words, AXIS)

    def swap(self, words):
        assert words.dtype == jnp.uint8
        assert words.shape[0] == self.size
        self.num_bytes.append((self.size - 1) / self.size * words.size)
        return jax.lax.all_to_all(words, AXIS, 0, 0)


def states_of(codec, shapes):
    return [codec.init(shape) for shape in shapes]


@functools.cache
def program(codec, size):
    """A jitted function: (values with a first dim of members, common states, common key) -> each member's Exchanged."""

    def member(values, states, key):
        return codec.exchange(values, states, key, Members(size))

    return jax.jit(jax.vmap(member, in_axes=(0, None, None), axis_name=AXIS))


def exchange(codec, values, states=None, seed=0):
    """(totals, each member's sent, next states), on the host, after a check that members hold identical bits.

    values: arrays of shape (members, *shape).
    """
    states = states_of(codec, [value.shape[1:] for value in values]) if states is None else states
    done = program(codec, len(values[0]))([jnp.asarray(v, jnp.float32) for v in values], states, jax.random.key(seed))
    totals, sent, states = jax.device_get((done.totals, done.sent, done.states))
    for leaf in jax.tree.leaves((totals, states)):
        assert all(row.tobytes() == leaf[0].tobytes() for row in leaf), "members differ"
    return [total[0] for total in totals], sent, jax.tree.map(lambda leaf: leaf[0], states)


def round_trip(codec, value, seed=0):
    """What a lone member gets back of one value."""
    return exchange(codec, [np.asarray(value, np.float32)[None]], seed=seed)[0][0]


def bytes_sent(codec, shapes, size):
    """What each of ``size`` members sends for values of these shapes; nothing is computed."""
    wire = Members(size)

    def member(values, states):
        return codec.exchange(values, states, jax.random.key(0), wire)

    values = [jax.ShapeDtypeStruct((size, *shape), jnp.float32) for shape in shapes]
    states = [jax.eval_shape(lambda shape=shape: codec.init(shape)) for shape in shapes]
    jax.eval_shape(jax.vmap(member, in_axes=(0, None), axis_name=AXIS), values, states)
    return sum(wire.num_bytes)
