"""1-bit Adam: against optax's Adam in the warm-up, against the rule in NumPy after it, and what it must not touch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressed import Loop, assert_same_rows, contributions, kept
from exchanges import AXES, mesh_of
from jax.sharding import PartitionSpec
from test_codec_steps import Half
from test_loop import run, settings, training
from toy import Perceptron, Runner, rows

from trainer import sync
from trainer.config import Config, Optimizer
from trainer.errors import SettingsRefused
from trainer.sync import compression

SHAPES = {"matrix": (16, 12), "odd": (3, 8), "bias": (7,), "scale": ()}
BETA1, BETA2, EPS = 0.9, 0.99, 1e-3
ADAM = {"beta1": BETA1, "beta2": BETA2, "eps": EPS}


class InNumpy:
    """The rule for contributions that are summed over nodes x local devices, by ``sign`` across nodes."""

    def __init__(self, nodes, local, warmup_steps):
        self.nodes, self.local, self.warmup_steps, self.count = nodes, local, warmup_steps, 0
        self.m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.residual = {name: np.zeros((nodes, *shape)) for name, shape in SHAPES.items()}

    def __call__(self, tree):
        self.count += 1
        return {name: self._leaf(name, leaf.astype(np.float64)) for name, leaf in tree.items()}

    def _leaf(self, name, rows):
        if self.count <= self.warmup_steps:
            gradient = rows.sum(axis=0)
            self.m[name] = BETA1 * self.m[name] + (1 - BETA1) * gradient
            self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * gradient**2
        else:
            owned = rows.reshape(self.nodes, self.local, *rows.shape[1:]).sum(axis=1)
            is_used = self.v[name] > 0
            values = BETA1 * self.m[name] / self.nodes + (1 - BETA1) * owned + self.residual[name]
            values = np.where(is_used, values, 0)
            total, sent = sign_in_numpy(values, self.local)
            self.m[name] = np.where(is_used, total, 0)
            self.residual[name] = np.where(is_used, values - sent, 0)
        first, second = 1 - BETA1**self.count, 1 - BETA2 ** min(self.count, self.warmup_steps)
        return self.m[name] / first / (np.sqrt(self.v[name] / second) + EPS)


def sign_in_numpy(values, local):
    """(total, sent): each of ``local`` devices exchanges a row of a leaf, of which each node re-encodes a part."""
    nodes, shape = len(values), values[0].shape
    dim = next((dim for dim, size in enumerate(shape) if size % local == 0), None)
    moved = values if dim is None else np.moveaxis(values, dim + 1, 1)
    flat = moved.reshape(nodes, -1)
    size = flat.shape[1]
    cut = np.pad(flat, ((0, 0), (0, -size % local))).reshape(nodes, local, -1)
    length = cut.shape[2]
    parts = np.pad(cut, ((0, 0), (0, 0), (0, -length % nodes)), mode="edge").reshape(nodes, local, nodes, -1)

    def coded(part):
        scale = np.mean(np.abs(part), axis=-1, keepdims=True)
        return np.where(part < 0, -scale, scale)

    sent = coded(parts)
    exact = sent.sum(axis=0)
    total = coded(exact)
    for node in range(nodes):
        sent[node, :, node] += (total - exact)[:, node]

    def back(found):
        flat = found.reshape(local, -1)[:, :length].reshape(-1)[:size]
        return flat.reshape(shape) if dim is None else np.moveaxis(flat.reshape(moved.shape[1:]), 0, dim)

    return back(total), np.stack([back(one) for one in sent])


def with_unused_rows(num_replicas, step):
    """Contributions in which some rows of the matrix, and the bias's first element, are always exactly zero."""
    tree = contributions(num_replicas, SHAPES, step)
    tree["matrix"][:, 3:6] = 0
    tree["bias"][:, 0] = 0
    return tree


def test_the_warm_up_is_adam():
    mesh = mesh_of(2, 2)
    plain = optax.chain(sync.all_reduce(mesh, algorithm="hierarchical"), optax.scale_by_adam(BETA1, BETA2, EPS))
    loops = Loop(mesh, sync.onebit_adam(mesh, warmup_steps=5, **ADAM), SHAPES), Loop(mesh, plain, SHAPES)
    for step in range(5):
        tree = contributions(4, SHAPES, step)
        result, expected = (loop(tree) for loop in loops)
        assert_same_rows(result)
        for name in SHAPES:
            np.testing.assert_allclose(result[name], expected[name], rtol=1e-6, atol=1e-6)
    assert not any(np.any(residual) for residual in kept(loops[0].state.exchange).values())


@pytest.mark.parametrize(("nodes", "local"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_it_is_the_rule_written_in_numpy(nodes, local):
    """Over ten steps, the last seven with the momentum in signs; where there is no variance, nothing ever happens."""
    mesh = mesh_of(nodes, local)
    transform = sync.onebit_adam(mesh, warmup_steps=3, reduce="sum", bucket_mib=1e-6, **ADAM)
    loop, rule = Loop(mesh, transform, SHAPES), InNumpy(nodes, local, warmup_steps=3)
    for step in range(10):
        tree = with_unused_rows(nodes * local, step)
        result, expected = loop(tree), rule(tree)
        assert_same_rows(result)
        for name in SHAPES:
            np.testing.assert_allclose(result[name][0], expected[name], rtol=1e-4, atol=1e-4)
        assert not result["matrix"][:, 3:6].any()
        assert not result["bias"][:, 0].any()
    residuals = kept(loop.state.exchange)
    for name, residual in residuals.items():
        np.testing.assert_allclose(residual / nodes, rule.residual[name], rtol=1e-4, atol=1e-4)
    assert np.any(residuals["matrix"][:, 6:])
    assert not np.any(residuals["matrix"][:, 3:6])
    assert not np.any(residuals["bias"][:, 0])


def test_nothing_jumps_where_the_variance_is_frozen():
    """With a codec that is nearly exact and the same gradient in every step, the direction stays 1 or -1."""
    mesh = mesh_of(2, 2)
    loop = Loop(mesh, sync.onebit_adam(mesh, warmup_steps=2, codec="int8", eps=1e-12), SHAPES)
    tree = contributions(4, SHAPES)
    for _ in range(5):
        result = loop(tree)
        for name in SHAPES:
            expected = np.sign(tree[name].mean(axis=0))
            near = np.abs(tree[name].mean(axis=0)) > 0.3
            np.testing.assert_allclose(result[name][0][near], expected[near], atol=0.06)


def test_a_mean_is_a_sum_of_shares():
    mesh = mesh_of(2, 2)
    loops = [Loop(mesh, sync.onebit_adam(mesh, warmup_steps=1, reduce=how), SHAPES) for how in ("mean", "sum")]
    for step in range(3):
        tree = contributions(4, SHAPES, step)
        mean, total = loops[0](tree), loops[1](jax.tree.map(lambda leaf: leaf / 4, tree))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), mean, total)


def test_the_moments_are_replicated_and_the_residual_has_owners():
    mesh = mesh_of(2, 2)
    state = jax.eval_shape(sync.onebit_adam(mesh, warmup_steps=1).init, {"w": jnp.zeros((4, 3), jnp.bfloat16)})
    specs = sync.state_specs(state, mesh=mesh)
    assert state.m["w"].dtype == state.v["w"].dtype == jnp.float32
    assert specs.m["w"] == specs.v["w"] == PartitionSpec()
    assert specs.exchange.by_shard["residual"]["w"] == PartitionSpec("node", "local")
    assert sync.num_owners(state) == 2
    assert jax.eval_shape(lambda: sync.resize(state_of_ones(state), 4)).exchange.by_shard["residual"]["w"].shape[0] == 4


def state_of_ones(shapes):
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)


@pytest.mark.parametrize("codec", ["none", "int8", "sign", pytest.param("topk", marks=pytest.mark.slow)])
def test_what_is_masked_out_is_neither_sent_nor_kept(codec):
    mesh = mesh_of(2, 2)
    transform = sync.all_reduce(mesh, codec=codec, error_feedback=codec != "none")
    mask = {name: np.arange(np.prod(shape)).reshape(shape) % 3 > 0 for name, shape in SHAPES.items()}
    masking = optax.GradientTransformation(
        transform.init, lambda updates, state, params=None: transform.update(updates, state, params, mask=mask)
    )
    loop = Loop(mesh, masking, SHAPES)
    for step in range(2):
        tree = contributions(4, SHAPES, step)
        result = loop(tree)
        assert_same_rows(result)
    for name, where in mask.items():
        assert not result[name][:, ~where].any()
        if codec in ("none", "int8"):
            np.testing.assert_allclose(result[name][0][where], tree[name].mean(axis=0)[where], atol=0.1)
    for name, residual in kept(loop.state).items():
        assert not residual[:, ~mask[name]].any()
        assert residual[:, mask[name]].any() == mask[name].any()


def test_what_is_not_finite_is_seen_where_nothing_is_sent_too():
    mesh = mesh_of(2, 2)
    loop = Loop(mesh, sync.onebit_adam(mesh, warmup_steps=1), SHAPES)
    for step in range(3):
        loop(with_unused_rows(4, step))
    before = jax.device_get(loop.state)
    for value, place in ((np.nan, (2, 4, 1)), (np.inf, (1, 9, 0))):
        tree = with_unused_rows(4, 3)
        tree["matrix"][place] = value
        assert all(np.isnan(leaf).all() for leaf in loop(tree).values())
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(loop.state), before)


def test_a_gradient_whose_square_overflows_leaves_the_state_as_it_was():
    mesh = mesh_of(2, 2)
    loop = Loop(mesh, sync.onebit_adam(mesh, warmup_steps=5), SHAPES)
    before, tree = jax.device_get(loop.state), contributions(4, SHAPES)
    tree["bias"][:, 3] = 1e25
    assert all(np.isnan(leaf).all() for leaf in loop(tree).values())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loop.state), before)


SETTINGS = Optimizer(name="onebit_adam", learning_rate=1e-2, eps=1e-3, weight_decay=0.1, non_finite="skip")


def runner(mapping="shard_map", task=Perceptron):
    how = {"mapping": mapping, "all_reduce": sync.onebit_adam, "exchange": {"warmup_steps": 2, "eps": 1e-3}}
    return Runner(task(), mesh_of(2, 2), SETTINGS, num_virtual_replicas=8, **how)


def test_a_step_that_is_not_finite_is_skipped_before_and_after_the_border():
    skipping = runner()
    for seed in range(4):
        batch = rows(32, seed=seed)
        batch["x"][5, 0] = np.nan
        before = jax.device_get(skipping.state)
        report = skipping.step(batch)
        assert (int(report.applied), int(report.consecutive_skips)) == (0, 1)
        counted = before._replace(step=before.step + 1, consecutive_skips=before.consecutive_skips + 1)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(skipping.state), counted)
        assert int(skipping.step(rows(32, seed=seed)).applied) == 1
    assert int(skipping.state.num_updates) == 4


def test_the_warm_up_in_a_train_step_is_adamw():
    """With accumulation, uneven virtual replicas and weight decay."""
    ours = runner()
    plain = Runner(Perceptron(), mesh_of(1, 1), SETTINGS.model_copy(update={"name": "adamw"}))
    for seed in range(2):
        batch = rows(32, seed=seed)
        batch["weight"][3:14] = 0
        ours.step(batch)
        plain.step(batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), ours.params, plain.params)


def test_it_is_the_same_under_pmap():
    """With a model that computes in bfloat16."""
    runners = [runner(mapping, Half) for mapping in ("shard_map", "pmap")]
    for seed in range(4):
        for one in runners:
            one.step(rows(32, seed=seed))
    first, second = (jax.device_get(one.state) for one in runners)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), first, second)


def regression(mesh, transform, num_steps=400):
    """The excess error of a linear model after training in a loop of one's own; the inputs' scales differ much."""
    optimizer = optax.chain(transform, optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0.0, num_steps)))
    generator = np.random.default_rng(0)
    scales = generator.permutation(np.geomspace(0.03, 1, 64))
    truth = generator.normal(size=64) / scales
    x = generator.normal(size=(num_steps, 16, 64)) * scales
    y = x @ truth + generator.normal(size=(num_steps, 16))
    params = jnp.zeros(64)
    specs = sync.state_specs(jax.eval_shape(optimizer.init, params), mesh=mesh)

    def train(params, state, batches):
        def step(carry, batch):
            (params, state), (x, y) = carry, batch
            gradient = jax.grad(lambda params: jnp.mean((x @ params - y) ** 2))(params)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), batches)[0]

    whole, rows = PartitionSpec(), PartitionSpec(None, AXES)
    program = jax.shard_map(train, mesh=mesh, in_specs=(whole, specs, rows), out_specs=(whole, specs), check_vma=False)
    batches = (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    params, _ = jax.jit(program)(params, optimizer.init(params), batches)
    return float(np.sum(((np.asarray(params) - truth) * scales) ** 2))


def test_it_learns_about_as_adam_does_and_better_than_signs_in_front_of_adam():
    mesh, adam = mesh_of(2, 2), optax.scale_by_adam(b2=0.9)
    signs = sync.all_reduce(mesh, codec="sign", error_feedback=True, warmup_steps=80)
    exact = regression(mesh, optax.chain(sync.all_reduce(mesh), adam))
    ours = regression(mesh, sync.onebit_adam(mesh, warmup_steps=80, beta2=0.9))
    before = regression(mesh, optax.chain(signs, adam))
    assert ours < 1.5 * exact
    assert ours < 0.85 * before


def test_the_published_volume():
    """Against 16 bits in every step, with 15 % of them in the warm-up: 1 / (0.15 + 0.85 / 16) = 4.92 times less."""
    shapes, block_size = {"w": jax.ShapeDtypeStruct((2**20,), np.float32)}, 1024

    def sent(codec, args):
        found = compression.choose(codec, args)
        return sync.traffic(shapes, 2, 1, algorithm="auto", bucket_mib="auto", compression=found).wire_bytes_slow

    half, ones = sent("bf16", {}), sent("sign", {"block_size": block_size})

    def ratio(after):
        return half / (0.15 * half + 0.85 * after)

    scales = 4 * 2**20 // block_size
    assert round(ratio(ones - scales), 2) == 4.92
    assert ratio(ones) == pytest.approx(4.92, rel=0.01)  # with a scale for each block; the warm-up here has 32 bits


ONEBIT = {
    "optimizer": {"name": "onebit_adam", "accumulate_steps": 1, "ema_decay": 0.0},
    "sync": {"codec": "sign", "warmup_steps": 2},
}


@pytest.mark.parametrize("warmup_steps", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_six_steps_are_three_and_three_bit_for_bit(tmp_path, warmup_steps):
    """Resumed before the variance is frozen, or after; the rows say what is sent before and after."""
    observe = {"log_every_steps": 1}
    table = {**ONEBIT, "sync": {"codec": "sign", "warmup_steps": warmup_steps}}
    config = settings(**table, observe=observe)
    whole = training(run(config, tmp_path / "whole"))
    run(settings(**table, observe=observe, run={"num_steps": 3}), tmp_path / "parts")
    parts = training(run(config, tmp_path / "parts", resume=True))
    assert [row["attempt"] for row in parts] == [1, 1, 1, 2, 2, 2]
    for key in ("loss", "param_digest", "residual_norm", "grad_norm"):
        assert [row[key] for row in parts] == [row[key] for row in whole], key
    sent = [row["wire_bytes_slow"] for row in whole]
    assert sent[0] > 10 * sent[-1]
    assert sent == warmup_steps * sent[:1] + (6 - warmup_steps) * sent[-1:]
    assert [row["residual_norm"] > 0 for row in whole] == warmup_steps * [False] + (6 - warmup_steps) * [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": {}}, 'sync.codec: onebit_adam compresses its momentum; choose a codec, such as "sign"'),
        ({"sync": {"codec": "sign"}}, "sync.warmup_steps: onebit_adam freezes the variance learned in the warm-up"),
        ({"sync": {**ONEBIT["sync"], "error_feedback": False}}, "sync.error_feedback: onebit_adam goes wrong without"),
        ({"sync": {**ONEBIT["sync"], "momentum_correction": 0.9}}, "sync.momentum_correction: onebit_adam exchanges"),
        ({"optimizer": {**ONEBIT["optimizer"], "clip_norm": 1.0}}, "clip_norm: onebit_adam exchanges its momentum"),
        ({"optimizer": {**ONEBIT["optimizer"], "momentum": 0.9}}, "momentum: onebit_adam would ignore it"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(changes, message):
    assert isinstance(settings(**ONEBIT), Config)
    with pytest.raises(ValueError, match=message):
        settings(**ONEBIT | changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": 0}, "sync.warmup_steps = 0: onebit_adam freezes"),
        ({"codec": "none"}, "sync.codec = 'none': onebit_adam compresses"),
        ({"codec": "topk"}, "sync.codec = 'topk': onebit_adam needs one that sends every element"),
        ({"codec": "randomk"}, "sync.codec = 'randomk'"),
        ({"codec": "powersgd"}, "sync.codec = 'powersgd'"),
        ({"error_feedback": False}, "sync.error_feedback = false"),
        ({"momentum_correction": 0.9}, "sync.momentum_correction"),
        ({"output_dtype": jnp.bfloat16}, "output_dtype"),
        ({"compress": "fast"}, "sync.compress = 'fast'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(SettingsRefused, match=message) as caught:
        sync.onebit_adam(mesh_of(2, 2), **{"warmup_steps": 3} | arguments)
    assert "\n" not in str(caught.value)
