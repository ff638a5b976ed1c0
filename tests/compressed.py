"""Exchanges with codecs for the tests: three toy codecs, loops that carry their state, and the same rules in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from exchanges import AXES
from jax.sharding import NamedSharding, PartitionSpec

from trainer import sync
from trainer.sync.codecs.base import Codec, Exchanged, gathered, reencoded


def halves():
    """bfloat16's 16 bits, re-encoded: a codec for flat vectors."""

    def encode(value, key):
        return jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16)

    def decode(code, shape):
        return jax.lax.bitcast_convert_type(code, jnp.bfloat16).astype(jnp.float32)

    return reencoded("halves", encode, decode)


def largest(count=2):
    """The ``count`` largest of a leaf, gathered: sparse, for whole leaves."""

    def encode(value, key):
        flat = value.reshape(-1)
        _, where = jax.lax.top_k(jnp.abs(flat), min(count, flat.shape[0]))
        return where.astype(jnp.int32), flat[where]

    def decode(code, shape):
        return jnp.zeros(int(np.prod(shape))).at[code[0]].set(code[1]).reshape(shape)

    return gathered("largest", encode, decode, unit="leaf", sparse=True)


def factors():
    """One factor pair for a matrix, in two sums: linear, with a state, and of no use for vectors."""

    def exchange(values, states, key, wire):
        totals, shares, after = [], [], []
        for value, state in zip(values, states, strict=True):
            left = wire.sum(value @ state)
            left = left / jnp.sqrt(jnp.sum(left**2) + 1e-20)
            mine = left @ value
            right = wire.sum(mine)
            totals.append(jnp.outer(left, right))
            shares.append(jnp.outer(left, mine))
            after.append(right)
        return Exchanged(totals, shares, after)

    def init(shape):
        return jnp.ones(shape[1])

    return Codec("factors", "leaf", True, exchange, init=init, applies=lambda shape: len(shape) == 2)


CODECS = {"halves": halves, "largest": largest, "factors": factors}


class Loop:
    """A shard_map program that exchanges; the state lies as ``state_specs`` says, shared out over ``local`` or not."""

    def __init__(self, mesh, transform, shapes, *, is_shared_out=True):
        self.mesh = mesh
        like = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        state = transform.init(like)
        specs = sync.state_specs(state, mesh=mesh if is_shared_out else None)
        place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        self.state = jax.tree.map(jax.device_put, state, place)
        rows = PartitionSpec(AXES)

        def body(tree, state):
            mine = jax.tree.map(lambda leaf: leaf[0], tree)
            result, state = transform.update(mine, state)
            return jax.tree.map(lambda leaf: leaf[None], result), state

        self.step = jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=(rows, specs), out_specs=(rows, specs), check_vma=False)
        )

    def __call__(self, tree):
        """Every replica's result, row by row, on the host."""
        result, self.state = self.step(tree, self.state)
        return jax.device_get(result)


def contributions(num_replicas, shapes, step=0):
    """Host arrays of shape (replicas, *shape)."""
    generator = np.random.default_rng(step)
    return {name: generator.normal(size=(num_replicas, *shape)).astype(np.float32) for name, shape in shapes.items()}


def kept(state, name="residual"):
    """What is kept of each leaf: {name: (owners, *shape)}, in the units of a mean."""
    found = {}
    for field in (state.by_node, state.by_shard, state.by_replica):
        tree = field.get(name, {}) if field else {}
        found |= {key: np.asarray(leaf) for key, leaf in tree.items() if not isinstance(leaf, tuple)}
    return found


def assert_same_rows(result):
    for name, rows in result.items():
        assert all(row.tobytes() == rows[0].tobytes() for row in rows), f"{name}: replicas differ"


# The rules again, in NumPy: (what each owner has to send, codec state) -> (total, what each sent, codec state).


def halves_in_numpy(values, state, num_parts):
    """Each of ``num_parts`` devices of a node exchanges a row; of each row each owner re-encodes a part."""
    owners, shape = len(values), values[0].shape
    dim = next((dim for dim, size in enumerate(shape) if size % num_parts == 0), None)
    moved = [value if dim is None else np.moveaxis(value, dim, 0) for value in values]
    flat = np.stack([value.reshape(-1) for value in moved])
    size = flat.shape[1]
    rows = np.pad(flat, ((0, 0), (0, -size % num_parts))).reshape(owners, num_parts, -1)
    length = rows.shape[2]
    rows = np.pad(rows, ((0, 0), (0, 0), (0, -length % owners)))
    sent = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
    exact = sent.sum(axis=0)
    total = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    part = rows.shape[2] // owners
    for owner in range(owners):
        mine = slice(owner * part, (owner + 1) * part)
        sent[owner, :, mine] += total[:, mine] - exact[:, mine]

    def back(rows):
        flat = rows[:, :length].reshape(-1)[:size]
        return flat.reshape(shape) if dim is None else np.moveaxis(flat.reshape(moved[0].shape), 0, dim)

    return back(total), [back(rows) for rows in sent], state


def largest_in_numpy(values, state, num_parts, count=2):
    sent = []
    for value in values:
        flat = value.reshape(-1)
        where = np.argsort(-np.abs(flat), kind="stable")[:count]
        sent.append(np.zeros_like(flat))
        sent[-1][where] = flat[where]
    sent = [flat.reshape(values[0].shape) for flat in sent]
    return np.sum(sent, axis=0), sent, state


def factors_in_numpy(values, state, num_parts):
    if values[0].ndim != 2:
        return np.sum(values, axis=0), None, state
    state = np.ones(values[0].shape[1]) if state is None else state
    left = sum(value @ state for value in values)
    left = left / np.sqrt(np.sum(left**2) + 1e-20)
    right = sum(left @ value for value in values)
    return np.outer(left, right), [np.outer(left, left @ value) for value in values], right


RULES = {"halves": halves_in_numpy, "largest": largest_in_numpy, "factors": factors_in_numpy}


class InNumpy:
    """Error feedback around one of the rules, for contributions that are summed."""

    def __init__(self, name, nodes, local, compress, momentum=0.0, is_forgotten=False):
        self.rule, self.momentum, self.is_forgotten = RULES[name], momentum, is_forgotten
        self.owners, self.merged = (nodes, local) if compress == "slow" else (nodes * local, 1)
        self.num_parts = local if compress == "slow" else 1
        self.residual, self.velocity, self.codec = {}, {}, {}

    def __call__(self, tree):
        return {name: self._leaf(name, rows) for name, rows in tree.items()}

    def _leaf(self, name, rows):
        owned = rows.reshape(self.owners, self.merged, *rows.shape[1:]).sum(axis=1)
        velocity = self.momentum * self.velocity.get(name, np.float32(0)) + owned
        values = self.residual.get(name, np.float32(0)) + (velocity if self.momentum else owned)
        total, sent, self.codec[name] = self.rule(list(values), self.codec.get(name), self.num_parts)
        if sent is not None:
            sent = np.stack(sent)
            self.residual[name] = values - sent
            velocity = np.where(sent != 0, 0, velocity) if self.is_forgotten else velocity
        self.velocity[name] = velocity
        return total
