"""Batch-norm: weighted moments, the same however the batch is split over devices; and the running statistics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models.batch_norm import BatchNorm, next_running, weighted_moments
from models.nnx_task import Mode, PureModule, recorded_statistics
from models.resnet import Block, Layers

AXES = ("node", "local")
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2)]


def make_mesh(nodes, local):
    return Mesh(np.array(jax.devices()[: nodes * local]).reshape(nodes, local), AXES)


def over_replicas(function, shape, *, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(function, mesh=make_mesh(*shape), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def naive_moments(x, weight):
    """Float64 mean and variance of the rows of weight 1."""
    rows = x[weight > 0].astype(np.float64)
    return rows.mean(tuple(range(x.ndim - 1))), rows.var(tuple(range(x.ndim - 1)))


def example(rows=8, features=3):
    rng = np.random.default_rng(1)
    x = rng.normal(2, 3, (rows, 2, 2, features)).astype(np.float32)
    weight = np.array([1, 0, 1, 1, 1, 1, 0, 0], np.float32)[:rows]
    return x, weight


def test_two_unequal_shards_have_the_moments_of_their_union():
    x = np.array([0, 2, -99, 77, 10, 12, 14, 16], np.float32)[:, None]
    weight = np.array([1, 1, 0, 0, 1, 1, 1, 1], np.float32)
    moments = over_replicas(
        lambda x, w: weighted_moments(x, w, AXES)[:2], (1, 2), in_specs=(P(AXES), P(AXES)), out_specs=P()
    )
    mean, var = moments(x, weight)
    np.testing.assert_allclose(mean, [9])
    np.testing.assert_allclose(var, [214 / 6], rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_do_not_depend_on_the_number_of_devices(shape):
    x, weight = example()
    x[weight == 0] = 1e6
    moments = over_replicas(
        lambda x, w: weighted_moments(x, w, AXES)[:2], shape, in_specs=(P(AXES), P(AXES)), out_specs=P()
    )
    # Float32 sums of 20 values: measured 1e-7 relative.
    for ours, naive in zip(moments(x, weight), naive_moments(x, weight), strict=True):
        np.testing.assert_allclose(ours, naive, rtol=1e-6)


def test_variance_survives_a_large_mean():
    """A one-pass float32 variance would be off by tens of per cent, or negative."""
    x = (1e4 + np.random.default_rng(2).normal(0, 1, (64, 5))).astype(np.float32)
    weight = np.ones(64, np.float32)
    _, var, _ = weighted_moments(jnp.asarray(x), jnp.asarray(weight), ())
    np.testing.assert_allclose(var, naive_moments(x, weight)[1], rtol=5e-6)  # measured 1.6e-6


def test_no_weight_at_all_is_finite():
    x, weight = example()
    mean, var, total = weighted_moments(jnp.asarray(x), jnp.zeros_like(weight), ())
    assert not mean.any()
    assert not var.any()
    assert total == 0
    _, gradient = layer_gradient(x, np.zeros_like(weight), (1, 1), "global")
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


def test_padding_comes_out_as_the_bias():
    """One real row whose variance is 0 must not blow up the padding beside it."""
    layer, params, model_state = make_layer("virtual_replica")
    x = jnp.array([[1.0, 2.0, 3.0], [7.0, 8.0, 9.0]])
    y = layer.bind(params, model_state)(x, Mode(jax.random.key(0), jnp.array([1.0, 0.0])))
    np.testing.assert_array_equal(y, [params["bias"]] * 2)


def make_layer(scope):
    layer = PureModule(lambda rngs: BatchNorm(3, scope=scope, dtype=jnp.float32))
    params, model_state = layer.init(jax.random.key(0))
    params = {"scale": jnp.array([1.5, 0.5, -1.0]), "bias": jnp.array([0.0, 1.0, 2.0])}
    return layer, params, model_state


def layer_gradient(x, weight, shape, scope):
    """Statistics, and the gradient with respect to parameters and input, of a loss summed over all replicas' rows."""
    layer, params, model_state = make_layer(scope)

    def loss(params, x, weight):
        module = layer.bind(params, model_state)
        y = module(x, Mode(jax.random.key(0), weight, AXES))
        return jnp.sum(weight[:, None, None, None] * jnp.sin(y)), recorded_statistics(module)

    def contribution(params, x, weight):
        (of_params, of_x), statistics = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x, weight)
        return jax.lax.psum((statistics, of_params), AXES), of_x

    run = over_replicas(contribution, shape, in_specs=(P(), P(AXES), P(AXES)), out_specs=(P(), P(AXES)))
    (statistics, of_params), of_x = run(params, x, weight)
    return statistics, {"params": of_params, "x": of_x}


def union_gradient(x, weight):
    """The same, by JAX on the real rows alone, written down plainly."""
    _, params, _ = make_layer("global")

    def loss(params, rows):
        mean, var = jnp.mean(rows, (0, 1, 2)), jnp.var(rows, (0, 1, 2))
        return jnp.sum(jnp.sin((rows - mean) / jnp.sqrt(var + 1e-5) * params["scale"] + params["bias"]))

    of_params, of_rows = jax.grad(loss, argnums=(0, 1))(params, x[weight > 0])
    return {"params": of_params, "x": np.zeros_like(x)}, of_rows


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_through_the_sum_equals_the_union_batch(shape):
    x, weight = example()
    expected, of_rows = union_gradient(x, weight)
    expected["x"][weight > 0] = of_rows
    _, gradient = layer_gradient(x, weight, shape, "global")
    # Measured: 2.4e-6 absolute on gradients of size 9.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=5e-6), gradient, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scope", ["global", "virtual_replica"])
def test_statistics_add_up_to_weighted_means_of_moments(shape, scope):
    x, weight = example()
    statistics, _ = layer_gradient(x, weight, shape, scope)
    recorded = statistics["statistics"]
    replicas = shape[0] * shape[1] if scope == "virtual_replica" else 1
    mean = var = 0.0
    for rows, row_weight in zip(np.split(x, replicas), np.split(weight, replicas), strict=True):
        if row_weight.any():
            own_mean, own_var = naive_moments(rows, row_weight)
            mean, var = mean + row_weight.sum() * own_mean, var + row_weight.sum() * own_var
    assert recorded["weight"] == 4 * weight.sum()  # 2 x 2 positions a row
    np.testing.assert_allclose(recorded["mean"] / recorded["weight"], mean / weight.sum(), rtol=1e-5)
    np.testing.assert_allclose(recorded["var"] / recorded["weight"], var / weight.sum(), rtol=1e-5)


def test_next_running_mixes_old_and_new():
    state = {"blocks": {"0": {"mean": jnp.array([1.0]), "var": jnp.array([2.0])}}}
    recorded = {"mean": jnp.array([30.0]), "var": jnp.array([60.0]), "weight": jnp.array(3.0)}
    new = next_running(state, {"blocks": {"0": {"statistics": recorded}}}, 0.9)
    np.testing.assert_allclose(new["blocks"]["0"]["mean"], [0.9 * 1 + 0.1 * 10], rtol=1e-6)
    np.testing.assert_allclose(new["blocks"]["0"]["var"], [0.9 * 2 + 0.1 * 20], rtol=1e-6)


def test_next_running_without_weight_keeps_every_bit():
    state = {"norm": {"mean": jnp.array([0.1]), "var": jnp.array([0.3])}}
    recorded = {"mean": jnp.zeros(1), "var": jnp.zeros(1), "weight": jnp.zeros(())}
    with jax.debug_nans(True):  # nor is there a NaN on the way, which would stop a user who looks for one
        new = next_running(state, {"norm": {"statistics": recorded}}, 0.9)
    jax.tree.map(np.testing.assert_array_equal, new, state)


def test_inference_uses_the_running_statistics():
    layer, params, _ = make_layer("global")
    x, _ = example()
    state = {"mean": jnp.array([1.0, 2.0, 3.0]), "var": jnp.array([4.0, 5.0, 6.0])}
    module = layer.bind(params, state)
    y = module(jnp.asarray(x), Mode())
    expected = (x - state["mean"]) / np.sqrt(np.asarray(state["var"]) + 1e-5) * params["scale"] + params["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert recorded_statistics(module) == ()


def block_step(shape, batch):
    """The gradient sum and the new running statistics of one residual block after one step."""
    block = PureModule(lambda rngs: Block(Layers("global", jnp.float32, rngs), 2, 18, 4, 2))
    params, model_state = block.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # the last norm's scale of 0 would hide what is before it

    def loss(params, model_state, x, weight):
        module = block.bind(params, model_state)
        y = module(x, Mode(jax.random.key(0), weight, AXES))
        return jnp.sum(weight[:, None, None, None] * jnp.sin(y)), recorded_statistics(module)

    def contribution(*inputs):
        return jax.lax.psum(jax.grad(loss, has_aux=True)(*inputs), AXES)

    run = over_replicas(contribution, shape, in_specs=(P(), P(), P(AXES), P(AXES)), out_specs=P())
    gradient, statistics = run(params, model_state, *batch)
    return jax.device_get((gradient, next_running(model_state, statistics, 0.9)))


def test_stacked_layers_do_not_depend_on_the_number_of_devices():
    x, weight = np.random.default_rng(3).normal(size=(8, 4, 4, 2)).astype(np.float32), example()[1]
    one, four = block_step((1, 1), (x, weight)), block_step((2, 2), (x, weight))
    assert np.abs(one[1]["shortcut_norm"]["mean"]).max() > 0
    for ours, expected in zip(jax.tree.leaves(four), jax.tree.leaves(one), strict=True):
        # By norm of the leaf; measured 7e-7.
        assert np.linalg.norm(ours - expected) <= 3e-6 * np.linalg.norm(expected)
