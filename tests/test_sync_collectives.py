"""The algorithms by themselves: sizes around the number of replicas, rings as loops, and the bits of trees."""

import jax
import numpy as np
import pytest
from exchanges import AXES, mesh_of
from jax.sharding import PartitionSpec

from trainer.config import WITH_CODEC
from trainer.sync import collectives, ring, tree
from trainer.sync.levels import topology


def summed(mesh, rows, algorithm, across="ring"):
    """Every replica's result for its row of ``rows``."""
    levels = topology(AXES, list(mesh.shape.values()))
    spec = PartitionSpec(AXES)
    body = jax.shard_map(
        lambda row: collectives.all_reduce(row[0], levels, algorithm, across)[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return np.asarray(jax.jit(body)(rows))


def random_rows(num_replicas, length):
    return np.random.default_rng(length).normal(size=(num_replicas, length)).astype(np.float32)


def assert_all_rows_are(result, expected):
    np.testing.assert_allclose(result, np.broadcast_to(expected, result.shape), rtol=0, atol=5e-6)
    assert all(row.tobytes() == result[0].tobytes() for row in result)


def test_every_name_has_its_algorithm():
    assert {*collectives.FLAT, "hierarchical"} == set(collectives.ALGORITHMS)
    assert set(collectives.ACROSS) == set(WITH_CODEC["all"]) < collectives.FLAT.keys()


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
@pytest.mark.parametrize("length", [1, 5, 6, 7])
def test_lengths_around_the_number_of_replicas(algorithm, length):
    rows = random_rows(6, length)
    assert_all_rows_are(summed(mesh_of(2, 3), rows, algorithm), rows.astype(np.float64).sum(0))


@pytest.mark.parametrize(("nodes", "local"), [(1, 2), (1, 7), (2, 4)])
def test_a_looped_ring_gives_the_bits_of_an_unrolled_one(monkeypatch, nodes, local):
    mesh, rows = mesh_of(nodes, local), random_rows(nodes * local, 29)
    unrolled = summed(mesh, rows, "ring")
    monkeypatch.setattr(ring, "UNROLL_LIMIT", 1)
    assert summed(mesh, rows, "ring").tobytes() == unrolled.tobytes()


def test_long_rings_are_loops(monkeypatch):
    def num_messages():
        levels = topology(AXES, [2, 4])
        body = jax.shard_map(
            lambda row: ring.all_reduce(row[0], levels.flat)[None],
            mesh=mesh_of(2, 4),
            in_specs=PartitionSpec(AXES),
            out_specs=PartitionSpec(AXES),
            check_vma=False,
        )
        return jax.jit(body).lower(np.zeros((8, 16), np.float32)).as_text().count("collective_permute")

    assert num_messages() == 14
    monkeypatch.setattr(ring, "UNROLL_LIMIT", 7)
    assert num_messages() == 2


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("length", [1, 9, 64])
def test_doubling_and_halving_sum_in_the_same_order(monkeypatch, size, length):
    mesh, rows = mesh_of(1, size), random_rows(size, length)
    whole = summed(mesh, rows, "tree")
    monkeypatch.setattr(tree, "HALVING_BYTES", 0)
    halved = summed(mesh, rows, "tree")
    assert halved.tobytes() == whole.tobytes()
    assert_all_rows_are(halved, rows.astype(np.float64).sum(0))
    if size == 8:
        pairs = (rows[0::2] + rows[1::2]).astype(np.float32)
        fours = pairs[0::2] + pairs[1::2]
        assert whole[0].tobytes() == (fours[0] + fours[1]).tobytes()


def test_the_fold_leaves_a_power_of_two():
    assert tree.fold_pairs(8) == []
    assert tree.fold_pairs(7) == [(1, 0), (3, 2), (5, 4)]
    assert tree.partners(6, 1) == [(0, 2), (2, 0), (4, 5), (5, 4)]


def test_no_replica_waits_for_a_number_that_is_not_finite():
    rows = random_rows(6, 8)
    rows[4, 3] = np.nan
    for algorithm in collectives.ALGORITHMS:
        result = summed(mesh_of(2, 3), rows, algorithm)
        assert np.isnan(result[:, 3]).all(), algorithm
        assert np.isfinite(np.delete(result, 3, axis=1)).all(), algorithm
