"""Every codec against a naive NumPy version of the same exchange."""

import jax
import ml_dtypes
import numpy as np
import pytest
from members import exchange, states_of

from trainer.sync.codecs import build
from trainer.sync.codecs.powersgd import orthonormal
from trainer.sync.ring import UNROLL_LIMIT


def bf16(value):
    return value.astype(ml_dtypes.bfloat16).astype(np.float32)


def by_block(function, block_size):
    """Applies a function to each block of a vector by itself."""

    def apply(value):
        blocks = [value[start : start + block_size] for start in range(0, len(value), block_size)]
        return np.concatenate([function(block) for block in blocks]) if blocks else value

    return apply


def fp16(block):
    power = 2.0 ** (np.floor(np.log2(np.abs(block).max())) - 13)
    return ((block / power).astype(np.float16).astype(np.float64) * power).astype(np.float32)


def integers(top):
    def apply(block):
        scale = np.float32(np.abs(block).max() / np.float32(top))
        return np.round(block / scale).astype(np.float32) * scale

    return apply


def sign(block):
    return np.where(block < 0, -1, 1).astype(np.float32) * np.abs(block).mean()


def topk(value):
    flat = value.reshape(-1)
    order = sorted(range(flat.size), key=lambda index: (-abs(flat[index]), index))
    kept = np.zeros_like(flat)
    for index in order[: max(1, round(0.05 * flat.size))]:
        kept[index] = flat[index]
    return kept.reshape(value.shape)


def reencoded(values, round_trip):
    """(totals, sent): everybody's code of each part to its owner, whose sum is encoded once more for all."""
    size, length = values.shape
    padded = np.pad(values, ((0, 0), (0, -length % size)), mode="edge")
    sent, totals = [np.split(row, size) for row in padded], []
    sent = [[round_trip(part) for part in parts] for parts in sent]
    for owner in range(size):
        summed = np.sum([parts[owner] for parts in sent], axis=0, dtype=np.float32)
        totals.append(round_trip(summed))
        sent[owner][owner] = sent[owner][owner] + totals[-1] - summed
    return np.concatenate(totals)[:length], np.stack([np.concatenate(parts)[:length] for parts in sent])


@pytest.mark.parametrize(
    ("name", "args", "round_trip"),
    [
        ("bf16", {}, bf16),
        ("fp16", {"block_size": 32}, by_block(fp16, 32)),
        ("int8", {"block_size": 32}, by_block(integers(127), 32)),
        ("int4", {"block_size": 32}, by_block(integers(7), 32)),
        ("sign", {"block_size": 32}, by_block(sign, 32)),
    ],
)
@pytest.mark.parametrize("members", [4, UNROLL_LIMIT + 2])
def test_codes_that_are_added_up_by_each_parts_owner(name, args, round_trip, members):
    values = np.random.default_rng(0).normal(size=(members, 97)).astype(np.float32)
    (total,), (sent,), _ = exchange(build(name, args), [values])
    expected_total, expected_sent = reencoded(values, round_trip)
    np.testing.assert_allclose(total, expected_total, atol=1e-5)
    np.testing.assert_allclose(sent, expected_sent, atol=1e-5)


def test_topk_adds_up_what_each_member_chose():
    values = np.random.default_rng(0).normal(size=(3, 9, 11)).astype(np.float32)
    values[:, 3:] = np.round(values[:, 3:])  # with ties
    (total,), (sent,), _ = exchange(build("topk", {"ratio": 0.05}), [values])
    np.testing.assert_array_equal(sent, np.stack([topk(value) for value in values]))
    np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-6)


def test_randomk_sends_the_same_places_of_all_members():
    values = np.random.default_rng(0).normal(size=(3, 95)).astype(np.float32)
    (total,), (sent,), _ = exchange(build("randomk", {"ratio": 0.1}), [values])
    chosen = total != 0
    assert chosen.sum() == round(9.5)
    np.testing.assert_array_equal(sent, np.where(chosen, values, 0))
    np.testing.assert_allclose(total, np.where(chosen, values.sum(axis=0), 0), rtol=1e-5)


@pytest.mark.parametrize("given", ["independent", "huge", "tiny", "dependent", "zero", "one zero", "not finite"])
def test_factors_become_orthonormal_and_keep_what_they_span(given):
    """Two matrices at once; in the second, all but the first three cases have columns that a random one replaces."""
    matrices = np.random.default_rng(0).normal(size=(2, 12, 3)).astype(np.float32)
    matrices *= {"huge": 1e30, "tiny": 1e-30}.get(given, 1)
    matrices[1] *= given != "zero"
    if given == "dependent":
        matrices[1, :, 1] = -3 * matrices[1, :, 0]
    if given in ("one zero", "not finite"):
        matrices[1, :, 1] = 0 if given == "one zero" else np.nan
    program = jax.jit(orthonormal)
    found, other = (np.asarray(program(matrices, jax.random.key(seed)), np.float64) for seed in range(2))
    assert np.array_equal(found, other) == (given in ("independent", "huge", "tiny"))  # else something was drawn
    for columns, before in zip(found, matrices.astype(np.float64), strict=True):
        np.testing.assert_allclose(columns.T @ columns, np.eye(3), rtol=0, atol=1e-5)
        for index in () if given == "zero" and not before.any() else (0, 2) if given == "not finite" else range(3):
            first = columns[:, : index + 1]
            lost = before[:, index] - first @ (first.T @ before[:, index])
            assert np.linalg.norm(lost) <= 1e-5 * np.linalg.norm(before[:, index])


def test_powersgd_is_a_power_iteration_with_a_warm_start():
    codec, generator = build("powersgd", {"rank": 2}), np.random.default_rng(0)
    states = states_of(codec, [(8, 6)])
    right = np.asarray(states[0], np.float64)
    for _ in range(4):
        values = generator.normal(size=(3, 8, 6)).astype(np.float32)
        (total,), (sent,), states = exchange(codec, [values], states)
        left, _ = np.linalg.qr(values.astype(np.float64).sum(axis=0) @ right)
        mine = [value.T @ left for value in values]
        right = sum(mine)
        np.testing.assert_allclose(sent, np.stack([left @ factor.T for factor in mine]), atol=2e-5)
        np.testing.assert_allclose(total, left @ right.T, atol=2e-5)
