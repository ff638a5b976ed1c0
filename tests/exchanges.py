"""Exchanges for the tests: trees with one row per replica, run on meshes and in pmap, and compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

AXES = ("node", "local")
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 8), (2, 4), (4, 2), (8, 1), (2, 3), (3, 2), (1, 7)]
SHAPES = [(), (1,), (7,), (13,), (0,), (257, 33)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def mesh_of(nodes, local):
    """A mesh over the first of the devices, process by process."""
    return Mesh(np.array(jax.devices()[: nodes * local]).reshape(nodes, local), AXES)


def random_tree(num_replicas, shapes=SHAPES, dtypes=DTYPES):
    """Host arrays of shape (replicas, *shape), one for each dtype and shape."""
    generator = np.random.default_rng(0)
    return {
        f"{dtype.__name__}{shape}": generator.normal(size=(num_replicas, *shape)).astype(dtype)
        for dtype in dtypes
        for shape in shapes
    }


def program(mesh, transform):
    """A jitted function from a tree with one row per replica to every replica's own result, row by row."""

    def body(tree):
        mine = jax.tree.map(lambda leaf: leaf[0], tree)
        result, _ = transform.update(mine, transform.init(mine))
        return jax.tree.map(lambda leaf: leaf[None], result)

    spec = PartitionSpec(AXES)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def exchanged(mesh, transform, tree):
    return program(mesh, transform)(tree)


def exchanged_in_pmap(transform, tree):
    mapped = jax.pmap(lambda mine: transform.update(mine, transform.init(mine))[0], axis_name="replica")
    return mapped(tree)


def assert_equals_numpy(result, tree, reduce):
    """Each row of ``result`` is the float64 sum or mean of the rows of ``tree``, within rounding; all the same bits."""
    assert result.keys() == tree.keys()
    for name, leaf in tree.items():
        got = np.asarray(result[name])
        expected = getattr(np.asarray(leaf, np.float64), reduce)(axis=0)
        assert got.dtype == leaf.dtype
        # Rounded once to the leaf's dtype, after a float32 sum of up to eight terms below 5 (measured: 1.5e-6).
        bound = 5e-6 + np.abs(expected) * float(jnp.finfo(leaf.dtype).eps)
        assert np.all(np.abs(got.astype(np.float64) - expected) <= bound), name
        assert all(row.tobytes() == got[0].tobytes() for row in got), f"{name}: replicas differ"
