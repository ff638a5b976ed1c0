"""Messages between pairs that take turns are those of pairs that do not, whatever is mapped."""

import jax
import numpy as np
import pytest
from exchanges import AXES, mesh_of
from jax.sharding import PartitionSpec

from trainer.sync import levels, tree
from trainer.sync.levels import topology


def messages(level):
    """A function of a float32 (size, n) that sends it by every kind of message."""

    def body(rows):
        mine = rows[0]
        rounds = [tree.partners(level.size, distance) for distance in tree.distances(level.size)]
        ring = [(member, (member + 1) % level.size) for member in range(level.size)]
        words = jax.lax.bitcast_convert_type(rows, np.uint8).reshape(level.size, -1)
        return (
            *(level.permute(mine, chosen) for chosen in (*rounds, ring)),
            level.all_gather(mine),
            *(level.all_to_all(given) for given in (rows, words)),
        )

    return body


@pytest.mark.parametrize("mapping", ["shard_map", "pmap"])
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 3), (4, 2), (3, 2)])
@pytest.mark.parametrize("name", ["slow", "flat"])
def test_turns_change_no_message(monkeypatch, mapping, nodes, local, name):
    monkeypatch.setattr(levels, "TURNS_BYTES", 0)
    axes, sizes, per_node = (
        (AXES, [nodes, local], None) if mapping == "shard_map" else (("all",), [nodes * local], local)
    )
    size = nodes if name == "slow" else nodes * local
    rows = np.random.default_rng(0).normal(size=(nodes * local, size, 5)).astype(np.float32)
    rows[0, 0, 0] = -0.0
    results, texts = [], []
    for takes_turns in (False, True):
        body = messages(getattr(topology(axes, sizes, per_node, takes_turns=takes_turns), name))
        if mapping == "pmap":
            program = jax.pmap(body, axis_name="all")
        else:
            spec = PartitionSpec(AXES)

            def of_one(tree, body=body):
                return jax.tree.map(lambda leaf: leaf[None], body(tree[0]))

            mesh = mesh_of(nodes, local)
            program = jax.jit(jax.shard_map(of_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        results.append(jax.device_get(program(rows)))
        texts.append(program.lower(rows).as_text().count("collective_permute"))
    for plain, in_turns in zip(*results, strict=True):
        assert plain.tobytes() == in_turns.tobytes()
    assert texts[1] > texts[0]  # or else turns were not taken


@pytest.mark.parametrize(("nodes", "local"), [(2, 4), (3, 4), (3, 2), (5, 2)])
def test_of_each_nodes_pairs_half_begin_each_way(nodes, local):
    size, flat = nodes * local, topology(AXES, [nodes, local], takes_turns=True).flat
    for distance in tree.distances(size):
        pairs = tree.partners(size, distance)
        first, then = levels._in_turns(pairs, flat.turns)
        assert sorted(first + then) == sorted(pairs)
        ways = [(sender // local, receiver // local) for sender, receiver in first]
        assert len(then) == sum(sender != receiver for sender, receiver in ways)
        for node in range(nodes):
            sends, receives = ([way[end] for way in ways if way[0] != way[1]].count(node) for end in (0, 1))
            assert abs(sends - receives) <= (sends + receives) % 2


def test_small_messages_and_nodes_of_one_device_take_no_turns():
    assert topology(AXES, [2, 1], takes_turns=True).slow.turns is None
    assert topology(AXES, [1, 2], takes_turns=True).flat.turns is None
    level, spec = topology(AXES, [2, 2], takes_turns=True).slow, PartitionSpec(AXES)

    def num_messages(length):
        body = jax.shard_map(
            lambda vector: level.permute(vector[0], levels.PAIR)[None],
            mesh=mesh_of(2, 2),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return jax.jit(body).lower(np.zeros((4, length), np.float32)).as_text().count("collective_permute")

    assert (num_messages(levels.TURNS_BYTES // 4 - 1), num_messages(levels.TURNS_BYTES // 4)) == (1, 2)
