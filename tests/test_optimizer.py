"""The optimizer chain against NumPy and plain optax; schedules, clipping, decay, the moving average, what is frozen."""

import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import optimizer as optimizers
from trainer.config import Optimizer, OptimizerName
from trainer.errors import SettingsRefused

NUM_STEPS = 5
TOLERANCE = {"rtol": 2e-6, "atol": 1e-7}
"""Float32 against the same in float64 after five steps: at most 1.4e-7, and 7e-7 of (value + 0.05), was measured."""

PARAMS = {
    "attention": {
        "query": {"kernel": np.linspace(-1, 1, 12).reshape(3, 4), "bias": np.linspace(1, 2, 6).reshape(2, 3)}
    },
    "norm": {"scale": np.array([1.0, -2.0]), "bias": np.array([0.5, 0.25])},
    "table": np.array([[0.5, -0.5], [1.5, 2.5]]),
}
DECAYED = {
    "attention": {"query": {"kernel": True, "bias": False}},
    "norm": {"scale": False, "bias": False},
    "table": True,
}


def float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def gradients(step: int) -> Any:
    """Different in every step and entry, and never 0."""
    return jax.tree.map(lambda leaf: np.cos(leaf + step) + 0.1 * leaf, PARAMS)


def run(transformation: optax.GradientTransformation, num_steps: int = NUM_STEPS) -> tuple[Any, Any]:
    """Parameters and optimizer state after updates that are compiled as one program."""

    @jax.jit
    def update(params, state, grads):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = float32(PARAMS)
    state = transformation.init(params)
    for step in range(num_steps):
        params, state = update(params, state, float32(gradients(step)))
    return params, state


def assert_close(actual: Any, expected: Any):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


# Schedules


@pytest.mark.parametrize(
    ("settings", "points"),
    [
        ({}, {0: 2.0, 1: 2.0, 99: 2.0, 10**6: 2.0}),
        ({"warmup_steps": 4}, {0: 0.0, 1: 0.5, 3: 1.5, 4: 2.0, 5: 2.0, 10**6: 2.0}),
        ({"schedule": "linear"}, {0: 2.0, 25: 1.5, 50: 1.0, 99: 0.02, 100: 0.0, 101: 0.0}),
        (
            {"schedule": "linear", "final_fraction": 0.5, "warmup_steps": 20},
            {10: 1.0, 20: 2.0, 60: 1.5, 100: 1.0, 900: 1.0},
        ),
        ({"schedule": "cosine"}, {0: 2.0, 25: 1 + math.sqrt(0.5), 50: 1.0, 75: 1 - math.sqrt(0.5), 100: 0.0, 200: 0.0}),
        (
            {"schedule": "cosine", "final_fraction": 0.1, "warmup_steps": 50},
            {0: 0.0, 50: 2.0, 75: 1.1, 100: 0.2, 300: 0.2},
        ),
        ({"schedule": "cosine", "final_fraction": 1.0}, {0: 2.0, 50: 2.0, 100: 2.0}),
        ({"schedule": "linear", "warmup_steps": 100}, {0: 0.0, 50: 1.0, 99: 1.98}),
    ],
)
def test_schedule_at_chosen_points(settings: dict[str, Any], points: dict[int, float]):
    rate = optimizers.schedule(Optimizer(learning_rate=2.0, **settings), num_steps=100)
    compiled = jax.jit(rate)
    for count, expected in points.items():
        value = compiled(jnp.int32(count))
        assert (value.dtype, value.shape) == (jnp.float32, ())
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(rate(count), value, rtol=1e-6, atol=1e-6)


def test_schedules_are_those_of_optax():
    linear = optimizers.schedule(
        Optimizer(learning_rate=0.3, schedule="linear", warmup_steps=7, final_fraction=0.2), num_steps=31
    )
    cosine = optimizers.schedule(
        Optimizer(learning_rate=0.3, schedule="cosine", warmup_steps=7, final_fraction=0.2), num_steps=31
    )
    optax_linear = optax.warmup_constant_schedule(0.0, 0.3, 7)
    optax_linear = optax.join_schedules([optax_linear, optax.linear_schedule(0.3, 0.06, 24)], [7])
    optax_cosine = optax.warmup_cosine_decay_schedule(0.0, 0.3, 7, 31, 0.06)
    counts = jnp.arange(40)
    for ours, theirs in ((linear, optax_linear), (cosine, optax_cosine)):
        np.testing.assert_allclose(jax.vmap(ours)(counts), jax.vmap(theirs)(counts), rtol=1e-6, atol=1e-8)


def test_the_first_update_uses_the_schedule_at_0():
    settings = Optimizer(name="sgd", learning_rate=0.5, schedule="linear")
    params, _ = run(optimizers.build(settings, 4, float32(PARAMS)), num_steps=2)
    expected = jax.tree.map(lambda leaf, one, two: leaf - 0.5 * one - 0.375 * two, PARAMS, gradients(0), gradients(1))
    assert_close(params, expected)


# Each optimizer

DECAY, RATE, BETA1, BETA2, EPS = 0.1, 0.05, 0.8, 0.95, 1e-3


def by_hand(leaf_rule: Callable[[np.ndarray, list[np.ndarray], bool], np.ndarray]) -> Any:
    """Applies a rule (parameter, its gradients, decays) -> parameter to every leaf, in float64."""
    grads = [gradients(step) for step in range(NUM_STEPS)]
    return jax.tree.map(lambda leaf, decays, *rest: leaf_rule(leaf, list(rest), decays), PARAMS, DECAYED, *grads)


def sgd_by_hand(momentum: float, nesterov: bool) -> Any:
    def rule(param: np.ndarray, grads: list[np.ndarray], decays: bool) -> np.ndarray:
        velocity = np.zeros_like(param)
        for grad in grads:
            velocity = momentum * velocity + grad
            step = grad + momentum * velocity if nesterov else velocity
            param = param - RATE * (step + (DECAY * param if decays else 0))
        return param

    return by_hand(rule)


def adam_by_hand(trust_ratio: bool) -> Any:
    def rule(param: np.ndarray, grads: list[np.ndarray], decays: bool) -> np.ndarray:
        first, second = np.zeros_like(param), np.zeros_like(param)
        for count, grad in enumerate(grads, start=1):
            first, second = BETA1 * first + (1 - BETA1) * grad, BETA2 * second + (1 - BETA2) * grad**2
            step = first / (1 - BETA1**count) / (np.sqrt(second / (1 - BETA2**count)) + EPS)
            step = step + (DECAY * param if decays else 0)
            ratio = np.linalg.norm(param) / np.linalg.norm(step) if trust_ratio else 1.0
            param = param - RATE * ratio * step
        return param

    return by_hand(rule)


def lion_by_hand() -> Any:
    def rule(param: np.ndarray, grads: list[np.ndarray], decays: bool) -> np.ndarray:
        first = np.zeros_like(param)
        for grad in grads:
            step = np.sign(BETA1 * first + (1 - BETA1) * grad) + (DECAY * param if decays else 0)
            param, first = param - RATE * step, BETA2 * first + (1 - BETA2) * grad
        return param

    return by_hand(rule)


BETAS = {"beta1": BETA1, "beta2": BETA2}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({"name": "sgd"}, lambda: sgd_by_hand(0.0, False), id="sgd"),
        pytest.param({"name": "sgd", "momentum": 0.9}, lambda: sgd_by_hand(0.9, False), id="momentum"),
        pytest.param({"name": "sgd", "momentum": 0.9, "nesterov": True}, lambda: sgd_by_hand(0.9, True), id="nesterov"),
        pytest.param({"name": "adamw", "eps": EPS, **BETAS}, lambda: adam_by_hand(False), id="adamw"),
        pytest.param({"name": "lamb", "eps": EPS, **BETAS}, lambda: adam_by_hand(True), id="lamb"),
        pytest.param({"name": "lion", **BETAS}, lion_by_hand, id="lion"),
        pytest.param(
            {"name": "optax:sgd", "args": {"momentum": 0.9, "nesterov": True}},
            lambda: sgd_by_hand(0.9, True),
            id="import path",
        ),
    ],
)
def test_five_steps_equal_numpy(settings: dict[str, Any], expected: Callable[[], Any]):
    built = optimizers.build(Optimizer(learning_rate=RATE, weight_decay=DECAY, **settings), NUM_STEPS, float32(PARAMS))
    assert_close(run(built)[0], expected())


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        pytest.param({"name": "sgd", "momentum": 0.9}, lambda rate: optax.sgd(rate, 0.9), id="sgd"),
        pytest.param({"name": "adamw"}, lambda rate: optax.adamw(rate, weight_decay=0.0), id="adamw"),
        pytest.param({"name": "lamb", "eps": 1e-6}, lambda rate: optax.lamb(rate), id="lamb"),
        pytest.param({"name": "lion", "beta2": 0.99}, lambda rate: optax.lion(rate, weight_decay=0.0), id="lion"),
    ],
)
def test_five_steps_equal_optax(
    settings: dict[str, Any], plain: Callable[[optax.Schedule], optax.GradientTransformation]
):
    chosen = Optimizer(learning_rate=0.1, schedule="cosine", warmup_steps=2, **settings)
    params, _ = run(optimizers.build(chosen, NUM_STEPS, float32(PARAMS)))
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, NUM_STEPS)
    assert_close(params, run(plain(rate))[0])


def test_every_named_optimizer_is_built():
    assert set(get_args(OptimizerName)) == set(optimizers._NAMED)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_counters_count_updates_and_the_state_keeps_its_structure(name: OptimizerName):
    clip_norm = float("inf") if name == "onebit_adam" else 1.0
    settings = Optimizer(name=name, weight_decay=0.1, ema_decay=0.9, clip_norm=clip_norm, warmup_steps=2)
    built = optimizers.build(settings, NUM_STEPS, jax.eval_shape(lambda: float32(PARAMS)))
    shapes = jax.eval_shape(built.init, float32(PARAMS))
    _, state = run(built)
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    assert kinds == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
    counters = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.integer)]
    assert counters
    assert all(int(counter) == NUM_STEPS for counter in counters)


def test_the_update_compiles_once():
    built = optimizers.build(Optimizer(weight_decay=0.1, ema_decay=0.9, clip_norm=1.0), NUM_STEPS, float32(PARAMS))
    update = jax.jit(built.update)
    params = float32(PARAMS)
    state = jax.jit(built.init)(params)
    for step in range(3):
        updates, state = update(float32(gradients(step)), state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1


def not_an_optimizer(learning_rate: optax.Schedule) -> int:
    return 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "optax:no_such"}, r"optimizer\.name = 'optax:no_such'"),
        ({"name": "no_such_package:f"}, r"optimizer\.name"),
        ({"name": "optax:sgd", "args": {"momentun": 0.9}}, r"optimizer\.args\.momentun"),
        ({"name": "optax:trace"}, "learning_rate"),
        ({"name": "math:pi"}, r"optimizer\.name = 'math:pi': names a float"),
        ({"name": "optax:__version__"}, r"names a str"),
        ({"name": f"{__name__}:not_an_optimizer"}, "returned a int; needed is an optax.GradientTransformation"),
    ],
)
def test_an_import_path_that_gives_no_optimizer_is_refused(settings: dict[str, Any], words: str):
    with pytest.raises(SettingsRefused, match=words):
        optimizers.build(Optimizer(**settings), NUM_STEPS, float32(PARAMS))


# Decay


def test_decay_mask_leaves_norms_and_biases_alone_also_those_with_two_dims():
    assert optimizers.decay_mask(float32(PARAMS)) == DECAYED
    assert optimizers.decay_mask(jax.eval_shape(lambda: float32(PARAMS))) == DECAYED


def test_decay_mask_goes_by_the_last_name_and_the_number_of_dims():
    shapes = {
        "bias": {"kernel": (2, 2)},
        "scale_up": (2, 2),
        "scale": (2, 2),
        "vector": (4,),
        "cube": (1, 1, 1),
        "list": [(2, 2)],
    }
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda node: isinstance(node, tuple))
    assert optimizers.decay_mask(params) == {
        "bias": {"kernel": True},
        "scale_up": True,
        "scale": False,
        "vector": False,
        "cube": True,
        "list": [True],
    }


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "optax:sgd"])
def test_decay_alone_is_the_learning_rate_times_the_parameter(name: str):
    built = optimizers.build(Optimizer(name=name, learning_rate=0.5, weight_decay=0.1), NUM_STEPS, float32(PARAMS))
    zeros = jax.tree.map(jnp.zeros_like, float32(PARAMS))
    updates, _ = jax.jit(built.update)(zeros, built.init(float32(PARAMS)), float32(PARAMS))
    assert_close(updates, jax.tree.map(lambda leaf, decays: -0.05 * leaf * decays, PARAMS, DECAYED))


# Clipping


def clipped(limit: float, updates: Any) -> Any:
    transformation = optimizers.clip_by_global_norm(limit)
    return jax.jit(transformation.update)(updates, transformation.init(updates))[0]


def test_a_mean_gradient_above_the_limit_is_scaled_to_it():
    settings = Optimizer(name="sgd", learning_rate=1.0, clip_norm=1.0)
    params = {"w": jnp.zeros(2)}
    built = optimizers.build(settings, NUM_STEPS, params)
    gradient = {"w": jnp.array([1.5, 2.0])}
    assert float(optimizers.global_norm(gradient)) == 2.5
    updates, _ = built.update(gradient, built.init(params), params)
    np.testing.assert_allclose(-updates["w"], [0.6, 0.8], rtol=1e-6)


def test_the_norm_is_over_all_leaves():
    tree = {"a": jnp.array([3.0]), "b": {"c": jnp.array([[4.0]])}, "none": None}
    assert float(optimizers.global_norm(tree)) == 5.0
    np.testing.assert_allclose(clipped(1.0, tree)["b"]["c"], [[0.8]], rtol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_at_or_below_the_limit_nothing_changes_a_bit(factor: float):
    tree = {"w": factor * jnp.array([3.0, 4.0])}
    assert (clipped(5.0, tree)["w"] == tree["w"]).all()


def test_zeros_with_a_limit_of_0_stay_zeros():
    assert (clipped(0.0, {"w": jnp.zeros(3)})["w"] == 0).all()
    assert (clipped(0.0, {"w": jnp.ones(3)})["w"] == 0).all()


def test_clipping_zeros_computes_no_nan_on_the_way():
    transformation = optimizers.clip_by_global_norm(0.0)
    with jax.debug_nans(True):  # operation by operation, because it looks only at what comes out of a compiled function
        updates, _ = transformation.update({"w": jnp.zeros(3)}, transformation.init({}))
    assert (jax.tree.leaves(updates)[0] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_does_not_overflow(dtype: Any):
    tree = {"w": jnp.full(3, 200, dtype)}
    norm = optimizers.global_norm(tree)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 200 * math.sqrt(3), rtol=1e-6)
    result = clipped(1.0, tree)["w"]
    assert result.dtype == dtype
    np.testing.assert_allclose(
        np.linalg.norm(result.astype(np.float32)), 1.0, rtol=4e-3
    )  # half a bfloat16 step: 2 ** -8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20])
def test_a_norm_that_is_not_finite_shows_as_nan(bad: float):
    assert np.isnan(clipped(1.0, {"a": jnp.ones(2), "b": jnp.array([bad])})["a"]).all()


def test_the_norm_of_nothing_is_0():
    assert float(optimizers.global_norm({"a": None})) == 0.0


def test_no_limit_adds_no_stage():
    def num_stages(**settings: Any) -> int:
        built = optimizers.build(Optimizer(**settings), NUM_STEPS, float32(PARAMS))
        return len(built.init(float32(PARAMS)))

    assert num_stages(clip_norm=math.inf) == 1
    assert num_stages(clip_norm=1.0) == 2
    assert num_stages(clip_norm=0.0, ema_decay=0.5) == 3


# The moving average


def test_ema_equals_numpy():
    settings = Optimizer(name="sgd", learning_rate=0.1, ema_decay=0.75)
    built = optimizers.build(settings, NUM_STEPS, float32(PARAMS))
    params, state = run(built)
    plain, average = PARAMS, PARAMS
    for step in range(NUM_STEPS):
        plain = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, plain, gradients(step))
        average = jax.tree.map(lambda ema, leaf: 0.75 * ema + 0.25 * leaf, average, plain)
    assert_close(params, plain)
    assert_close(optimizers.ema_params(state), average)


def test_ema_changes_no_update():
    with_ema, _ = run(optimizers.build(Optimizer(ema_decay=0.9), NUM_STEPS, float32(PARAMS)))
    without, _ = run(optimizers.build(Optimizer(), NUM_STEPS, float32(PARAMS)))
    assert all((one == two).all() for one, two in zip(*map(jax.tree.leaves, (with_ema, without)), strict=True))


def test_ema_is_found_anywhere_and_absent_without_one():
    params = float32(PARAMS)
    deep = optax.chain(
        optax.identity(), optax.chain(optax.masked(optax.sgd(0.1), DECAYED), optimizers.parameter_ema(0.5))
    )
    assert jax.tree.structure(optimizers.ema_params(deep.init(params))) == jax.tree.structure(params)
    plain = optimizers.build(Optimizer(), NUM_STEPS, params)
    assert optimizers.ema_params(plain.init(params)) is None


def test_ema_of_half_precision_moves_by_less_than_its_precision():
    ema = optimizers.parameter_ema(0.999)
    params = {"w": jnp.ones(1, jnp.bfloat16)}
    state = ema.init(params)
    _, state = ema.update({"w": jnp.ones(1, jnp.bfloat16)}, state, params)
    average = optimizers.ema_params(state)
    assert average is not None
    assert average["w"].dtype == jnp.float32
    np.testing.assert_allclose(average["w"], 1.001, rtol=1e-6)


def test_ema_survives_the_donation_of_the_parameters():
    ema = optimizers.parameter_ema(0.5)
    params = {"w": jnp.ones(3)}
    state = ema.init(params)
    params["w"].delete()
    assert (optimizers.ema_params(state)["w"] == 1).all()


@pytest.mark.parametrize(
    "make", [lambda: optimizers.parameter_ema(0.5), lambda: optimizers.decoupled_decay(0.1, lambda _: 1.0, True)]
)
def test_what_needs_the_parameters_says_so(make: Callable[[], optax.GradientTransformation]):
    transformation, leaf = make(), jnp.ones(2)
    with pytest.raises(ValueError, match="needs the parameters"):
        transformation.update(leaf, transformation.init(leaf))


# Frozen parameters


def test_a_pattern_freezes_what_it_matches():
    mask = optimizers.trainable_mask(float32(PARAMS), ["attention/*", "norm/b?as"])
    assert mask == {
        "attention": {"query": {"kernel": False, "bias": False}},
        "norm": {"scale": True, "bias": False},
        "table": True,
    }
    assert all(jax.tree.leaves(optimizers.trainable_mask(float32(PARAMS), [])))


def test_paths_go_through_lists_and_case_counts():
    params = {"blocks": [{"w": 1.0}, {"w": 2.0}]}
    assert optimizers.trainable_mask(params, ["blocks/1/*"]) == {"blocks": [{"w": True}, {"w": False}]}
    with pytest.raises(SettingsRefused):
        optimizers.trainable_mask(params, ["Blocks/1/*"])


def test_patterns_that_match_nothing_are_refused_with_the_nearest_paths():
    with pytest.raises(SettingsRefused) as caught:
        optimizers.trainable_mask(float32(PARAMS), ["atention/query/kernel", "norm/*", "zzz"])
    first, second = str(caught.value).splitlines()
    assert first.startswith("optimizer.frozen: 'atention/query/kernel' matches no parameter")
    assert "attention/query/kernel" in first.partition("matches")[2]
    assert second.startswith("optimizer.frozen: 'zzz' matches no parameter")


def test_freezing_everything_is_refused():
    with pytest.raises(SettingsRefused, match="freezes all 5 parameters"):
        optimizers.trainable_mask(float32(PARAMS), ["*"])


def test_split_and_merge_are_inverse_and_part_the_leaves():
    params = float32(PARAMS)
    trainable, frozen = optimizers.split(params, optimizers.trainable_mask(params, ["norm/*"]))
    assert frozen["table"] is None
    assert trainable["norm"] == {"scale": None, "bias": None}
    assert len(jax.tree.leaves(trainable)) + len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(params))
    merged = optimizers.merge(trainable, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    assert all(one is two for one, two in zip(*map(jax.tree.leaves, (merged, params)), strict=True))


@pytest.mark.parametrize("name", [*get_args(OptimizerName), "optax:adamw"])
def test_the_trainable_part_trains_as_it_would_in_the_whole_tree(name: str):
    settings = Optimizer(name=name, weight_decay=0.1, ema_decay=0.5)
    params = float32(PARAMS)
    mask = optimizers.trainable_mask(params, ["norm/*"])
    trainable, _ = optimizers.split(params, mask)
    whole = optimizers.build(settings, NUM_STEPS, params)
    part = optimizers.build(settings, NUM_STEPS, jax.eval_shape(lambda: trainable))
    grads = float32(gradients(0))
    expected, _ = jax.jit(whole.update)(grads, whole.init(params), params)
    updates, state = jax.jit(part.update)(optimizers.split(grads, mask)[0], part.init(trainable), trainable)
    assert_close(updates, optimizers.split(expected, mask)[0])
    assert jax.tree.structure(optimizers.ema_params(state)) == jax.tree.structure(trainable)


# Types


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_our_own_stages_pass_strict_promotion_and_keep_types(dtype: Any):
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), PARAMS)
    rate = optimizers.schedule(Optimizer(schedule="cosine", warmup_steps=1), NUM_STEPS)
    chain = optax.chain(
        optimizers.clip_by_global_norm(1.0),
        optimizers.decoupled_decay(0.1, rate, DECAYED),
        optimizers.parameter_ema(0.9),
    )
    with jax.numpy_dtype_promotion("strict"):
        updates, _ = jax.jit(chain.update)(params, chain.init(params), params)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(updates))
