"""The exchange's state inside any optax state: how it is sharded, and what a resize keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from trainer import sync
from trainer.errors import SettingsRefused
from trainer.sync import SyncState


def with_residual(num_owners):
    """A transformation whose state looks as a lossy codec's will."""

    def init(params):
        return SyncState(by_replica=jax.tree.map(lambda leaf: jnp.zeros((num_owners, *leaf.shape)), params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


PARAMS = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}
CONTAINERS = {
    "alone": lambda inner: inner,
    "chain": lambda inner: optax.chain(inner, optax.adam(1e-3)),
    "masked": lambda inner: optax.masked(inner, {"a": True, "b": True}),
    "multi_transform": lambda inner: optax.multi_transform({"x": inner, "y": optax.sgd(1.0)}, {"a": "x", "b": "x"}),
    "nested": lambda inner: optax.chain(optax.masked(optax.chain(inner), {"a": True, "b": True}), optax.adam(1e-3)),
    "inject": lambda inner: optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.sgd(rate)))(rate=0.1),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_specs_and_resize_find_the_state_anywhere(container):
    state = CONTAINERS[container](with_residual(4)).init(PARAMS)
    specs = sync.state_specs(state)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True))
    owned = [spec for leaf, spec in pairs if leaf.shape[:1] == (4,) and leaf.ndim >= 2]
    assert owned == [PartitionSpec(("node", "local"))] * 2
    assert [spec for _, spec in pairs if spec not in owned] == [PartitionSpec()] * (len(pairs) - 2)

    resized = sync.resize(state, 2)
    shapes = [leaf.shape for leaf in jax.tree.leaves(resized)]
    assert shapes == [(2, *leaf.shape[1:]) if spec in owned else leaf.shape for leaf, spec in pairs]


def test_specs_follow_the_axes():
    state = SyncState(by_node={"w": jnp.zeros((2, 3))}, by_replica={"w": jnp.zeros((8, 3))})
    assert sync.state_specs(state).by_node == {"w": PartitionSpec("node")}
    assert sync.state_specs(state, ("rack", "host", "gpu")).by_node == {"w": PartitionSpec(("rack", "host"))}
    assert sync.state_specs(state, ("rack", "host", "gpu")).by_replica == {"w": PartitionSpec(("rack", "host", "gpu"))}


@pytest.mark.parametrize("num_owners", [1, 2, 3, 5, 8])
def test_resize_keeps_the_mean_residual(num_owners):
    residual = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    resized = sync.resize(SyncState(by_node={"w": residual}), num_owners).by_node["w"]
    assert resized.shape == (num_owners, 3)
    np.testing.assert_allclose(resized.mean(0), residual.mean(0), rtol=0, atol=1e-7)
    assert all(np.array_equal(row, resized[0]) for row in resized)


def test_an_unchanged_number_changes_no_bit():
    residual = jnp.asarray([[1.0], [3.0]])
    assert sync.resize(SyncState(by_node=residual), 2).by_node.tolist() == [[1.0], [3.0]]


def test_the_rest_of_the_state_passes_through():
    state = (optax.adam(1e-3).init(PARAMS), SyncState())
    assert jax.tree.all(jax.tree.map(np.array_equal, sync.resize(state, 3), state))


def test_no_owners_are_refused():
    with pytest.raises(SettingsRefused, match="num_owners = 0"):
        sync.resize(SyncState(), 0)
