"""The exchange against float64 NumPy: every algorithm, mesh, dtype and shape, as mean and as sum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from toy import mesh_of

from trainer import sync
from trainer.errors import SettingsRefused
from trainer.mesh import AXES
from trainer.sync.collectives import ALGORITHMS

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 8), (2, 4), (4, 2), (8, 1), (2, 3), (3, 2), (1, 7)]
SHAPES = [(), (1,), (7,), (13,), (0,), (257, 33)]


def exchanged(mesh, transform, tree):
    """Runs ``transform`` on a tree whose leaves have one row per replica; returns every replica's own result."""

    def body(tree):
        mine = jax.tree.map(lambda leaf: leaf[0], tree)
        result, _ = transform.update(mine, transform.init(mine))
        return jax.tree.map(lambda leaf: leaf[None], result)

    spec = PartitionSpec(AXES)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(tree)


def random_tree(num_replicas):
    generator = np.random.default_rng(0)
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float16]
    return {
        f"{dtype.__name__}{shape}": jnp.asarray(generator.normal(size=(num_replicas, *shape)), dtype)
        for dtype in dtypes
        for shape in SHAPES
    }


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize(("nodes", "local"), MESHES)
def test_sum_and_mean_equal_numpy(algorithm, nodes, local):
    mesh, tree = mesh_of(nodes, local), random_tree(nodes * local)
    for reduce in ("sum", "mean"):
        result = exchanged(mesh, sync.all_reduce(mesh, algorithm=algorithm, reduce=reduce), tree)
        for name, leaf in tree.items():
            expected = getattr(np.asarray(leaf, np.float64), reduce)(axis=0)
            assert result[name].dtype == leaf.dtype
            # Rounded once to the leaf's dtype, after a float32 sum of up to eight terms below 5.
            bound = 5e-6 + np.abs(expected) * float(jnp.finfo(leaf.dtype).eps)
            for replica in np.asarray(result[name], np.float64):
                assert np.all(np.abs(replica - expected) <= bound), name
            assert all(np.array_equal(replica, result[name][0]) for replica in result[name]), "replicas differ"


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_half_precision_is_reduced_in_float32(algorithm):
    mesh = mesh_of(2, 2)
    tree = {"half": jnp.full((4, 1), 20000, jnp.float16), "brain": jnp.asarray([[256], [1], [1], [1]], jnp.bfloat16)}
    result = exchanged(mesh, sync.all_reduce(mesh, algorithm=algorithm), tree)
    assert result["half"][0, 0] == 20000
    assert result["brain"][0, 0] == 65
    wide = exchanged(mesh, sync.all_reduce(mesh, algorithm=algorithm, output_dtype=jnp.float32), tree)
    assert wide["brain"][0, 0] == 64.75


def test_it_works_inside_optax_chains_and_masks():
    mesh = mesh_of(2, 2)
    reduce = sync.all_reduce(mesh)
    tree = {"a": jnp.arange(4.0)[:, None], "b": jnp.arange(4.0)[:, None]}
    chained = exchanged(mesh, optax.chain(reduce, optax.scale(2.0)), tree)
    assert chained["a"][:, 0].tolist() == [3, 3, 3, 3]
    masked = exchanged(mesh, optax.masked(reduce, {"a": True, "b": False}), tree)
    assert masked["b"][:, 0].tolist() == [0, 1, 2, 3]
    assert masked["a"][:, 0].tolist() == [1.5, 1.5, 1.5, 1.5]


def test_an_empty_tree_stays_empty():
    mesh = mesh_of(1, 2)
    transform = sync.all_reduce(mesh)
    body = jax.shard_map(
        lambda x: (x, transform.update({}, transform.init({}))[0]),
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=(PartitionSpec(AXES), PartitionSpec()),
        check_vma=False,
    )
    assert body(jnp.zeros(2))[1] == {}


def test_one_replica_is_the_identity():
    tree = random_tree(1)
    mesh = mesh_of(1, 1)
    result = exchanged(mesh, sync.all_reduce(mesh), tree)
    jax.tree.map(np.testing.assert_array_equal, result, tree)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "rign"}, "sync.algorithm = 'rign'"),
        ({"reduce": "max"}, "reduce = 'max'"),
        ({"axes": ("node", "rack")}, "no axis 'rack'"),
    ],
)
def test_bad_arguments_are_refused_before_compiling(arguments, message):
    with pytest.raises(SettingsRefused, match=message):
        sync.all_reduce(mesh_of(1, 2), **arguments)
