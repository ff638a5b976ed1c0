"""The settings tree: what it refuses, and that nothing in it is converted or ignored in silence."""

import math
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from trainer.config import Config, Mesh, OptimizerName, Settings

NEEDED: dict[str, Any] = {
    "task": {"target": "models.vit:ViTClassifier"},
    "data": {"source": "digits", "global_batch": 8},
}


def config(**tables: dict[str, Any]) -> Config:
    return Config.model_validate({name: NEEDED.get(name, {}) | tables.get(name, {}) for name in {*NEEDED, *tables}})


def refusal(**tables: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        config(**tables)
    return str(caught.value)


ACCEPTED = [
    ("run", {"name": "a-1_b.c"}),
    ("run", {"seed": 2**32 - 1}),
    ("data", {"source": "my_package.data:Source"}),
    ("optimizer", {"learning_rate": 1}),
    ("optimizer", {"clip_norm": math.inf}),
    ("optimizer", {"clip_norm": 0.0}),
    ("optimizer", {"name": "sgd", "momentum": 0.9, "nesterov": True}),
    ("optimizer", {"name": "lion", "beta2": 0.99}),
    ("optimizer", {"name": "optax:adafactor", "args": {"min_dim_size_to_factor": 64}}),
    ("optimizer", {"schedule": "cosine", "warmup_steps": 1000, "final_fraction": 0.1}),
    ("optimizer", {"schedule": "constant", "warmup_steps": 1001}),
    ("mesh", {"virtual_replicas": 8, "nodes": 2, "devices_per_node": 4}),
    ("mesh", {"virtual_replicas": 8, "nodes": 3}),
    ("debug", {"faults": [{"kind": "nan", "rank": 1, "step": 1000}]}),
    ("mesh", {"nodes": 1024, "platform": "cpu"}),
    ("mesh", {"nodes": 256, "devices_per_node": 256}),
    ("timeouts", {"init_seconds": 1e6, "shutdown_seconds": 1e6}),
    ("data", {"num_threads": 256, "prefetch_batches": 1024}),
]

REFUSED = [
    ("run", {"name": ""}, "name"),
    ("run", {"name": "../x"}, "name"),
    ("run", {"name": ".hidden"}, "name"),
    ("run", {"name": "a\n"}, "name"),
    ("run", {"seed": 2**32}, "seed"),
    ("run", {"seed": -1}, "seed"),
    ("run", {"num_steps": 0}, "num_steps"),
    ("run", {"num_steps": 2**31}, "num_steps"),
    ("run", {"num_steps": 10.0}, "num_steps"),
    ("run", {"num_steps": "10"}, "num_steps"),
    ("run", {"num_steps": True}, "num_steps"),
    ("task", {"target": "models.vit"}, "target"),
    ("task", {"target": "models..vit:X"}, "target"),
    ("task", {"args": {"x": None}}, "x: TOML cannot hold"),
    ("task", {"args": {"x": [math.nan]}}, "x: nan"),
    ("data", {"source": "digit"}, "source"),
    ("optimizer", {"name": "adam"}, "name"),
    ("optimizer", {"learning_rate": math.nan}, "learning_rate"),
    ("optimizer", {"learning_rate": math.inf}, "learning_rate"),
    ("optimizer", {"clip_norm": math.nan}, "clip_norm"),
    ("optimizer", {"clip_norm": -1.0}, "clip_norm"),
    ("optimizer", {"beta1": 1.0}, "beta1"),
    ("optimizer", {"ema_decay": 1.0}, "ema_decay"),
    ("optimizer", {"name": "adamw", "momentum": 0.9}, "momentum: adamw would ignore it"),
    ("optimizer", {"name": "adamw", "nesterov": True}, "nesterov: adamw would ignore it"),
    ("optimizer", {"name": "sgd", "beta1": 0.8}, "beta1: sgd would ignore it"),
    ("optimizer", {"name": "lion", "eps": 1e-6}, "eps: lion would ignore it"),
    ("optimizer", {"name": "optax:sgd", "momentum": 0.9}, "momentum: optax:sgd would ignore it"),
    ("optimizer", {"name": "sgd", "nesterov": True}, "nesterov: needs momentum > 0"),
    ("optimizer", {"name": "adamw", "args": {"b1": 0.9}}, "args: only an optimizer named by import path"),
    ("optimizer", {"final_fraction": 0.1}, "final_fraction: the schedule"),
    ("optimizer", {"schedule": "linear", "warmup_steps": 1001}, "optimizer.warmup_steps: the warm-up cannot be longer"),
    ("mesh", {"virtual_replicas": 6, "nodes": 2, "devices_per_node": 2}, "such as 4 or 8"),
    ("mesh", {"virtual_replicas": 1, "nodes": 2, "platform": "cpu"}, "such as 2"),
    (
        "mesh",
        {"virtual_replicas": 16},
        "data.global_batch: must be a multiple of mesh.virtual_replicas = 16, such as 16",
    ),
    ("mesh", {"virtual_replicas": 3}, "such as 6 or 9"),
    ("debug", {"faults": [{"kind": "nan", "rank": 1, "step": 1001}]}, "debug.faults[0].step: never comes"),
    ("debug", {"digest": 1}, "digest"),
    ("mesh", {"virtual_replicas": 2**31 - 1, "nodes": 8, "devices_per_node": 1}, "such as 2147483640 ["),
    ("mesh", {"nodes": 1025, "platform": "cpu"}, "nodes: nodes * devices_per_node is at most 1024"),
    ("mesh", {"devices_per_node": 65537}, "devices_per_node: nodes * devices_per_node is at most 65536"),
    ("mesh", {"nodes": 257, "devices_per_node": 256, "platform": "gpu"}, "nodes: nodes * devices_per_node is at most"),
    ("timeouts", {"init_seconds": 1e6 + 1}, "init_seconds"),
    ("timeouts", {"shutdown_seconds": 1e6 + 1}, "shutdown_seconds"),
    ("data", {"num_threads": 257}, "num_threads"),
    ("data", {"prefetch_batches": 1025}, "prefetch_batches"),
]


@pytest.mark.parametrize(("table", "keys"), ACCEPTED)
def test_accepts(table: str, keys: dict[str, Any]):
    assert config(**{table: keys})


@pytest.mark.parametrize(("table", "keys", "words"), REFUSED)
def test_refuses(table: str, keys: dict[str, Any], words: str):
    assert words in refusal(**{table: keys})


def test_one_table_reports_all_that_would_be_ignored():
    words = refusal(optimizer={"name": "adamw", "momentum": 0.9, "nesterov": True, "args": {"x": 1}})
    assert all(f"{key}: " in words for key in ("momentum", "nesterov", "args"))


def test_all_tables_that_disagree_are_reported():
    words = refusal(
        mesh={"virtual_replicas": 3},
        optimizer={"schedule": "linear", "warmup_steps": 1001},
        debug={"faults": [{"kind": "nan", "rank": 0, "step": 1}, {"kind": "nan", "rank": 0, "step": 2000}]},
    )
    assert all(key in words for key in ("data.global_batch", "optimizer.warmup_steps", "debug.faults[1].step"))
    assert "debug.faults[0]" not in words


@pytest.mark.parametrize(
    ("mesh", "num_devices"),
    [
        (Mesh(nodes=2, devices_per_node=4), 8),
        (Mesh(nodes=3, platform="cpu"), 3),
        (Mesh(nodes=3), None),
        (Mesh(nodes=3, platform="gpu"), None),
    ],
)
def test_num_devices(mesh: Mesh, num_devices: int | None):
    assert mesh.num_devices == num_devices


def test_arrays_become_tuples_at_any_depth():
    tree = config(task={"args": {"widths": [1, [2]], "deep": {"names": ["a"]}}}, optimizer={"frozen": ["a/*"]})
    assert tree.task.args == {"widths": (1, (2,)), "deep": {"names": ("a",)}}
    assert tree.optimizer.frozen == ("a/*",)


def test_args_do_not_alias_what_they_were_made_from():
    given = {"widths": [1]}
    tree = config(task={"args": given})
    given["widths"].append(2)
    assert tree.task.args == {"widths": (1,)}


def test_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        config().run.num_steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def tables_below(table: type[BaseModel]) -> list[type[BaseModel]]:
    """``table`` and every settings class that one of its fields mentions."""
    mentioned = [
        kind
        for field in table.model_fields.values()
        for kind in (field.annotation, *get_args(field.annotation))
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    ]
    return [table, *(deeper for kind in mentioned for deeper in tables_below(kind))]


def test_every_setting_is_described():
    tables = tables_below(Config)
    assert {table.__name__ for table in tables} >= {"Config", "Optimizer", "Fault"}
    for table in tables:
        assert issubclass(table, Settings)
        for name, field in table.model_fields.items():
            assert field.description or table is Config, f"{table.__name__}.{name}"


def test_every_optimizer_that_is_named_is_accepted():
    for name in get_args(OptimizerName):
        needed = {"sync": {"codec": "sign", "warmup_steps": 1}} if name == "onebit_adam" else {}
        assert config(optimizer={"name": name}, **needed).optimizer.name == name
