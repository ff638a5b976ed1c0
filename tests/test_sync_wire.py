"""What is sent over a wire arrives, whether each member is a device or a node whose devices share the sending."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import AXES, mesh_of
from jax.sharding import PartitionSpec

from trainer.sync.levels import topology
from trainer.sync.wire import Direct, Message, Recorder, Shared


@pytest.mark.parametrize("algorithm", ["ring", "xla"])
@pytest.mark.parametrize("kind", ["direct", "shared"])
def test_every_message_arrives(kind, algorithm):
    """3 nodes of 2 devices; 7 words are no multiple of either."""
    levels, mesh = topology(AXES, [3, 2]), mesh_of(3, 2)
    wire = Direct(levels.flat, algorithm)
    if kind == "shared":
        wire = Shared(Direct(levels.slow, algorithm), levels.fast)
    size = wire.size
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(size, 7)).astype(np.float32)
    words = generator.integers(0, 256, size=(size, size, 7)).astype(np.uint8)

    def body(vectors, words):
        me = wire.index()
        device = levels.fast.index().astype(np.uint8)
        mine = wire.sum(vectors[me]), wire.gather(words[me, 0]), wire.swap(words[me]), me
        summand = vectors[me] * (1 + levels.fast.index())  # another one on each device
        mine = (*mine, wire.share(words[me, 0] // 2 + device), wire.total(summand), *wire.own_and_total(summand))
        return jax.tree.map(lambda leaf: leaf[None], mine)

    spec = PartitionSpec(AXES)
    program = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False)
    sums, gathered, swapped, members, shared, totals, owned, again = jax.device_get(jax.jit(program)(vectors, words))
    assert members.tolist() == ([0, 1, 2, 3, 4, 5] if kind == "direct" else [0, 0, 1, 1, 2, 2])
    weights = [1, 2] * 3 if kind == "direct" else [1 + 2] * 3  # of a member's vector, in the sum over its devices
    for replica, member in enumerate(members):
        own = vectors[member] * weights[member]
        np.testing.assert_allclose(owned[replica], own, rtol=0, atol=1e-6)
        assert owned[replica].tobytes() == owned[members.tolist().index(member)].tobytes()
        expected = sum(vector * weight for vector, weight in zip(vectors, weights, strict=False))
        np.testing.assert_allclose(totals[replica], expected, rtol=0, atol=2e-6)
        assert totals[replica].tobytes() == again[replica].tobytes() == totals[0].tobytes()
        np.testing.assert_allclose(sums[replica], vectors.sum(axis=0), rtol=0, atol=1e-6)
        assert sums[replica].tobytes() == sums[0].tobytes()
        own = [replica % 2] if kind == "direct" else [0, 1]
        np.testing.assert_array_equal(shared[replica], [words[member, 0] // 2 + device for device in own])
        np.testing.assert_array_equal(gathered[replica], words[:, 0])
        np.testing.assert_array_equal(swapped[replica], words[:, member])


def test_a_recorder_writes_down_what_it_is_given():
    wire = Recorder(4)
    assert wire.total(jnp.zeros(2)).shape == (2,)  # of members of one device: a sum like any other
    assert [array.shape for array in wire.own_and_total(jnp.zeros(4))] == [(4,), (4,)]
    assert wire.share(jnp.zeros(5, jnp.uint8)).shape == (1, 5)
    assert wire.sum(jnp.zeros(3)).shape == (3,)
    assert wire.gather(jnp.zeros(5, jnp.uint8)).shape == (4, 5)
    assert wire.swap(jnp.zeros((4, 6), jnp.uint8)).shape == (4, 6)
    assert wire.messages == [
        Message("sum", 8),
        Message("sum", 16),
        Message("sum", 12),
        Message("gather", 5),
        Message("swap", 6),
    ]


def test_a_recorder_of_nodes_writes_down_what_their_devices_exchange():
    wire = Recorder(4, num_parts=2)
    assert wire.total(jnp.zeros(3)).shape == (3,)
    assert [array.shape for array in wire.own_and_total(jnp.zeros(4))] == [(4,), (4,)]
    assert wire.share(jnp.zeros(5, jnp.uint8)).shape == (2, 5)
    assert wire.messages == [Message("total", 12), Message("own_and_total", 16), Message("share", 5)]
