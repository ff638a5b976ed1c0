"""The exchange in loops that are not ours: two published ways to train with optax, each changed in three lines.

Each loop exists once; ``exchange`` is what is put in front of its optimizer, and what it did by itself before
(``lax.pmean`` of the gradient) is what it must agree with.
"""

import difflib
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import jax_utils
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import sync

BATCH, FEATURES, STEPS = 24, 6, 3


def data(step):
    generator = np.random.default_rng(step)
    x = generator.normal(size=(BATCH, FEATURES)).astype(np.float32)
    return x, (x @ np.arange(FEATURES, dtype=np.float32))[:, None]


def mesh_of(nodes, local):
    return Mesh(np.array(jax.devices()[: nodes * local]).reshape(nodes, local), ("node", "local"))


class Model(nn.Module):
    """The multi-layer perceptron of flax's guides."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))


def loss_of(params, x, y):
    return jnp.mean((Model().apply({"params": params}, x) - y) ** 2)


def fresh_params():
    return Model().init(jax.random.key(0), jnp.zeros((1, FEATURES)))["params"]


# As in JAX's and optax's documentation: a shard_map over the batch, the gradient averaged by hand.
def plain_shard_map_loop(mesh):
    optimizer = optax.adamw(1e-2)

    def step(params, opt_state, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        grads = jax.lax.pmean(grads, ("node", "local"))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    rows, specs = PartitionSpec(("node", "local")), PartitionSpec()
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, specs, rows, rows), out_specs=(specs, specs), check_vma=False
    )
    return optimizer, jax.jit(mapped)


def exchanging_shard_map_loop(mesh):
    optimizer = optax.chain(sync.all_reduce(mesh, algorithm="hierarchical"), optax.adamw(1e-2))

    def step(params, opt_state, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    rows, specs = PartitionSpec(("node", "local")), PartitionSpec()
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, specs, rows, rows), out_specs=(specs, specs), check_vma=False
    )
    return optimizer, jax.jit(mapped)


# As in flax's published examples (imagenet, lm1b): a TrainState, replicated by hand, stepped in a pmap.
def plain_pmap_loop():
    optimizer = optax.adamw(1e-2)

    def train_step(state, x, y):
        grads = jax.grad(loss_of)(state.params, x, y)
        grads = jax.lax.pmean(grads, axis_name="batch")
        return state.apply_gradients(grads=grads)

    return optimizer, jax.pmap(train_step, axis_name="batch")


def exchanging_pmap_loop():
    exchange = sync.all_reduce(axes="batch", devices_per_node=4, algorithm="hierarchical")
    optimizer = optax.chain(exchange, optax.adamw(1e-2))

    def train_step(state, x, y):
        grads = jax.grad(loss_of)(state.params, x, y)
        return state.apply_gradients(grads=grads)

    return optimizer, jax.pmap(train_step, axis_name="batch")


@pytest.mark.parametrize(
    ("plain", "exchanging"),
    [(plain_shard_map_loop, exchanging_shard_map_loop), (plain_pmap_loop, exchanging_pmap_loop)],
)
def test_a_loop_changes_in_at_most_three_lines(plain, exchanging):
    before, after = (inspect.getsource(loop).splitlines()[1:] for loop in (plain, exchanging))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert 0 < max(sum(line[0] == sign for line in changes) for sign in "+-") <= 3


def run_shard_map(loop, mesh, steps, params=None, opt_state=None):
    optimizer, step = loop(mesh)
    params = fresh_params() if params is None else params
    opt_state = optimizer.init(params) if opt_state is None else opt_state
    for number in steps:
        params, opt_state = step(params, opt_state, *data(number))
    return params, opt_state


def assert_close(left, right):
    # Measured: 2e-7 on parameters near 1, from sums in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6), left, right)


@pytest.mark.parametrize(("nodes", "local"), [(2, 4), (2, 3)])
def test_the_shard_map_loop_trains_as_before(nodes, local):
    mesh = mesh_of(nodes, local)
    plain, _ = run_shard_map(plain_shard_map_loop, mesh, range(STEPS))
    ours, _ = run_shard_map(exchanging_shard_map_loop, mesh, range(STEPS))
    assert_close(ours, plain)


def test_the_shard_map_loop_resumes_on_another_number_of_nodes(tmp_path):
    whole, _ = run_shard_map(plain_shard_map_loop, mesh_of(1, 1), range(2 * STEPS))
    saved = run_shard_map(exchanging_shard_map_loop, mesh_of(4, 2), range(STEPS))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        mesh = mesh_of(2, 2)
        optimizer, _ = exchanging_shard_map_loop(mesh)
        old_shapes = jax.eval_shape(lambda: (fresh_params(), optimizer.init(fresh_params())))
        here = NamedSharding(mesh, PartitionSpec())
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), old_shapes)
        params, opt_state = checkpointer.restore(tmp_path / "checkpoint", target)
    opt_state = sync.resize(opt_state, num_owners=2)
    resumed, _ = run_shard_map(exchanging_shard_map_loop, mesh, range(STEPS, 2 * STEPS), params, opt_state)
    assert_close(resumed, whole)


def run_pmap(loop, steps, num_devices=8, state=None):
    optimizer, step = loop()
    if state is None:
        state = train_state.TrainState.create(apply_fn=Model().apply, params=fresh_params(), tx=optimizer)
    devices = jax.devices()[:num_devices]
    state = jax_utils.replicate(state.replace(tx=optimizer), devices)
    for number in steps:
        x, y = (rows.reshape(num_devices, -1, rows.shape[-1]) for rows in data(number))
        state = step(state, x, y)
    return jax_utils.unreplicate(state)


def test_the_pmap_loop_trains_as_before_and_resumes_on_another_number_of_nodes(tmp_path):
    whole = run_pmap(plain_pmap_loop, range(2 * STEPS))
    first = run_pmap(exchanging_pmap_loop, range(STEPS))
    saved = jax.device_get({"params": first.params, "opt_state": first.opt_state, "step": first.step})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
    restored["opt_state"] = sync.resize(restored["opt_state"], num_owners=1)
    state = first.replace(**jax.device_get(restored))
    resumed = run_pmap(exchanging_pmap_loop, range(STEPS, 2 * STEPS), num_devices=4, state=state)
    assert_close(resumed.params, whole.params)
    assert int(resumed.step) == 2 * STEPS


# The same two loops again, now with a codec: int8 with error feedback, whose residuals are the nodes' own.
def compressing_shard_map_loop(mesh):
    optimizer = optax.chain(sync.all_reduce(mesh, codec="int8", error_feedback=True), optax.adamw(1e-2))

    def step(params, opt_state, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    rows, specs = PartitionSpec(("node", "local")), PartitionSpec()
    state = sync.state_specs(jax.eval_shape(optimizer.init, fresh_params()), mesh=mesh)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, state, rows, rows), out_specs=(specs, state), check_vma=False
    )
    return optimizer, jax.jit(mapped)


def compressing_pmap_loop():
    exchange = sync.all_reduce(axes="batch", devices_per_node=4, codec="int8", error_feedback=True)
    optimizer = optax.chain(exchange, optax.adamw(1e-2))

    def train_step(state, x, y):
        grads = jax.grad(loss_of)(state.params, x, y)
        return state.apply_gradients(grads=grads)

    return optimizer, jax.pmap(train_step, axis_name="batch")


def fresh_state_in_pmap(optimizer, devices):
    """As flax's examples make it, but inside the pmap: every replica's own."""

    def create(params):
        return train_state.TrainState.create(apply_fn=Model().apply, params=params, tx=optimizer)

    return jax.pmap(create, axis_name="batch", devices=devices)(jax_utils.replicate(fresh_params(), devices))


def restored(path, saved):
    """What plain orbax saved at ``path``, read back in the shapes it was saved in."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(
            path, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
        )


def assert_close_to_exact(ours, plain):
    # Measured: 1.5e-3, where six steps move the parameters by up to 6e-2.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-3), ours, plain)


@pytest.mark.parametrize(
    ("exchanging", "compressing"),
    [(plain_shard_map_loop, compressing_shard_map_loop), (plain_pmap_loop, compressing_pmap_loop)],
)
def test_a_loop_changes_in_at_most_three_more_lines_to_compress(exchanging, compressing):
    test_a_loop_changes_in_at_most_three_lines(exchanging, compressing)


def test_the_compressing_shard_map_loop_is_saved_resumed_and_resized(tmp_path):
    """Three steps, plain orbax, three more: bit for bit on the same mesh, and close to exact on half the nodes."""
    whole = run_shard_map(compressing_shard_map_loop, mesh_of(4, 2), range(2 * STEPS))
    first = run_shard_map(compressing_shard_map_loop, mesh_of(4, 2), range(STEPS))
    params, opt_state = restored(tmp_path / "checkpoint", jax.device_get(first))
    again = run_shard_map(compressing_shard_map_loop, mesh_of(4, 2), range(STEPS, 2 * STEPS), params, opt_state)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    plain, _ = run_shard_map(plain_shard_map_loop, mesh_of(1, 1), range(2 * STEPS))
    half = sync.resize(opt_state, num_owners=2)
    resized, _ = run_shard_map(compressing_shard_map_loop, mesh_of(2, 2), range(STEPS, 2 * STEPS), params, half)
    for ours in (whole[0], resized):
        assert_close_to_exact(ours, plain)


@pytest.mark.slow
def test_the_compressing_pmap_loop_is_saved_resumed_and_resized(tmp_path):
    def run(state, step, steps, num_devices):
        for number in steps:
            state = step(state, *(rows.reshape(num_devices, -1, rows.shape[-1]) for rows in data(number)))
        return state

    optimizer, step = compressing_pmap_loop()
    state = run(fresh_state_in_pmap(optimizer, jax.devices()), step, range(STEPS), 8)
    whole = run(state, step, range(STEPS, 2 * STEPS), 8)
    saved = jax.device_get(sync.from_pmap({"opt_state": state.opt_state, "params": state.params}, devices_per_node=4))
    back = restored(tmp_path / "checkpoint", saved)
    plain = run_pmap(plain_pmap_loop, range(2 * STEPS))
    for nodes in (2, 1):
        tree = sync.to_pmap(sync.resize(back, nodes), 4 * nodes)
        fresh = fresh_state_in_pmap(optimizer, jax.devices()[: 4 * nodes])
        again = run(fresh.replace(**tree), step, range(STEPS, 2 * STEPS), 4 * nodes)
        assert_close_to_exact(jax_utils.unreplicate(again).params, plain.params)
        if nodes == 2:
            jax.tree.map(np.testing.assert_array_equal, again.opt_state, whole.opt_state)
