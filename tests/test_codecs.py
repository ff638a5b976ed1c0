"""The contract that every codec keeps: bounds, conservation, recovery, identical bits, bytes, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from members import AXIS, Members, bytes_sent, exchange, round_trip, states_of

from trainer.errors import SettingsRefused
from trainer.sync.codecs import CODECS, build

VARIANTS = [
    ("bf16", {}),
    ("fp16", {"block_size": 16}),
    ("int8", {"block_size": 16}),
    ("int8", {"block_size": 16, "rounding": "stochastic"}),
    ("int4", {"block_size": 16}),
    ("int4", {"block_size": 16, "rounding": "stochastic"}),
    ("sign", {"block_size": 16}),
    ("topk", {"ratio": 0.1}),
    ("randomk", {"ratio": 0.1}),
    ("powersgd", {"rank": 2}),
]
REPRESENTATIVES = [("bf16", {}), ("int4", {"block_size": 16}), ("topk", {"ratio": 0.1}), ("powersgd", {"rank": 2})]
"""One of each kind of exchange, where compiling all of them takes long."""
VECTORS = [(0,), (1,), (15,), (16,), (17,), (33,)]
SHARED_VECTORS = [(0,), (1,), (47,), (50,)]
"""Of three members' parts of these one is a block long, and one longer."""
LEAVES = [(), (0, 3), (2, 2), (3, 3, 4, 8)]
MATRICES = [(1, 5), (9, 6), (3, 3, 4, 8)]


def named(variant):
    name, args = variant
    return "-".join([name, *map(str, args.values())])


@functools.cache
def _built(name, args):
    return build(name, dict(args))


def built(name, **args):
    """The same codec each time, so that its programs are compiled once."""
    return _built(name, tuple(args.items()))


@pytest.fixture(params=VARIANTS, ids=named)
def codec(request):
    name, args = request.param
    return built(name, **args)


def shapes_of(codec, size):
    if codec.unit == "element":
        return VECTORS if size == 1 else SHARED_VECTORS
    return MATRICES if codec.name == "powersgd" else LEAVES


def random_values(codec, size, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(size, *shape)).astype(np.float32) for shape in shapes_of(codec, size)]


def blocks(value, block_size=16):
    return [value[start : start + block_size] for start in range(0, len(value), block_size)]


def test_the_table_has_every_codec():
    assert list(CODECS) == list(dict.fromkeys(name for name, _ in VARIANTS))
    for name in CODECS:
        assert build(name).name == name


# What each codec states about decode(encode(x)) - x: whether it holds for a block, vector or leaf x with this error.
BOUNDS = {
    "bf16": lambda x, error: np.all(np.abs(error) <= np.abs(x) / 2**8),
    "fp16-16": lambda x, error: np.all(np.abs(error) <= np.maximum(np.abs(x) / 2**11, np.abs(x).max() / 2**27)),
    "int8-16": lambda x, error: np.all(np.abs(error) <= np.abs(x).max() / 127 * 0.50001),
    "int8-16-stochastic": lambda x, error: np.all(np.abs(error) <= np.abs(x).max() / 127 * 1.00001),
    "int4-16": lambda x, error: np.all(np.abs(error) <= np.abs(x).max() / 7 * 0.50001),
    "int4-16-stochastic": lambda x, error: np.all(np.abs(error) <= np.abs(x).max() / 7 * 1.00001),
    "sign-16": lambda x, error: np.isclose(
        np.sum(error**2), np.sum(x**2) - np.sum(np.abs(x)) ** 2 / x.size, rtol=1e-5, atol=1e-9
    ),
    "topk-0.1": lambda x, error: np.sum(error**2) <= (1 - max(1, round(0.1 * x.size)) / x.size) * np.sum(x**2) + 1e-9,
    "randomk-0.1": lambda x, error: np.sum(error**2) <= np.sum(x**2),
    "powersgd-2": lambda x, error: np.sum(error**2) <= np.sum(x**2) + 1e-9,
}


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_what_comes_back_is_within_the_stated_bound(variant, scale):
    codec = built(variant[0], **variant[1])
    values = [scale * value for value in random_values(codec, 1)]
    totals, _, _ = exchange(codec, values)
    for value, total in zip(values, totals, strict=True):
        if value.size == 0:
            continue
        pieces = (
            zip(blocks(value[0]), blocks(total), strict=True) if named(variant)[-2:] == "16" else [(value[0], total)]
        )
        for x, decoded in pieces:
            x, error = x.astype(np.float64) / scale, (decoded.astype(np.float64) - x) / scale
            assert BOUNDS[named(variant)](x, error), (x, error)


def assert_shares_add_up(totals, sent, values):
    for total, shares, value in zip(totals, sent, values, strict=True):
        assert total.shape == shares.shape[1:] == value.shape[1:]
        np.testing.assert_allclose(shares.sum(axis=0), total, rtol=0, atol=5e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_shares_add_up_to_totals_that_are_the_same_everywhere(codec, size):
    values = random_values(codec, size)
    totals, sent, _ = exchange(codec, values)
    assert_shares_add_up(totals, sent, values)


@pytest.mark.parametrize(
    "variant",
    [each if each in REPRESENTATIVES else pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS],
    ids=named,
)
def test_shares_add_up_between_devices_too(variant):
    codec, size = built(variant[0], **variant[1]), 2
    shapes = shapes_of(codec, size)
    values, states, key = random_values(codec, size), states_of(codec, shapes), jax.random.key(0)
    mesh, rows = Mesh(np.array(jax.devices()[:size]), (AXIS,)), PartitionSpec(AXIS)

    def body(values):
        done = codec.exchange([value[0] for value in values], states, key, Members(size))
        return jax.tree.map(lambda leaf: leaf[None], (done.totals, done.sent, done.states))

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    totals, sent, after = jax.device_get(run(values))
    for leaf in jax.tree.leaves((totals, after)):
        assert all(row.tobytes() == leaf[0].tobytes() for row in leaf), "members differ"
    assert_shares_add_up([total[0] for total in totals], sent, values)


@pytest.mark.parametrize("size", [1, 3])
def test_with_error_feedback_nothing_is_lost_in_twenty_steps(codec, size):
    shapes = shapes_of(codec, size)
    residuals = [np.zeros((size, *shape), np.float32) for shape in shapes]
    states = states_of(codec, shapes)
    contributed, total_sum = [0.0] * len(shapes), [0.0] * len(shapes)
    for step in range(20):
        values = random_values(codec, size, seed=step)
        to_send = [value + residual for value, residual in zip(values, residuals, strict=True)]
        totals, sent, states = exchange(codec, to_send, states, seed=step)
        residuals = [one - share for one, share in zip(to_send, sent, strict=True)]
        contributed = [a + value.sum(axis=0) for a, value in zip(contributed, values, strict=True)]
        total_sum = [a + total for a, total in zip(total_sum, totals, strict=True)]
    for contribution, total, residual in zip(contributed, total_sum, residuals, strict=True):
        # Measured: at most 4e-6 of the largest number that is added up.
        bound = 1e-5 * max(1.0, np.abs(residual).max(initial=0.0))
        np.testing.assert_allclose(total + residual.sum(axis=0), contribution, rtol=0, atol=bound)


@pytest.mark.parametrize("size", [1, 3])
def test_zero_stays_exactly_zero_and_the_next_value_gets_through(codec, size):
    zeros = [np.zeros_like(value) for value in random_values(codec, size)]
    totals, sent, states = exchange(codec, zeros)
    assert not any(np.any(array) for array in (*totals, *sent))
    totals, _, states = exchange(codec, random_values(codec, size), states)
    assert all(np.any(total) for total in totals if total.size)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(states))


def test_the_same_is_sent_each_time_and_another_key_draws_anew(codec):
    values = random_values(codec, 3)
    once, again, other = (exchange(codec, values, seed=seed) for seed in (1, 1, 2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True))
    draws = codec.name == "randomk" or (codec.name in ("int8", "int4") and len(codec_args(codec)) == 2)
    differs = any(np.any(a != b) for a, b in zip(once[0], other[0], strict=True))
    assert differs == draws


@pytest.mark.parametrize(("name", "args"), [*REPRESENTATIVES, ("int8", {"block_size": 16, "rounding": "stochastic"})])
def test_members_that_were_seeded_differently_hold_the_same_bits(name, args):
    """Their own random numbers, and states of their own; randomk alone has to have one seed, and says so."""
    codec, generator = built(name, **args), np.random.default_rng(1)
    values, keys = random_values(codec, 3), jax.random.split(jax.random.key(0), 3)

    def member(values, states, key):
        done = codec.exchange(values, states, key, Members(3))
        return done[0], done[2]

    run = jax.jit(jax.vmap(member, axis_name=AXIS))
    one = states_of(codec, [value.shape[1:] for value in values])
    states = jax.tree.map(lambda leaf: generator.normal(size=(3, *leaf.shape)).astype(leaf.dtype), one)
    for _ in range(2):
        totals, states = run(values, states, keys)
        for total in totals:
            assert all(row.tobytes() == total[0].tobytes() for row in np.asarray(total))


def codec_args(codec):
    return next(args for name, args in VARIANTS if built(name, **args) is codec)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_come_back_finite(codec, bad):
    values = random_values(codec, 3)
    for value in values:
        value.reshape(3, -1)[1, -1:] = bad
    totals, _, states = exchange(codec, values)
    positions_are_chosen_blindly = codec.name == "randomk"
    for total in totals:
        assert total.size == 0 or positions_are_chosen_blindly or not np.all(np.isfinite(total))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(states))


# Recovery: a codec that keeps every account can still be useless.


@pytest.mark.parametrize(("shape", "matrix"), [((20, 12), (20, 12)), ((3, 3, 4, 40), (36, 40)), ((6, 2, 4), (6, 8))])
def test_powersgd_returns_a_matrix_of_its_rank_exactly(shape, matrix):
    codec, generator = built("powersgd", rank=3), np.random.default_rng(0)
    left, right = generator.normal(size=(matrix[0], 3)), generator.normal(size=(2, 3, matrix[1]))
    values = (left @ right).reshape(2, *shape).astype(np.float32)
    states = None
    for _ in range(3):
        (total,), (sent,), states = exchange(codec, [values], states)
        assert (
            distance(total, values.sum(axis=0)) < 5e-6
        )  # measured: 3e-6 at the first step, whose directions are random
        assert distance(sent, values) < 5e-6


def distance(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def test_powersgd_returns_a_matrix_of_lower_rank_and_then_one_of_its_rank():
    codec, generator = built("powersgd", rank=3), np.random.default_rng(0)
    states = None
    for rank in (1, 2, 3, 3):
        value = (generator.normal(size=(1, 20, rank)) @ generator.normal(size=(rank, 12))).astype(np.float32)
        (total,), _, states = exchange(codec, [value], states)
        assert distance(total, value[0]) < 5e-6


def test_powersgd_follows_the_largest_directions():
    codec, generator = built("powersgd", rank=2), np.random.default_rng(0)
    u, s, v = np.linalg.svd(generator.normal(size=(20, 12)), full_matrices=False)
    s[2:] *= 0.3
    value = ((u * s) @ v).astype(np.float32)
    states = None
    for _ in range(8):
        (total,), _, states = exchange(codec, [value[None]], states)
    best = np.sqrt(np.sum(s[2:] ** 2))
    assert np.linalg.norm(value - total) < 1.001 * best


@pytest.mark.parametrize("rank", [5, 100])
def test_a_rank_above_the_smaller_side_loses_nothing(rank):
    value = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    np.testing.assert_allclose(round_trip(built("powersgd", rank=rank), value), value, atol=1e-5)


def test_powersgd_is_not_used_where_it_saves_nothing():
    applies = built("powersgd", rank=4).applies
    assert applies((16, 16))
    assert applies((3, 3, 16, 32))
    assert not any(applies(shape) for shape in [(), (1000,), (1000, 1), (1, 1000), (0, 5), (8, 8), (4, 1000)])


def test_powersgd_cuts_attention_kernels_where_they_are_squarest():
    assert jax.eval_shape(lambda: built("powersgd", rank=1).init((64, 4, 16))).shape == (64, 1)
    assert jax.eval_shape(lambda: built("powersgd", rank=1).init((4, 16, 64))).shape == (64, 1)
    assert jax.eval_shape(lambda: built("powersgd", rank=1).init((3, 3, 16, 32))).shape == (32, 1)


def test_topk_returns_a_sparse_leaf_exactly():
    value = np.zeros(100, np.float32)
    value[[3, 50, 51, 99]] = [1e-20, -2.5, 1e20, 3.0]
    np.testing.assert_array_equal(round_trip(built("topk", ratio=0.04), value.reshape(4, 25)).reshape(-1), value)


@pytest.mark.parametrize(
    ("value", "ratio", "expected"),
    [
        ([-5, 1, 2, 0], 0.25, [-5, 0, 0, 0]),
        ([1, 1, 1, 1], 0.5, [1, 1, 0, 0]),
        ([0, -1, 1, -1], 0.5, [0, -1, 1, 0]),
        ([3, 4], 1.0, [3, 4]),
        ([7], 1.0, [7]),
        ([2, 3, 1], 0.001, [0, 3, 0]),
    ],
)
def test_topk_sends_exactly_k(value, ratio, expected):
    assert round_trip(built("topk", ratio=ratio), value).tolist() == expected


@pytest.mark.parametrize("length", [256, 257, 65536, 65537])
def test_topk_finds_the_last_position_however_it_is_written(length):
    value = np.zeros(length, np.float32)
    value[-1] = 1
    np.testing.assert_array_equal(round_trip(built("topk", ratio=1e-6), value), value)


def test_topk_leaves_alone_what_would_not_get_smaller():
    applies = built("topk").applies
    assert applies((2,))
    assert applies((100, 100))
    assert not any(applies(shape) for shape in [(), (1,), (0,), (0, 4)])
    assert not any(built("topk", ratio=1.0).applies(shape) for shape in [(10,), (1000, 1000)])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_sign_returns_two_levels_exactly(length):
    bits = np.random.default_rng(0).integers(2, size=length) * 2 - 1
    levels = np.repeat(np.float32([0.1, 0.0, 3e-3]), 16)[:length]
    np.testing.assert_array_equal(round_trip(built("sign", block_size=16), levels * bits), levels * bits)


@pytest.mark.parametrize("size", [2, 3])
def test_sign_adds_up_two_levels_exactly_if_all_agree(size):
    """Also where the members' parts are not equally long."""
    value = np.float32(0.3) * np.random.default_rng(0).choice([-1, 1], size=37).astype(np.float32)
    (total,), _, _ = exchange(built("sign"), [np.stack([value] * size)])
    np.testing.assert_allclose(total, size * value, rtol=1e-6)


@pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("step", [1.0, 0.125, 2.0**-100])
def test_integers_return_a_grid_exactly(name, top, rounding, step):
    value = np.arange(-top, top + 1).astype(np.float32) * np.float32(step)
    np.testing.assert_array_equal(round_trip(built(name, rounding=rounding), value), value)


def test_stochastic_rounding_is_right_on_average():
    value = np.linspace(-1, 1, 16, dtype=np.float32)
    many = np.tile(value, 1000)
    mean = round_trip(built("int4", block_size=16, rounding="stochastic"), many).reshape(1000, 16).mean(axis=0)
    # Six standard errors of a rounding to steps of 1/7.
    np.testing.assert_allclose(mean, value, atol=6 * 0.5 / 7 / np.sqrt(1000))
    assert np.abs(round_trip(built("int4", block_size=16), value) - value).max() > 0.05


@pytest.mark.parametrize(
    "block",
    [[0.0] * 16, [5e-3] * 16, [-1e-38] * 16, [1e-45] * 16, [3e38] * 16, [-3e38] + [1e-38] * 15, [1e30] + [1.0] * 15],
    ids=["zero", "constant", "tiny", "subnormal", "huge", "wide", "outlier"],
)
@pytest.mark.parametrize("variant", [each for each in VARIANTS if each[0] not in ("topk", "powersgd")], ids=named)
def test_odd_blocks_stay_finite_and_do_not_grow(variant, block):
    value = np.float32(block)
    decoded = round_trip(built(variant[0], **variant[1]), value)
    assert np.all(np.isfinite(decoded))
    assert np.abs(decoded).max() <= np.abs(value).max() * (1 + 2**-8)


def test_fp16_keeps_what_a_plain_float16_would_lose():
    value = np.float32([1e-12, 3e-12, -2e-13, 0] * 4 + [1e12, 7e11, -5e10, 1e6] * 4)
    decoded = round_trip(built("fp16", block_size=16), value)
    np.testing.assert_allclose(decoded, value, rtol=2**-11)


def test_bf16_breaks_ties_to_even():
    value = np.float32([64.75, 64.25, 1.00390625, 1.01171875])
    assert round_trip(built("bf16"), value).tolist() == [65.0, 64.0, 1.0, 1.015625]


@pytest.mark.parametrize("length", [1, 11, 99])
def test_randomk_chooses_one_of_each_stretch_with_equal_chances(length):
    codec, value = built("randomk", ratio=0.1), np.ones(length, np.float32)
    count = max(1, round(0.1 * length))
    chosen = np.array([round_trip(codec, value, seed) for seed in range(30)])
    assert np.all(chosen.sum(axis=1) == count)
    assert set(np.unique(chosen)) <= {0.0, 1.0}
    assert all(stretch.sum(axis=1).tolist() == [1] * 30 for stretch in np.array_split(chosen, count, axis=1))
    # Binomial: more than seven standard deviations above the mean is no accident.
    mean = 30 * count / length
    assert chosen.sum(axis=0).max() <= mean + 7 * np.sqrt(mean)


# Bytes, counted from what is given to the wire.

RATIOS = {"bf16": 1.99, "fp16": 1.99, "int8": 3.9, "int4": 7.5, "sign": 30, "topk": 45, "randomk": 99, "powersgd": 60}


def exact_bytes(shapes, size):
    return 2 * (size - 1) / size * 4 * sum(int(np.prod(shape)) for shape in shapes)


@pytest.mark.parametrize("name", CODECS)
def test_the_wire_carries_that_many_times_less(name):
    codec = build(name)
    shapes = [(1_000_003,)] if codec.unit == "element" else [(1000, 1000), (512, 512), (3, 3, 64, 64)]
    assert exact_bytes(shapes, 2) / bytes_sent(codec, shapes, 2) >= RATIOS[name]
    ratios = [exact_bytes(shapes, size) / bytes_sent(codec, shapes, size) for size in (2, 8)]
    if name == "topk":  # everybody gets everybody's
        np.testing.assert_allclose(ratios, ratios[0] / np.array([1, 4]), rtol=1e-6)
    else:
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-2)


def test_half_bytes_are_really_packed():
    codec = build("int4", {"block_size": 8})
    assert bytes_sent(codec, [(2 * 21,)], 2) == 2 * (11 + 3 * 4)
    assert bytes_sent(build("sign", {"block_size": 8}), [(2 * 21,)], 2) == 2 * (3 + 3 * 4)


def test_powersgd_sends_all_of_a_bucket_in_two_messages():
    wire = Members(2)
    codec, shapes = build("powersgd"), [(20, 30), (40, 50), (3, 3, 8, 16)]

    def member(values):
        return codec.exchange(values, states_of(codec, shapes), jax.random.key(0), wire)

    jax.eval_shape(
        jax.vmap(member, axis_name=AXIS), [jax.ShapeDtypeStruct((2, *shape), jnp.float32) for shape in shapes]
    )
    assert wire.num_bytes == [4 * 4 * (20 + 40 + 72), 4 * 4 * (30 + 50 + 16)]


# Refusals.


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("int9", {}, "sync.codec = 'int9': there is no such codec; did you mean 'int8'?; known are bf16, fp16"),
        ("int8", {"block": 3}, "sync.args.block: int8 accepts no such keyword; did you mean 'block_size'?"),
        ("bf16", {"block_size": 64}, "sync.args.block_size: bf16 accepts no such keyword; it accepts none"),
        ("int8", {"block_size": 0}, "sync.args.block_size = 0: must be from 8 to 1048576"),
        ("sign", {"block_size": 7}, "sync.args.block_size = 7: must be from 8 to 1048576"),
        ("int4", {"block_size": 2.5}, "sync.args.block_size = 2.5: "),
        ("int8", {"rounding": "up"}, "sync.args.rounding = 'up': Input should be 'nearest' or 'stochastic'"),
        ("topk", {"ratio": 0.0}, "sync.args.ratio = 0.0: must be above 0 and at most 1"),
        ("topk", {"ratio": 1.01}, "sync.args.ratio = 1.01: must be above 0 and at most 1"),
        ("randomk", {"ratio": float("nan")}, "sync.args.ratio = nan: must be above 0 and at most 1"),
        ("topk", {"ratio": "1%"}, "sync.args.ratio = '1%': "),
        ("powersgd", {"rank": 0}, "sync.args.rank = 0: must be 1 or more"),
        ("powersgd", {"rank": True}, "sync.args.rank = True: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, args, message):
    with pytest.raises(SettingsRefused) as caught:
        build(name, args)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "args"), [("int8", {"block_size": 0}), ("topk", {"ratio": 2}), ("powersgd", {"rank": 0})]
)
def test_a_direct_call_is_checked_as_well(name, args):
    with pytest.raises(SettingsRefused):
        CODECS[name](**args)
