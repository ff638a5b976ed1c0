"""The exchange with codecs and error feedback: against the same rules in NumPy, and what must hold for any codec."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressed import CODECS, InNumpy, Loop, assert_same_rows, contributions, kept, largest
from exchanges import AXES, exchanged, mesh_of
from jax.sharding import PartitionSpec

from trainer import sync
from trainer.errors import SettingsRefused

SHAPES = {"matrix": (16, 12), "odd": (3, 8), "bias": (7,), "scale": ()}
FEEDBACK = {"reduce": "sum", "error_feedback": True}


@pytest.mark.parametrize("compress", ["slow", "all"])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("nodes", "local"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_it_is_the_rule_written_in_numpy(name, compress, nodes, local):
    mesh = mesh_of(nodes, local)
    transform = sync.all_reduce(mesh, codec=CODECS[name](), compress=compress, bucket_mib=1e-6, **FEEDBACK)
    loop, rule = Loop(mesh, transform, SHAPES), InNumpy(name, nodes, local, compress)
    for step in range(3):
        tree = contributions(nodes * local, SHAPES, step)
        result, expected = loop(tree), rule(tree)
        assert_same_rows(result)
        for leaf in SHAPES:
            # bfloat16 may round a value that differs in its last float32 bit to the other side.
            bound = 0.04 if name == "halves" else 2e-5
            np.testing.assert_allclose(result[leaf][0], expected[leaf], rtol=0, atol=bound)
            assert np.median(np.abs(result[leaf][0] - expected[leaf])) < 5e-6
    assert kept(loop.state)
    for leaf, residual in kept(loop.state).items():
        np.testing.assert_allclose(residual / rule.owners, rule.residual[leaf], rtol=0, atol=0.04)


@pytest.mark.parametrize(("codec", "compress"), [*((name, "slow") for name in sync.CODECS), ("int4", "all")])
def test_what_is_sent_and_what_is_kept_are_all_there_was(codec, compress):
    """Over 20 steps; then a NaN on one replica reaches every result, and no bit of the state changes."""
    mesh = mesh_of(2, 2)
    loop = Loop(mesh, sync.all_reduce(mesh, codec=codec, compress=compress, **FEEDBACK), SHAPES)
    sent, given = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(20):
        tree = contributions(4, SHAPES, step)
        result = loop(tree)
        assert_same_rows(result)
        for name in SHAPES:
            sent[name] += result[name][0]
            given[name] += tree[name].sum(axis=0, dtype=np.float64)
    rest = {name: residual.mean(axis=0, dtype=np.float64) for name, residual in kept(loop.state).items()}
    assert rest
    for name in SHAPES:
        # Measured: 4e-6 on sums near 10.
        np.testing.assert_allclose(sent[name] + rest.get(name, 0), given[name], rtol=0, atol=1e-5)

    before = jax.device_get(loop.state)
    for spoilt in (np.nan, np.inf):
        tree["bias"][3, 2] = spoilt
        assert all(np.isnan(leaf).all() for leaf in loop(tree).values())
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(loop.state), before)
    loop(contributions(4, SHAPES, 20))
    assert int(loop.state.shared["count"]) == 21


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_a_total_that_only_its_encoder_sees_overflow_is_nan_everywhere(codec):
    mesh = mesh_of(2, 2)
    loop = Loop(mesh, sync.all_reduce(mesh, codec=codec, reduce="sum"), SHAPES)
    tree = contributions(4, SHAPES)
    tree["matrix"][:, 3, 5] = 1e38  # the sum within a node is finite, that over all is not
    assert all(np.isnan(leaf).all() for leaf in loop(tree).values())


@pytest.mark.parametrize("codec", ["int8", pytest.param("randomk", marks=pytest.mark.slow)])
def test_a_state_shared_out_within_the_node_is_the_same_state(codec):
    mesh = mesh_of(2, 4)
    transform = sync.all_reduce(mesh, codec=codec, **FEEDBACK)
    loops = [Loop(mesh, transform, SHAPES, is_shared_out=shared) for shared in (True, False)]
    for step in range(3):
        tree = contributions(8, SHAPES, step)
        results = [loop(tree) for loop in loops]
        jax.tree.map(np.testing.assert_array_equal, *results)
    jax.tree.map(np.testing.assert_array_equal, *[jax.device_get(loop.state) for loop in loops])
    shards = [loop.state.by_shard["residual"]["matrix"].addressable_shards[0].data.shape for loop in loops]
    assert shards == [(1, 4, 12), (1, 16, 12)]


@pytest.mark.parametrize("codec", ["int8", "topk", "powersgd"])
def test_in_pmap_it_is_the_same(codec):
    arguments = {"codec": codec, "error_feedback": True, "bucket_mib": 1.0}
    mesh = mesh_of(2, 2)
    loop = Loop(mesh, sync.all_reduce(mesh, **arguments), SHAPES)
    transform = sync.all_reduce(axes="replica", devices_per_node=2, **arguments)
    tree = contributions(4, SHAPES)
    state = jax.pmap(transform.init, axis_name="replica", devices=jax.devices()[:4])(tree)
    step = jax.pmap(transform.update, axis_name="replica", devices=jax.devices()[:4])
    for number in range(2):
        tree = contributions(4, SHAPES, number)
        ours, (result, state) = loop(tree), step(tree, state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), ours, jax.device_get(result))
    whole = sync.from_pmap(jax.device_get(state), devices_per_node=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), whole, jax.device_get(loop.state))
    jax.tree.map(np.testing.assert_array_equal, sync.to_pmap(whole, 4), jax.device_get(state))


@pytest.mark.parametrize("codec", ["int4", "powersgd"])
def test_the_warm_up_is_exact_and_keeps_nothing(codec):
    mesh = mesh_of(2, 2)
    loop = Loop(mesh, sync.all_reduce(mesh, codec=codec, warmup_steps=2, **FEEDBACK), SHAPES)
    for step in range(3):
        tree = contributions(4, SHAPES, step)
        result, exact = loop(tree), exchanged(mesh, sync.all_reduce(mesh, algorithm="hierarchical", reduce="sum"), tree)
        residual, is_equal = kept(loop.state)["matrix"], np.array_equal(result["matrix"], exact["matrix"])
        assert (np.any(residual != 0), is_equal) == (step == 2, step < 2)


def test_momentum_correction_forgets_what_was_sent():
    mesh = mesh_of(2, 2)
    codec = largest(5)
    loop = Loop(mesh, sync.all_reduce(mesh, codec=codec, momentum_correction=0.5, **FEEDBACK), {"matrix": (8, 6)})
    rule = InNumpy("largest", 2, 2, "slow", momentum=0.5, is_forgotten=True)
    rule.rule = lambda values, state, parts: largest_five(values, state, parts)
    for step in range(4):
        tree = contributions(4, {"matrix": (8, 6)}, step)
        np.testing.assert_allclose(loop(tree)["matrix"][0], rule(tree)["matrix"], rtol=0, atol=1e-5)
    velocity = kept(loop.state, "velocity")["matrix"]
    np.testing.assert_allclose(velocity / 2, rule.velocity["matrix"], rtol=0, atol=1e-5)
    assert np.sum(velocity == 0, axis=(1, 2)).tolist() == [5, 5]


def largest_five(values, state, num_parts):
    from compressed import largest_in_numpy

    return largest_in_numpy(values, state, num_parts, count=5)


def test_momentum_reaches_leaves_that_are_exchanged_exactly_too():
    """Three steps of 1 with a momentum of 0.5: 1, 1.5, 1.75."""
    mesh = mesh_of(2, 2)
    transform = sync.all_reduce(mesh, codec="powersgd", error_feedback=True, momentum_correction=0.5)
    loop = Loop(mesh, transform, {"bias": (6,), "matrix": (16, 12)})
    ones = {"bias": np.ones((4, 6), np.float32), "matrix": np.ones((4, 16, 12), np.float32)}
    for expected in (1, 1.5, 1.75):
        result = loop(ones)
        np.testing.assert_allclose(result["bias"], np.full((4, 6), expected), rtol=1e-6)
        np.testing.assert_allclose(result["matrix"], np.full((4, 16, 12), expected), rtol=1e-5)


def test_with_nobody_to_send_to_it_is_exact_and_sends_what_was_kept():
    mesh = mesh_of(1, 4)
    loop = Loop(mesh, sync.all_reduce(mesh, codec="sign", error_feedback=True), SHAPES)
    waiting = jax.tree.map(jnp.ones_like, loop.state.by_shard)
    loop.state = loop.state._replace(by_shard=jax.tree.map(jax.device_put, waiting, _places(loop.state.by_shard)))
    tree = contributions(4, SHAPES)
    result = loop(tree)
    for name in SHAPES:
        np.testing.assert_allclose(result[name][0], tree[name].mean(axis=0) + 1, rtol=0, atol=1e-6)
    assert not any(np.any(residual) for residual in kept(loop.state).values())


def _places(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


CONTAINERS = {
    "chain": lambda inner: optax.chain(inner, optax.scale(2.0)),
    "masked": lambda inner: optax.masked(inner, {"matrix": True, "odd": False, "bias": True, "scale": True}),
    "multi_transform": lambda inner: optax.multi_transform(
        {"ours": inner, "zero": optax.set_to_zero()},
        {"matrix": "ours", "odd": "zero", "bias": "ours", "scale": "ours"},
    ),
}


@pytest.mark.parametrize("codec", ["int8", pytest.param("topk", marks=pytest.mark.slow)])
def test_inside_optax_containers_it_is_the_same(codec):
    mesh = mesh_of(2, 2)
    inner = sync.all_reduce(mesh, codec=codec, bucket_mib=1e-6, **FEEDBACK)
    loops = {name: Loop(mesh, wrap(inner), SHAPES) for name, wrap in CONTAINERS.items()}
    for step in range(2):
        tree = contributions(4, SHAPES, step)
        results = {name: loop(tree) for name, loop in loops.items()}
    np.testing.assert_array_equal(results["masked"]["odd"], tree["odd"])
    assert not results["multi_transform"]["odd"].any()
    for name in ("masked", "multi_transform"):
        np.testing.assert_allclose(results[name]["matrix"], results["chain"]["matrix"] / 2, rtol=0, atol=1e-5)
        assert sync.num_owners(loops[name].state) == 2


@pytest.mark.parametrize(("before", "after"), [((4, 2), (2, 4)), pytest.param((2, 4), (4, 2), marks=pytest.mark.slow)])
def test_a_linear_codec_goes_on_unchanged_on_another_number_of_nodes(before, after):
    loops = [Loop(mesh_of(*shape), _powersgd(mesh_of(*shape)), SHAPES) for shape in (before, after)]
    for step in range(3):
        loops[0](contributions(8, SHAPES, step))
    resized = sync.resize(jax.device_get(loops[0].state), after[0])
    loops[1].state = jax.tree.map(jax.device_put, resized, _places(loops[1].state))
    for step in range(3, 6):
        unresized, result = (loop(contributions(8, SHAPES, step)) for loop in loops)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-6), result, unresized)


def _powersgd(mesh):
    return sync.all_reduce(mesh, codec="powersgd", codec_args={"rank": 2}, error_feedback=True)


def test_random_choices_change_from_step_to_step_and_with_the_seed():
    mesh = mesh_of(2, 1)
    tree = {"w": np.ones((2, 100), np.float32)}
    chosen = []
    for seed in (0, 0, 1):
        arguments = {"codec": "randomk", "codec_args": {"ratio": 0.05}, "seed": seed}
        loop = Loop(mesh, sync.all_reduce(mesh, **arguments), {"w": (100,)})
        chosen.append([np.flatnonzero(loop(tree)["w"][0]).tolist() for _ in range(2)])
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0][0] != chosen[0][1]
    assert loop.state.by_shard == ()


def test_half_precision_leaves_come_back_as_they_were():
    mesh = mesh_of(2, 2)
    tree = {"w": jnp.full((4, 8), 20000, jnp.float16)}
    result = exchanged(mesh, sync.all_reduce(mesh, codec="int8"), tree)
    assert result["w"].dtype == jnp.float16
    np.testing.assert_array_equal(result["w"], tree["w"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codec": "int7"}, "did you mean 'int8'|int8"),
        ({"codec": "topk", "codec_args": {"ratoi": 0.1}}, "ratio"),
        ({"codec": "topk", "codec_args": {"ratio": 2.0}}, r"sync.args.ratio = 2.0"),
        ({"codec": "int8", "compress": "fast"}, "sync.compress = 'fast': choose 'slow' or 'all'"),
        ({"codec": "int8", "algorithm": "ring"}, "sync.compress = 'slow' choose one of auto, hierarchical"),
        ({"codec": "int8", "algorithm": "central", "compress": "all"}, "choose one of auto, xla, ring, tree"),
        ({"codec": "int8", "across": "tree", "compress": "all"}, "sync.across = 'tree'"),
        ({"codec": "int8", "warmup_steps": -1}, "sync.warmup_steps = -1"),
        ({"codec": "int8", "momentum_correction": 1.0, "error_feedback": True}, "sync.momentum_correction = 1.0"),
        ({"codec": "topk", "momentum_correction": 0.9}, "needs error feedback"),
        ({"codec": CODECS["halves"](), "codec_args": {"x": 1}}, "codec_args are for a codec given by its name"),
        ({"codec_args": {"rank": 1}}, "sync.args: sync.codec = 'none' would ignore it"),
        ({"error_feedback": True}, "sync.error_feedback: sync.codec = 'none' would ignore it"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(SettingsRefused, match=message) as caught:
        sync.all_reduce(mesh_of(2, 2), **arguments)
    assert "\n" not in str(caught.value)


def test_a_state_that_is_not_one_owners_is_refused():
    mesh = mesh_of(2, 2)
    transform = sync.all_reduce(mesh, codec="int8", error_feedback=True)
    state = transform.init({"w": jnp.zeros(8)})
    rows = PartitionSpec(AXES)
    body = jax.shard_map(
        lambda x, state: transform.update({"w": x[0]}, state)[0]["w"][None],
        mesh=mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=rows,
        check_vma=False,
    )
    with pytest.raises(SettingsRefused, match=r"shape \(2, 8\) where one owner's has \(1, 8\).*call init inside"):
        jax.eval_shape(body, jnp.zeros((4, 8)), state)
    with pytest.raises(SettingsRefused, match=r"made for another codec"):
        jax.eval_shape(body, jnp.zeros((4, 8)), sync.SyncState())
    with pytest.raises(SettingsRefused, match="cannot know how many owners"):
        sync.all_reduce(axes="replica", codec="int8").init({"w": jnp.zeros(8)})
