"""The step under pmap is the step under shard_map: the same updates, reports and states, whatever the settings."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_step import Counted
from toy import Linear, Perceptron, Runner, mesh_of, rows

from models.batch_norm import weighted_moments
from trainer import loop, metrics, state, sync
from trainer.config import Config, Optimizer
from trainer.errors import SettingsRefused
from trainer.mapping import REPLICA, PmapProgram, check
from trainer.rundir import RunDir
from trainer.sync import SyncState
from trainer.task import LossParts

SGD = Optimizer(name="sgd", learning_rate=0.1, momentum=0.9)

ADAMW = Optimizer(name="adamw", learning_rate=1e-2, clip_norm=0.5, ema_decay=0.9, frozen=("hidden/bias",))


def pair(task, mesh, settings, **arguments):
    """Runs that differ in nothing but the mapping."""
    return [Runner(task, mesh, settings, mapping=mapping, **arguments) for mapping in ("shard_map", "pmap")]


def assert_same(left, right):
    # Bits, though programs that differ may round differently: XLA is given the same sums in the same order.
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(left), jax.device_get(right))


@pytest.mark.parametrize(
    ("nodes", "local", "settings", "rounds"), [(1, 1, SGD, 1), (2, 4, SGD, 1), (3, 2, ADAMW, 2), (4, 1, ADAMW, 3)]
)
def test_it_is_the_step_under_shard_map(nodes, local, settings, rounds):
    """Accumulation, dropout, padding, clipping, a moving average and frozen parameters; and arrays placed alike."""
    runs = pair(Perceptron(dropout=0.5), mesh_of(nodes, local), settings, num_virtual_replicas=nodes * local * rounds)
    for step in range(3):
        batch = rows(48, seed=step)
        batch["weight"][3:20] = 0
        first, second = (run.step(batch) for run in runs)
        assert_same(first, second)
    assert_same(runs[0].state, runs[1].state)
    for left, right in zip(jax.tree.leaves(runs[0].state), jax.tree.leaves(runs[1].state), strict=True):
        assert left.sharding == right.sharding


def test_a_non_finite_step_is_skipped_and_its_replica_named():
    runs = pair(Perceptron(), mesh_of(2, 2), Optimizer(name="adamw", non_finite="skip"))
    batch = rows(8)
    batch["x"][5] = np.nan
    for run in runs:
        run.step(rows(8, seed=1))
        report = run.step(batch)
        assert report.non_finite.tolist() == [0, 0, 1, 0]
        assert (report.step, report.num_updates, report.consecutive_skips) == (2, 1, 1)
    assert_same(runs[0].state, runs[1].state)


def test_it_compiles_once_and_donates_its_state():
    run = Runner(Counted(), mesh_of(2, 4), SGD, mapping="pmap")
    first, traces = run.state, None
    for seed in range(3):
        run.step(rows(16, seed=seed))
        traces = traces or Counted.traces
        assert Counted.traces == traces
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))


def keeping(mesh, *, axes, devices_per_node, reduce):
    """An exchange that keeps for each node, and for each replica, what has gone through it, as a codec would."""
    inner = sync.all_reduce(mesh, axes=axes, devices_per_node=devices_per_node, reduce=reduce)
    num_replicas = mesh.size

    def init(params):
        def owned(owners):
            return jax.tree.map(lambda leaf: jnp.zeros((owners, *leaf.shape)), params)

        return SyncState(by_node=owned(num_replicas // devices_per_node), by_replica=owned(num_replicas))

    def update(updates, state, params=None):
        del params
        index = jax.lax.axis_index(axes)
        by_node = jax.tree.map(lambda kept: kept + index // devices_per_node, state.by_node)
        by_replica = jax.tree.map(lambda kept, given: kept + given[None] + index, state.by_replica, updates)
        return inner.update(updates, ())[0], SyncState(by_node=by_node, by_replica=by_replica)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(("nodes", "local"), [(2, 3), (1, 2), (4, 1)])
def test_what_an_exchange_keeps_for_each_owner_survives(nodes, local):
    runs = pair(Linear(), mesh_of(nodes, local), SGD, all_reduce=keeping)
    for step in range(2):
        for run in runs:
            run.step(rows(12, 2, seed=step))
    kept = jax.device_get(runs[1].state.sync)
    np.testing.assert_array_equal(kept.by_node["w"], 2 * np.repeat(np.arange(nodes)[:, None], 2, 1))
    assert kept.by_replica["w"].shape == (nodes * local, 2)
    assert len({row.tobytes() for row in kept.by_replica["w"]}) == nodes * local
    assert_same(runs[0].state, runs[1].state)
    specs = state.specs(runs[1].state, mesh_of(nodes, local))
    expected = jax.tree.map(lambda spec: NamedSharding(runs[1].mesh, spec), specs.sync)
    assert jax.tree.map(lambda leaf: leaf.sharding, runs[1].state.sync) == expected


def test_blocks_of_several_rows_enter_and_leave():
    mesh, spec = mesh_of(2, 2), PartitionSpec(("node", "local"))

    def body(by_replica, by_node, everywhere):
        total = jax.lax.psum(jnp.sum(by_replica), REPLICA)
        return by_replica + by_node.sum(), by_node * 2, everywhere + total

    specs = (spec, PartitionSpec("node"), PartitionSpec())
    program = PmapProgram(body, mesh, specs, specs, donate=0)
    values = [np.arange(24.0, dtype=np.float32).reshape(12, 2), np.arange(4, dtype=np.float32), np.float32(1)]
    placed = [
        jax.device_put(np.float32(value), NamedSharding(mesh, spec)) for value, spec in zip(values, specs, strict=True)
    ]
    rows, nodes, one = program(*placed)
    np.testing.assert_array_equal(rows, values[0] + np.repeat([1, 5], 6)[:, None])
    np.testing.assert_array_equal(nodes, values[1] * 2)
    assert one == 1 + values[0].sum()
    assert [leaf.sharding.spec for leaf in (rows, nodes, one)] == list(specs)


def test_processes_with_different_numbers_of_devices_are_refused():
    devices = np.array([SimpleNamespace(process_index=rank) for rank in (0, 0, 0, 1)]).reshape(2, 2)
    mesh: Any = SimpleNamespace(devices=devices)
    check(mesh, "shard_map")
    with pytest.raises(SettingsRefused, match=r'sync.mapping = "pmap" needs as many .*, and they have 3, 1: set it'):
        check(mesh, "pmap")


class Normalised(Perceptron):
    """Its inputs are normalised over the rows of all replicas, whose mean it keeps."""

    def init(self, key):
        return super().init(key)[0], {"mean": jnp.zeros(self.num_inputs)}

    def loss(self, params, model_state, batch, *, key, axes):
        mean, var, weight = weighted_moments(batch["x"], batch["weight"], axes)
        x = (batch["x"] - mean) * jax.lax.rsqrt(var + 1e-5)
        total = jnp.sum(batch["weight"] * self._errors(params, x, batch["y"]))
        return total, LossParts({}, {"mean": weight * mean, "weight": weight})

    def next_model_state(self, model_state, statistics):
        return {"mean": 0.9 * model_state["mean"] + 0.1 * statistics["mean"] / statistics["weight"]}


def test_batch_norm_over_all_replicas_is_over_all_replicas():
    runs = pair(Normalised(), mesh_of(2, 4), SGD)
    batch = rows(24)
    batch["weight"][:7] = 0
    for run in runs:
        run.step(batch)
    assert_same(runs[0].state, runs[1].state)
    mean = jax.device_get(runs[1].state.model_state["mean"])
    np.testing.assert_allclose(mean, 0.1 * batch["x"][7:].mean(0), atol=1e-6)


CONFIG = {
    "task": {"target": "models.mlp:MLPClassifier"},
    "data": {"source": "digits", "global_batch": 48},
    "mesh": {"nodes": 2, "devices_per_node": 4, "platform": "cpu"},
    "debug": {"digest_every": 1},
    "observe": {"log_every_steps": 1},
}
CONFIG["task"]["args"] = {"image_size": 8, "channels": 1, "hidden": [8], "num_classes": 10, "dropout": 0.5}


def run(path, mapping, num_steps):
    """The rows of a run that starts, or goes on, in ``path``."""
    config = Config.model_validate({**CONFIG, "run": {"num_steps": num_steps}, "sync": {"mapping": mapping}})
    run_dir, attempt = RunDir.open(path, resume=path.exists())
    loop.run(config, run_dir, attempt, None)
    return metrics.read(run_dir.metrics)


@pytest.mark.slow
def test_a_run_may_change_its_mapping_when_it_is_resumed(tmp_path):
    whole = run(tmp_path / "whole", "shard_map", 4)
    run(tmp_path / "parts", "pmap", 2)
    run(tmp_path / "parts", "shard_map", 3)
    parts = run(tmp_path / "parts", "pmap", 4)
    assert parts[-1]["loss"] == whole[-1]["loss"]
    digests = [[row["param_digest"] for row in rows if row["kind"] == "train"] for rows in (whole, parts)]
    assert digests[0] == digests[1]
