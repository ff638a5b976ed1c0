"""Evaluation counts each example once, whatever the number of devices and however short the last batch is."""

import dataclasses

import jax
import pytest
from toy import mesh_of

from trainer import assembly, mapping, state
from trainer.config import Config
from trainer.errors import InputRefused
from trainer.evaluation import Evaluator
from trainer.step import Work

CONFIG = {
    "task": {
        "target": "models.mlp:MLPClassifier",
        "args": {"image_size": 4, "channels": 1, "hidden": [8], "num_classes": 3},
    },
    "data": {
        "source": "synthetic",
        "global_batch": 8,
        "args": {"image_size": 4, "channels": 1, "num_classes": 3, "num_test_examples": 21},
    },
    "mesh": {"nodes": 2, "devices_per_node": 4, "platform": "cpu"},
}


def on(shape, virtual_replicas=8, mapped="shard_map"):
    """The pieces of a run on a mesh of this shape, and an evaluator."""
    pieces = assembly.assemble(Config.model_validate(CONFIG))
    mesh = mesh_of(*shape)
    return dataclasses.replace(pieces, mesh=mesh, work=Work(mesh, virtual_replicas, 0, mapped))


@pytest.fixture(scope="module")
def expected():
    pieces = on((1, 1), 1)
    return Evaluator(pieces)(state.create_on_mesh(pieces.parts, pieces.mesh, 0))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (2, 4)])
def test_twenty_one_examples_are_twenty_one(shape, expected):
    pieces = on(shape)
    row = Evaluator(pieces)(state.create_on_mesh(pieces.parts, pieces.mesh, 0))
    assert row["examples"] == expected["examples"] == 21
    assert row["accuracy"] == expected["accuracy"]
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2, 4)])
def test_it_is_mapped_as_the_step_is(shape, monkeypatch):
    calls, call = [], mapping.PmapCompiled.__call__
    monkeypatch.setattr(mapping.PmapCompiled, "__call__", lambda *args: calls.append(args) or call(*args))
    pieces = [on(shape, mapped=name) for name in ("shard_map", "pmap")]
    first, second = (Evaluator(p)(state.create_on_mesh(p.parts, p.mesh, 0)) for p in pieces)
    assert first == second
    assert len(calls) == 3  # 21 examples in batches of 8


def test_it_evaluates_the_moving_average_where_there_is_one():
    config = Config.model_validate({**CONFIG, "optimizer": {"ema_decay": 0.9}})
    pieces = assembly.assemble(config)
    fresh = state.create_on_mesh(pieces.parts, pieces.mesh, 0)
    zeroed = fresh._replace(params=jax.tree.map(lambda leaf: 0 * leaf, fresh.params))
    assert Evaluator(pieces)(zeroed) == Evaluator(pieces)(fresh)


def test_missing_test_data_is_found_before_training():
    config = Config.model_validate(
        {**CONFIG, "data": {**CONFIG["data"], "args": {**CONFIG["data"]["args"], "num_test_examples": 0}}}
    )
    with pytest.raises(InputRefused, match="test split"):
        Evaluator(assembly.assemble(config))


def test_hundreds_of_batches_are_counted_exactly():
    data = {**CONFIG["data"], "args": {**CONFIG["data"]["args"], "num_test_examples": 8 * 300}}
    pieces = assembly.assemble(Config.model_validate({**CONFIG, "data": data}))
    row = Evaluator(pieces)(state.create_on_mesh(pieces.parts, pieces.mesh, 0))
    assert row["examples"] == 2400
