"""The exchange against float64 NumPy: every algorithm, mesh, dtype and shape, and inside any optax chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanges import AXES, MESHES, assert_equals_numpy, exchanged, exchanged_in_pmap, mesh_of, program, random_tree
from jax.sharding import PartitionSpec

from trainer import sync
from trainer.errors import SettingsRefused

WAYS = ["central", "ring", "tree", "xla", "hierarchical-ring", "hierarchical-tree", "hierarchical-xla", "auto"]


def arguments(way):
    algorithm, _, across = way.partition("-")
    return {"algorithm": algorithm, "across": across or "auto"}


def test_the_table_holds_every_algorithm():
    assert {arguments(way)["algorithm"] for way in WAYS} == {"auto", *sync.ALGORITHMS}
    assert {f"hierarchical-{across}" for across in sync.ACROSS} < set(WAYS)


DIFFERS = {"hierarchical-tree": 3, "hierarchical-xla": 3}
"""From how many nodes on: below it differs from the ring only in the order of two messages."""


@pytest.mark.parametrize(
    ("way", "nodes", "local"),
    # Without "auto", which in one process is xla.
    [(way, *mesh) for mesh in MESHES for way in WAYS[:-1] if mesh[0] >= DIFFERS.get(way, 1)],
)
def test_it_equals_numpy_on_every_mesh(way, nodes, local):
    mesh, tree = mesh_of(nodes, local), random_tree(nodes * local)
    reduce = "mean" if (nodes + local) % 2 else "sum"
    result = exchanged(mesh, sync.all_reduce(mesh, reduce=reduce, **arguments(way)), tree)
    assert_equals_numpy(result, tree, reduce)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("way", WAYS)
def test_it_equals_numpy_as_mean_and_as_sum(way, reduce):
    mesh, tree = mesh_of(2, 3), random_tree(6, shapes=[(13,), (5, 3)])
    assert_equals_numpy(exchanged(mesh, sync.all_reduce(mesh, reduce=reduce, **arguments(way)), tree), tree, reduce)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("devices_per_node", "num_replicas"), [(4, 8), (2, 6), (1, 7)])
def test_it_equals_numpy_in_pmap(way, devices_per_node, num_replicas):
    tree = random_tree(num_replicas, shapes=[(), (13,), (0,), (257, 33)])
    transform = sync.all_reduce(axes="replica", devices_per_node=devices_per_node, **arguments(way))
    assert_equals_numpy(exchanged_in_pmap(transform, tree), tree, "mean")


@pytest.mark.parametrize("way", WAYS)
def test_buckets_change_nothing_but_rounding(way):
    mesh, tree = mesh_of(2, 2), random_tree(4, shapes=[(7,), (13,), (0,), (40, 3), (64,)])
    transform = sync.all_reduce(mesh, bucket_mib=256 / 2**20, reduce="sum", **arguments(way))
    assert_equals_numpy(exchanged(mesh, transform, tree), tree, "sum")


@pytest.mark.parametrize("way", WAYS)
def test_half_precision_is_reduced_in_float32(way):
    mesh = mesh_of(2, 2)
    tree = {"half": jnp.full((4, 1), 20000, jnp.float16), "brain": jnp.asarray([[256], [1], [1], [1]], jnp.bfloat16)}
    result = exchanged(mesh, sync.all_reduce(mesh, **arguments(way)), tree)
    assert result["half"][0, 0] == 20000
    assert result["brain"][0, 0] == 65


def test_the_output_can_be_wider_than_the_leaf():
    tree = {"brain": jnp.asarray([[256], [1], [1], [1]], jnp.bfloat16)}
    wide = exchanged(mesh_of(2, 2), sync.all_reduce(mesh_of(2, 2), output_dtype=jnp.float32), tree)
    assert wide["brain"].dtype == jnp.float32
    assert wide["brain"][:, 0].tolist() == [64.75] * 4


@pytest.mark.parametrize("algorithm", ["xla", "ring", "hierarchical"])
def test_it_works_inside_optax_chains_masks_and_partitions(algorithm):
    mesh = mesh_of(2, 2)
    reduce = sync.all_reduce(mesh, algorithm=algorithm)
    tree = {"a": jnp.arange(4.0)[:, None], "b": jnp.arange(4.0)[:, None]}
    chained = exchanged(mesh, optax.chain(reduce, optax.scale(2.0)), tree)
    assert chained["a"][:, 0].tolist() == [3, 3, 3, 3]
    masked = exchanged(mesh, optax.masked(reduce, {"a": True, "b": False}), tree)
    assert masked["b"][:, 0].tolist() == [0, 1, 2, 3]
    assert masked["a"][:, 0].tolist() == [1.5, 1.5, 1.5, 1.5]
    by_label = optax.multi_transform({"mean": reduce, "zero": optax.set_to_zero()}, {"a": "mean", "b": "zero"})
    labelled = exchanged(mesh, by_label, tree)
    assert labelled["a"][:, 0].tolist() == [1.5, 1.5, 1.5, 1.5]
    assert labelled["b"][:, 0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("algorithm", sync.ALGORITHMS)
def test_an_empty_tree_stays_empty(algorithm):
    mesh = mesh_of(1, 2)
    transform = sync.all_reduce(mesh, algorithm=algorithm)
    body = jax.shard_map(
        lambda x: (x, transform.update({}, transform.init({}))[0]),
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=(PartitionSpec(AXES), PartitionSpec()),
        check_vma=False,
    )
    assert body(jnp.zeros(2))[1] == {}


@pytest.mark.parametrize("algorithm", sync.ALGORITHMS)
def test_one_replica_is_the_identity(algorithm):
    tree, mesh = random_tree(1), mesh_of(1, 1)
    result = exchanged(mesh, sync.all_reduce(mesh, algorithm=algorithm), tree)
    assert all(np.asarray(result[name]).tobytes() == leaf.tobytes() for name, leaf in tree.items())


@pytest.mark.parametrize("algorithm", sync.ALGORITHMS)
def test_it_compiles_once(algorithm):
    mesh = mesh_of(2, 2)
    run = program(mesh, sync.all_reduce(mesh, algorithm=algorithm))
    for seed in range(3):
        run({"w": np.full((4, 5), seed, np.float32)})
    assert run._cache_size() == 1


def test_init_works_outside_any_axis_context():
    transform = sync.all_reduce(axes="replica", devices_per_node=4, algorithm="hierarchical")
    assert jax.eval_shape(transform.init, {"w": jnp.zeros(3)}) == sync.SyncState()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "rign"}, "sync.algorithm = 'rign'"),
        ({"algorithm": "hierarchical", "across": "central"}, "sync.across = 'central'"),
        ({"algorithm": "ring", "across": "tree"}, "would ignore it"),
        ({"reduce": "max"}, "reduce = 'max'"),
        ({"axes": ("node", "rack")}, "no axis 'rack'"),
        ({"axes": ("node", "node")}, "each axis to reduce over once"),
        ({"axes": ()}, "each axis to reduce over once"),
        ({"bucket_mib": 0}, "sync.bucket_mib = 0: give a size above 0"),
        ({"bucket_mib": -1.0}, "sync.bucket_mib = -1.0"),
        ({"bucket_mib": float("nan")}, "sync.bucket_mib = nan"),
        ({"devices_per_node": 4}, "devices_per_node = 4 does not divide the 6 replicas: choose one of 1, 2, 3, 6"),
        ({"devices_per_node": 2}, "the last of the axes counts 3 devices"),
        ({"axes": "local", "algorithm": "hierarchical"}, "needs two levels"),
        ({"output_dtype": jnp.int32}, "choose a floating-point dtype"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_traced(arguments, message):
    with pytest.raises(SettingsRefused, match=message) as caught:
        sync.all_reduce(mesh_of(2, 3), **arguments)
    assert "\n" not in str(caught.value)


def refusal_when_traced(mapped, *arguments):
    with pytest.raises(SettingsRefused) as caught:
        jax.eval_shape(mapped, *arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_call_outside_of_shard_map_is_refused():
    transform = sync.all_reduce(mesh_of(2, 3))
    message = refusal_when_traced(lambda x: transform.update(x, transform.init(x)), jnp.zeros(3))
    assert "are not mapped: call it inside jax.shard_map" in message


@pytest.mark.parametrize("algorithm", ["xla", "ring"])
def test_check_vma_is_refused(algorithm):
    mesh = mesh_of(2, 2)
    transform = sync.all_reduce(mesh, algorithm=algorithm)
    spec = PartitionSpec(AXES)
    mapped = jax.shard_map(
        lambda x: transform.update(x, transform.init(x))[0], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True
    )
    assert "set check_vma=False" in refusal_when_traced(mapped, jnp.zeros(4))


def test_another_mesh_than_the_surrounding_one_is_refused():
    transform = sync.all_reduce(mesh_of(2, 3))
    message = refusal_when_traced(program(mesh_of(2, 2), transform), {"w": jnp.zeros((4, 1))})
    assert "sizes [2, 3], and is called where they have [2, 2]" in message


def test_pmap_nodes_that_do_not_divide_are_refused():
    transform = sync.all_reduce(axes="replica", devices_per_node=3)
    message = refusal_when_traced(
        jax.pmap(lambda x: transform.update(x, transform.init(x))[0], axis_name="replica"), jnp.zeros((8, 1))
    )
    assert "devices_per_node = 3 does not divide the 8 replicas" in message


def test_integer_leaves_are_refused_by_name():
    mesh = mesh_of(1, 2)
    message = refusal_when_traced(program(mesh, sync.all_reduce(mesh)), {"a": {"ids": jnp.zeros((2, 3), jnp.int32)}})
    assert "['a']['ids'] has dtype int32" in message


def test_the_number_of_hosts_reaches_the_choice(monkeypatch):
    seen = []

    def noting(gradient, links, **given):
        seen.append(links)
        return sync.choose(gradient, links, **given)

    monkeypatch.setattr("trainer.sync.transform.choose", noting)
    for num_hosts in (None, 3):
        transform = sync.all_reduce(mesh_of(2, 4), num_hosts=num_hosts)
        jax.eval_shape(program(mesh_of(2, 4), transform), {"x": jax.ShapeDtypeStruct((8, 3), jnp.float32)})
    assert [links.num_hosts for links in seen] == [None, 3]
