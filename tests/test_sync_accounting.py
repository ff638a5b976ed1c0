"""What the accounting counts is what the compiled program sends, message by message and byte by byte."""

import re

import jax
import numpy as np
import pytest
from compressed import CODECS, Loop
from exchanges import mesh_of, program

from trainer import sync
from trainer.sync import tree
from trainer.sync.codecs.powersgd import powersgd
from trainer.sync.compression import choose

SHAPES = {"a": (1000,), "b": (3,), "c": (0,), "d": (13, 7), "e": ()}
BUCKET_MIB = 1024 / 2**20
OPERATION = re.compile(
    r" = (?P<type>\([^=]*?\)|\S+) (?P<name>collective-permute|all-to-all|all-gather|all-reduce)(-start)?\((?P<rest>.*)"
)


def bytes_of(type_text):
    """The size of an HLO type, or of all in a tuple of types."""
    widths = {"f32": 4, "s32": 4, "u8": 1}
    found = re.findall(r"(\w+)\[([\d,]*)\]", type_text)
    return sum(widths[dtype] * int(np.prod([int(dim) for dim in dims.split(",") if dim])) for dtype, dims in found)


def groups_in(rest, total):
    """The replica groups of an HLO collective: written out, as an iota, or by the names of a mesh's axes."""
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        over = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named.group(2))]
        replicas = np.moveaxis(np.arange(total).reshape(list(sizes.values())), over, range(-len(over), 0))
        return replicas.reshape(-1, int(np.prod([list(sizes.values())[axis] for axis in over]))).tolist()
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, dims, order = ([int(n) for n in text.split(",")] if text else None for text in iota.groups())
        return np.arange(total).reshape(dims).transpose(order or range(len(dims))).reshape(shape).tolist()
    written = re.search(r"replica_groups=\{(\{.*?\})\}", rest)
    assert written, rest
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", written.group(1))]


def sends(text, total):
    """(sender, receiver, bytes) of every message in a compiled program; all-reduce and all-gather as rings."""
    for found in OPERATION.finditer(re.sub(r"/\*.*?\*/", "", text)):
        num_bytes, rest = bytes_of(found["type"]), found["rest"]
        if found["name"] == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", rest)
            assert pairs, rest
            for sender, receiver in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1)):
                yield int(sender), int(receiver), num_bytes
            continue
        for group in groups_in(rest, total):
            size = len(group)
            for member, sender in enumerate(group):
                if found["name"] == "all-to-all":
                    yield from ((sender, other, num_bytes / size) for other in group if other != sender)
                else:
                    rounds = (2 if found["name"] == "all-reduce" else 1) * (size - 1)
                    yield from ((sender, group[(member + 1) % size], num_bytes / size) for _ in range(rounds))


def measured(text, nodes, local):
    """(messages, bytes) per replica, within nodes and across: two arrays of shape (2, replicas)."""
    messages, num_bytes = np.zeros((2, nodes * local), int), np.zeros((2, nodes * local))
    for sender, receiver, size in sends(text, nodes * local):
        if sender != receiver:
            level = int(sender // local != receiver // local)
            messages[level, sender] += 1
            num_bytes[level, sender] += size
    return messages, num_bytes


@pytest.mark.parametrize("halving", [False, True])
@pytest.mark.parametrize(("nodes", "local"), [(1, 7), (2, 4), (3, 2)])
@pytest.mark.parametrize(
    "way", ["ring", "tree", "central", "xla", "hierarchical-ring", "hierarchical-tree", "hierarchical-xla"]
)
def test_it_counts_what_the_compiled_program_sends(monkeypatch, way, nodes, local, halving):
    if halving:
        if "tree" not in way:
            return  # only the tree has two forms
        monkeypatch.setattr(tree, "HALVING_BYTES", 64)
    algorithm, _, across = way.partition("-")
    mesh = mesh_of(nodes, local)
    transform = sync.all_reduce(mesh, algorithm=algorithm, across=across or "auto", bucket_mib=BUCKET_MIB)
    shapes = {name: jax.ShapeDtypeStruct((nodes * local, *shape), np.float32) for name, shape in SHAPES.items()}
    text = program(mesh, transform).lower(shapes).compile().as_text()
    messages, num_bytes = measured(text, nodes, local)

    gradient = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    counted = sync.traffic(gradient, nodes, local, algorithm=algorithm, across=across or "ring", bucket_mib=BUCKET_MIB)
    assert counted.num_buckets == 2
    np.testing.assert_allclose([counted.fast.wire_bytes, counted.slow.wire_bytes], num_bytes, rtol=1e-12)
    if "xla" not in way:  # XLA merges the buckets' sums, which saves messages but no bytes
        np.testing.assert_array_equal([counted.fast.messages, counted.slow.messages], messages)


@pytest.mark.parametrize("compress", ["slow", "all"])
@pytest.mark.parametrize("name", [*CODECS, "powersgd"])
@pytest.mark.parametrize(("nodes", "local"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_it_counts_what_a_codec_sends(name, compress, nodes, local):
    shapes = {"a": (1000,), "b": (3,), "d": (13, 7), "e": (), "rows": (8, 9), "columns": (3, 8)}
    mesh = mesh_of(nodes, local)
    how, codec = (
        {"compress": compress, "error_feedback": True},
        powersgd(rank=1) if name == "powersgd" else CODECS[name](),
    )
    transform = sync.all_reduce(mesh, codec=codec, bucket_mib=BUCKET_MIB, **how)
    loop = Loop(mesh, transform, shapes)
    tree_ = {key: jax.ShapeDtypeStruct((nodes * local, *shape), np.float32) for key, shape in shapes.items()}
    _, num_bytes = measured(loop.step.lower(tree_, loop.state).compile().as_text(), nodes, local)

    gradient = {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in shapes.items()}
    ways = {"algorithm": "auto", "across": "auto", "bucket_mib": BUCKET_MIB}
    counted = sync.traffic(gradient, nodes, local, **ways, compression=choose(codec, {}, **how))
    np.testing.assert_allclose([counted.fast.wire_bytes, counted.slow.wire_bytes], num_bytes, rtol=1e-12)


def vector(length):
    return np.zeros(length, np.float32)


@pytest.mark.parametrize(("replicas", "share"), [(2, 1), (4, 1.5), (8, 1.75), (16, 1.875)])
def test_a_ring_sends_the_published_share(replicas, share):
    for algorithm in ("ring", "xla"):
        counted = sync.traffic(vector(1600), 1, replicas, algorithm=algorithm)
        assert counted.wire_bytes_fast == share * 6400
        assert counted.wire_bytes_slow == 0
        assert counted.fast.rounds == 2 * (replicas - 1)


@pytest.mark.parametrize(("nodes", "local"), [(2, 8), (4, 4), (8, 2), (3, 5)])
@pytest.mark.parametrize("across", ["ring", "xla"])
def test_hierarchical_sends_the_published_share_over_the_slow_link(nodes, local, across):
    counted = sync.traffic(vector(48_000), nodes, local, algorithm="hierarchical", across=across)
    assert counted.wire_bytes_slow == 2 * (nodes - 1) / nodes * 4 * 48_000 / local
    assert counted.node_bytes(nodes).tolist() == [local * counted.wire_bytes_slow] * nodes


def test_a_halving_tree_sends_the_rings_bytes():
    counted = sync.traffic(vector(2**20), 1, 8, algorithm="tree")
    assert counted.wire_bytes_fast == 1.75 * 2**22
    assert counted.fast.rounds == 6


def test_central_burdens_one_link():
    counted = sync.traffic(vector(100), 8, 1, algorithm="central")
    assert counted.slow.wire_bytes.tolist() == [2800] + 7 * [400]
    assert counted.slow.rounds == 14


def test_a_flat_ring_leaves_each_node_once():
    counted = sync.traffic(vector(8000), 2, 4, algorithm="ring")
    assert counted.node_bytes(2).tolist() == [1.75 * 32_000] * 2
    assert counted.slow.messages.tolist() == [0, 0, 0, 14, 0, 0, 0, 14]


def test_only_the_slow_link_is_waited_for_where_a_round_needs_both():
    ring, tree = (sync.traffic(vector(2**18), 2, 4, algorithm=algorithm) for algorithm in ("ring", "tree"))
    assert (ring.fast.rounds, ring.fast.critical_bytes, ring.slow.rounds) == (0, 0, 14)
    assert (tree.fast.rounds, tree.slow.rounds) == (4, 2)
    assert tree.fast.critical_bytes == 2 * (2**20 // 2 + 2**20 // 4)
    assert ring.wire_bytes_fast == tree.wire_bytes_fast + tree.wire_bytes_slow == 1.75 * 2**20


def test_padding_is_counted():
    assert sync.traffic(vector(9), 1, 8, algorithm="ring").wire_bytes_fast == 14 * 4 * 2


@pytest.mark.parametrize("algorithm", sync.ALGORITHMS)
def test_nothing_is_sent_by_one_replica_or_for_no_elements(algorithm):
    for tree_, nodes, local in ((vector(9), 1, 1), (vector(0), 2, 2), ({}, 2, 2)):
        counted = sync.traffic(tree_, nodes, local, algorithm=algorithm)
        assert (counted.wire_bytes_fast, counted.wire_bytes_slow, counted.fast.rounds) == (0, 0, 0)


@pytest.mark.parametrize(("name", "automatic"), [("int8", 4), ("int4", 4), ("sign", 1), ("randomk", 1), ("topk", 1)])
def test_tiny_codes_travel_together_unless_the_user_sets_a_size(name, automatic):
    leaves = [jax.ShapeDtypeStruct((256, 1024), np.float32)] * 16
    for bucket_mib, expected in (("auto", automatic), (2.5, 8)):
        ways = {"algorithm": "auto", "across": "auto", "bucket_mib": bucket_mib}
        counted = sync.traffic(leaves, 2, 4, **ways, compression=choose(name, {}, error_feedback=True))
        assert counted.num_buckets == expected
