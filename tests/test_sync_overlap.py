"""Exchanges between processes on CPUs: what they add for the sake of overlap changes no bit, and is still compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import mesh_of

from trainer import sync
from trainer.sync import overlap
from trainer.sync.choice import Links

BITS = np.array([0, 1 << 31, 1, 0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x3F800001, 0x00400000], np.uint32)
"""Zeros of both signs, the smallest number, NaNs that differ, infinities, and others, as float32."""
NUM_LAYERS, WIDTH = 4, 128
APART: dict[str, str | bool] = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


@pytest.mark.parametrize("first", range(len(BITS)))
def test_no_bit_is_changed(first):
    given = np.roll(BITS, -first).view(np.float32)
    copied, held = jax.jit(lambda x: (overlap.behind_products(x), overlap.all_at_once([x, x[1]], x)))(given)
    for result, expected in [(copied, given), (held[0], given), (held[1], given[1])]:
        np.testing.assert_array_equal(np.asarray(result).view(np.uint32), expected.view(np.uint32))


def compiled_step():
    """A compiled step of some layers: of each instruction its kind, what it takes in, and whether it is the result."""
    mesh = mesh_of(2, 1)
    exchange = sync.all_reduce(mesh, algorithm="xla", reduce="sum", bucket_mib=1e-3)

    def loss(weights, x):
        for weight in weights:
            x = jax.nn.relu(x @ weight)
        return jnp.sum(x * x)

    def step(weights, x):
        gradient = exchange.update(jax.grad(loss)(weights, x), None)[0]
        return jax.tree.map(jnp.subtract, weights, gradient)

    specs = ([jax.P()] * NUM_LAYERS, jax.P(("node", "local")))
    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False), donate_argnums=0
    )
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * NUM_LAYERS
    x = jax.ShapeDtypeStruct((2 * WIDTH, WIDTH), np.float32)
    text = program.lower(weights, x).compile(APART).as_text()
    assert text is not None
    entry = text[text.index("\nENTRY ") :].split("\n}")[0]
    lines = re.findall(r"^ +(ROOT )?%([\w.-]+) = .*? ([\w-]+)\((.*?)\)", entry, re.MULTILINE)
    return {name: (kind, re.findall(r"%([\w.-]+)", inputs), bool(root)) for root, name, kind, inputs in lines}


def sources(graph, name):
    """All that an instruction rests on."""
    found, left = set(), [name]
    while left:
        new = set(graph[left.pop()][1]) - found
        found |= new
        left += new
    return found


def kind_of_input(graph, name):
    """What makes the input of an instruction, seen through those that move nothing."""
    kind, inputs, _ = graph[graph[name][1][0]]
    return kind_of_input(graph, graph[name][1][0]) if kind == "bitcast" and inputs else kind


@pytest.mark.parametrize("between_processes", [False, True])
def test_exchanges_take_copies_and_no_result_is_used_before_the_last(monkeypatch, between_processes):
    monkeypatch.setattr(Links, "blocks_threads", between_processes)
    graph = compiled_step()
    exchanges = [name for name, (kind, *_) in graph.items() if kind == "all-reduce"]
    assert len(exchanges) == NUM_LAYERS
    assert {kind_of_input(graph, name) for name in exchanges} == {"fusion" if between_processes else "dot"}
    (root,) = [inputs for _, inputs, is_root in graph.values() if is_root]
    rests_on = [sources(graph, result) & set(exchanges) for result in root]
    in_common = set.intersection(*rests_on)
    assert len(root) == NUM_LAYERS
    assert len(in_common) == between_processes
