"""Leaves <-> buckets: every element travels exactly once, large leaves alone, small ones together, last ones first."""

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.sync import buckets

SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0), (64,), (13,), (100,), (2, 2, 2)]


@pytest.mark.parametrize("bucket_bytes", [0, 1, 4, 31, 32, 33, 100, 200, 10_000])
def test_every_leaf_with_elements_is_in_one_bucket(bucket_bytes):
    plan = buckets.plan(SHAPES, bucket_bytes)
    indices = [index for bucket in plan for index in bucket]
    assert sorted(indices) == [index for index, shape in enumerate(SHAPES) if np.prod(shape) > 0]
    sizes = [sum(4 * int(np.prod(SHAPES[index])) for index in bucket) for bucket in plan]
    assert all(size <= bucket_bytes for size, bucket in zip(sizes, plan, strict=True) if len(bucket) > 1)
    assert all(list(bucket) == sorted(bucket, reverse=True) for bucket in plan)


@pytest.mark.parametrize(("length", "plan"), [(4, [(2, 1, 0)]), (5, [(2,), (1,), (0,)])])
def test_a_leaf_of_half_a_bucket_goes_alone(length, plan):
    assert buckets.plan([(length,)] * 3, bucket_bytes=48 if length == 4 else 40) == plan


def test_full_buckets_are_sent_before_all_leaves_are_there():
    assert buckets.plan([(3,)] * 5, bucket_bytes=30) == [(4, 3), (2, 1), (0,)]


def test_no_leaves_no_buckets():
    assert buckets.plan([], 100) == []
    assert buckets.plan([(0,), (3, 0)], 100) == []


def test_unpack_undoes_pack():
    leaves = [jnp.arange(6.0).reshape(2, 3), jnp.float32(7), jnp.asarray([1.5, 2.5], jnp.bfloat16)]
    vector = buckets.pack(leaves)
    assert vector.dtype == jnp.float32
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 1.5, 2.5]
    for leaf, back in zip(leaves, buckets.unpack(vector, [leaf.shape for leaf in leaves]), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), back)


def test_transposed_matrices_go_column_by_column_and_come_back():
    leaves = [jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0), jnp.arange(8.0).reshape(2, 2, 2)]
    vector = buckets.pack(leaves, transposed=True)
    assert vector.tolist() == [0, 3, 1, 4, 2, 5, *range(3), *range(8)]
    unpacked = buckets.unpack(vector, [leaf.shape for leaf in leaves], transposed=True)
    for leaf, back in zip(leaves, unpacked, strict=True):
        np.testing.assert_array_equal(leaf, back)
