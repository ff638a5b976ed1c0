"""Parts of a matrix behave as its summands, however a leaf is cut; PowerSGD on parts is PowerSGD on whole leaves."""

import jax.numpy as jnp
import numpy as np
import pytest
from compressed import Loop, assert_same_rows, contributions, kept
from exchanges import mesh_of

from trainer import sync
from trainer.sync import shards
from trainer.sync.codecs.matrices import matrix, rows_and_columns

SHAPES = {
    "rows": (8, 9),
    "columns": (9, 8),
    "columns first": (3, 4, 20),
    "no dim": (7, 9),
    "kernel": (3, 3, 4, 6),
    "inner rows": (3, 8, 5),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_parts_of_a_matrix_add_up_to_it(shape, count):
    m, n = rows_and_columns(shape)
    generator = np.random.default_rng(0)
    leaf, left, right = (generator.normal(size=size).astype(np.float32) for size in (shape, (m, 2), (n, 2)))
    rows = shards.to_rows(jnp.asarray(leaf), count)
    parts = [matrix(shards.Part(rows[index], jnp.int32(index), shape, count)) for index in range(count)]
    whole = leaf.reshape(m, n)
    np.testing.assert_allclose(sum(part.times(right) for part in parts), whole @ right, atol=1e-5)
    np.testing.assert_allclose(sum(part.transposed_times(left) for part in parts), whole.T @ left, atol=1e-5)
    placed = jnp.stack([part.place_of(left, right) for part in parts])
    np.testing.assert_allclose(shards.from_rows(placed, shape), (left @ right.T).reshape(shape), atol=1e-5)


def test_a_whole_leaf_is_its_own_part():
    leaf = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    m, n = rows_and_columns(leaf.shape)
    whole, eye = matrix(jnp.asarray(leaf)), np.eye(n, dtype=np.float32)
    np.testing.assert_array_equal(whole.times(eye), leaf.reshape(m, n))
    assert whole.place_of(jnp.ones((m, 1)), jnp.ones((n, 1))).shape == leaf.shape


@pytest.mark.parametrize(("local", "is_shared_out"), [(4, True), (2, False)])
def test_powersgd_on_parts_is_powersgd_on_whole_leaves(local, is_shared_out):
    """Nodes of several devices against nodes of one, whose contribution is what the devices' come to."""
    arguments = {"codec": "powersgd", "codec_args": {"rank": 2}, "error_feedback": True, "reduce": "sum"}
    many, one = mesh_of(2, local), mesh_of(2, 1)
    loops = [
        Loop(mesh, sync.all_reduce(mesh, **arguments), SHAPES, is_shared_out=is_shared_out) for mesh in (many, one)
    ]
    for step in range(4):
        tree = contributions(2 * local, SHAPES, step)
        nodes = {key: leaf.reshape(2, local, *leaf.shape[1:]).sum(axis=1) for key, leaf in tree.items()}
        results = [loops[0](tree), loops[1](nodes)]
        assert_same_rows(results[0])
        for key in SHAPES:
            np.testing.assert_allclose(results[0][key][0], results[1][key][0], rtol=0, atol=2e-4, err_msg=key)
    residuals = [kept(loop.state) for loop in loops]
    assert residuals[0].keys() == residuals[1].keys()
    for key, residual in residuals[0].items():
        np.testing.assert_allclose(residual, residuals[1][key], rtol=0, atol=5e-4, err_msg=key)
    kept_here = loops[0].state.by_shard["residual"]["rows"].addressable_shards[0].data
    assert kept_here.shape == ((1, 8 // local, 9) if is_shared_out else (1, 8, 9))
