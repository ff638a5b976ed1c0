"""Weighted-sum losses against plain NumPy, and what padding and bad values may and may not do to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import correct_sum, cross_entropy_sum


def naive_cross_entropy(logits, labels, weight, smoothing):
    """One row at a time, in float64."""
    total = 0.0
    for row, label, row_weight in zip(logits.astype(np.float64), labels, weight, strict=True):
        log_share = row - row.max() - np.log(np.exp(row - row.max()).sum())
        target = np.full(row.shape, smoothing / row.size)
        target[label] += 1 - smoothing
        total -= row_weight * (target * log_share).sum()
    return total


def example(rows=7, classes=5):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 30, (rows, classes)).astype(np.float32)
    return logits, rng.integers(0, classes, rows).astype(np.int32), (np.arange(rows) % 3 > 0).astype(np.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_equals_naive_sum(smoothing, rows):
    logits, labels, weight = example(rows)
    loss, total = cross_entropy_sum(logits, labels, weight, label_smoothing=smoothing)
    assert loss.dtype == total.dtype == jnp.float32
    # float32 logits of size 30: measured 1e-7 relative.
    np.testing.assert_allclose(loss, naive_cross_entropy(logits, labels, weight, smoothing), rtol=1e-6)
    assert total == weight.sum()


def test_positions_are_summed_like_rows():
    logits, labels, weight = example(6)
    flat = cross_entropy_sum(logits, labels, weight)
    shaped = cross_entropy_sum(logits.reshape(2, 3, 5), labels.reshape(2, 3), weight.reshape(2, 3))
    np.testing.assert_allclose(flat, shaped, rtol=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits = jnp.zeros((1000, 2), jnp.bfloat16)
    loss, weight = cross_entropy_sum(logits, jnp.zeros(1000, jnp.int32), jnp.ones(1000))
    assert loss.dtype == jnp.float32
    assert weight == 1000
    np.testing.assert_allclose(loss, 1000 * np.log(2), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_padding_of_any_content_changes_neither_loss_nor_gradient(bad):
    logits, labels, weight = example()
    spoiled, wrong = logits.copy(), labels.copy()
    spoiled[weight == 0], wrong[weight == 0] = bad, -1

    def loss(logits, labels):
        return cross_entropy_sum(logits, labels, weight, label_smoothing=0.1)[0]

    clean, gradient = jax.value_and_grad(loss)(logits, labels)
    same, same_gradient = jax.value_and_grad(loss)(spoiled, wrong)
    assert same == clean
    np.testing.assert_array_equal(same_gradient, gradient)
    assert not np.asarray(gradient)[weight == 0].any()


def test_nan_in_a_real_row_stays_visible():
    logits, labels, weight = example()
    logits[1, 0] = np.nan
    assert weight[1] == 1
    assert np.isnan(cross_entropy_sum(logits, labels, weight)[0])


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_out_of_range_is_nan(label):
    logits, labels, weight = example(classes=5)
    labels[1] = label
    assert np.isnan(cross_entropy_sum(logits, labels, weight)[0])


def test_sums_add_before_they_divide():
    """Two parts with loss sums 2 over weight 1 and 90 over weight 9 have mean 9.2, not 6."""

    def logits_with_loss(loss, rows):
        return jnp.tile(jnp.array([-jnp.log(jnp.expm1(loss)), 0.0]), (rows, 1))

    parts = [
        cross_entropy_sum(logits_with_loss(loss, rows), jnp.zeros(rows, jnp.int32), jnp.ones(rows))
        for loss, rows in ((2.0, 1), (10.0, 9))
    ]
    assert [float(weight) for _, weight in parts] == [1, 9]
    np.testing.assert_allclose([loss for loss, _ in parts], [2, 90], rtol=1e-6)
    np.testing.assert_allclose(sum(loss for loss, _ in parts) / sum(weight for _, weight in parts), 9.2, rtol=1e-6)


def test_correct_sum_counts_weighted_hits():
    logits, labels, weight = example(20)
    hits = (logits.argmax(1) == labels).astype(np.float32)
    assert 0 < (hits * weight).sum() < weight.sum()
    assert correct_sum(logits, labels, weight) == ((hits * weight).sum(), weight.sum())
