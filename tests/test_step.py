"""The step against plain NumPy and single-device JAX: weights, clipping, non-finite policy, virtual replicas."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import Linear, Perceptron, Runner, mesh_of, rows

from trainer import mesh as meshes
from trainer.config import Optimizer
from trainer.data.source import FAULT, RESERVED_NAMES
from trainer.errors import Halted
from trainer.metrics import mean
from trainer.recorder import judge
from trainer.report import Report, pack, read
from trainer.step import sum_over_rounds
from trainer.task import LossParts

SGD = Optimizer(name="sgd", learning_rate=0.1)
MESHES = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 3), (3, 2), (2, 4), (1, 8)]


def single_device_sgd(task, params, batch, num_steps, optimizer):
    """The naive version: one jitted gradient of the mean loss over the union batch."""
    weight = batch["weight"].sum()

    @jax.jit
    def gradient(params):
        return jax.grad(lambda p: task.loss(p, {}, batch, key=jax.random.key(0), axes=())[0] / weight)(params)

    state, gradients = optimizer.init(params), []
    for _ in range(num_steps):
        gradients.append(gradient(params))
        updates, state = optimizer.update(gradients[-1], state, params)
        params = optax.apply_updates(params, updates)
    return params, gradients


def assert_trees_close(actual, expected, bound):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound), actual, expected)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_last_round_apart_changes_no_bit(rounds):
    rows = np.random.default_rng(0).normal(size=(3 * rounds, 4)).astype(np.float32)

    def of(index, batch):
        return {"sum": jnp.sum(batch["x"] * (index + 1)), "columns": jnp.sum(batch["x"], axis=0)}

    def total(first, batch, last_apart):
        return sum_over_rounds(of, batch, rounds, first, last_apart)

    looped, apart = (jax.jit(total, static_argnums=2)(jnp.int32(7), {"x": rows}, way) for way in (False, True))
    expected = sum((index + 8) * part.sum() for index, part in enumerate(np.split(rows.astype(np.float64), rounds)))
    np.testing.assert_allclose(apart["sum"], expected, rtol=1e-5)
    assert [leaf.tobytes() for leaf in jax.tree.leaves(looped)] == [leaf.tobytes() for leaf in jax.tree.leaves(apart)]


@pytest.mark.parametrize(("nodes", "local"), MESHES)
@pytest.mark.parametrize("rounds", [1, 2])
def test_one_update_is_that_of_the_union_batch(nodes, local, rounds):
    task, batch = Perceptron(), rows(96)
    batch["weight"][5:29] = 0
    run = Runner(task, mesh_of(nodes, local), SGD, num_virtual_replicas=nodes * local * rounds)
    expected, gradients = single_device_sgd(task, run.params, batch, 1, optax.sgd(0.1))
    report = run.step(batch)
    assert_trees_close(run.params, expected, 1e-6)
    assert report.grad_norm == pytest.approx(float(optax.tree.norm(gradients[0])), rel=1e-6)
    assert report.examples == 72


def test_adamw_follows_single_device_jax_for_several_steps():
    task, batch = Perceptron(), rows(24)
    settings = Optimizer(name="adamw", learning_rate=1e-2, eps=1e-3)
    run = Runner(task, mesh_of(2, 4), settings, num_virtual_replicas=24)
    expected, _ = single_device_sgd(task, run.params, batch, 5, optax.adamw(1e-2, eps=1e-3, weight_decay=0))
    for _ in range(5):
        run.step(batch)
    assert_trees_close(run.params, expected, 2e-6)


def test_twelve_replicas_worth_of_work_on_four_is_the_same_run():
    """V = 12 as 4 x 3 and as 2 x 6: parameters, counters and schedule."""
    settings = Optimizer(name="sgd", learning_rate=0.1, momentum=0.9, schedule="cosine", warmup_steps=2)
    runs = [
        Runner(Perceptron(dropout=0.5), mesh_of(*shape), settings, num_virtual_replicas=12)
        for shape in [(2, 3), (4, 1), (1, 2)]
    ]
    for step in range(4):
        reports = [run.step(rows(48, seed=step)) for run in runs]
    for run, report in zip(runs[1:], reports[1:], strict=True):
        assert_trees_close(run.params, runs[0].params, 1e-6)
        assert report.learning_rate == reports[0].learning_rate
        assert (report.step, report.num_updates) == (4, 4)


def test_losses_are_weighted_by_tokens():
    """Loss sums (2 over 1 token) and (90 over 9 tokens) give 9.2, not the mean of the means, 6.0."""
    run = Runner(Linear(1), mesh_of(1, 2), SGD)
    run.state = run.state._replace(params=jax.tree.map(jnp.ones_like, run.state.params))
    batch = {"x": np.float32([[2], [90]]), "weight": np.ones(2, np.float32), "tokens": np.float32([1, 9])}
    assert mean(*run.step(batch).metrics["loss"]) == pytest.approx(9.2, rel=1e-6)


def test_one_replica_fully_masked_counts_for_nothing():
    batch = rows(16)
    batch["weight"][8:] = 0
    batch["x"][8:] = 1e3
    run = Runner(Perceptron(), mesh_of(2, 2), SGD)
    expected, _ = single_device_sgd(Perceptron(), run.params, {k: v[:8] for k, v in batch.items()}, 1, optax.sgd(0.1))
    run.step(batch)
    assert_trees_close(run.params, expected, 1e-6)


def test_an_all_masked_batch_changes_nothing_and_logs_finite_numbers():
    batch = rows(16)
    batch["weight"][:] = 0
    run = Runner(Perceptron(), mesh_of(2, 2), Optimizer(name="adamw", weight_decay=0.1))
    before = run.params
    report = run.step(batch)
    jax.tree.map(np.testing.assert_array_equal, run.params, before)
    assert (report.step, report.num_updates, report.consecutive_skips) == (1, 0, 0)
    assert not report.applied
    assert mean(*report.metrics["loss"]) == 0.0
    assert report.grad_norm == 0.0


def test_clipping_comes_after_the_exchange():
    """Rank gradients (3, 0) and (0, 4): their mean has norm 2.5, and is clipped to (0.6, 0.8)."""
    run = Runner(Linear(), mesh_of(2, 1), Optimizer(name="sgd", learning_rate=1.0, clip_norm=1.0))
    report = run.step({"x": np.float32([[3, 0], [0, 4]]), "weight": np.ones(2, np.float32)})
    np.testing.assert_allclose(run.params["w"], [-0.6, -0.8], rtol=1e-6)
    assert report.grad_norm == pytest.approx(2.5)


def test_a_zero_gradient_with_limit_zero_stays_zero():
    run = Runner(Linear(), mesh_of(2, 1), Optimizer(name="sgd", learning_rate=1.0, clip_norm=0.0))
    run.step({"x": np.zeros((2, 2), np.float32), "weight": np.ones(2, np.float32)})
    np.testing.assert_array_equal(run.params["w"], [0, 0])


@pytest.mark.parametrize(("rounds", "platform"), [(1, "cpu"), (3, "cpu"), (1, "default")])
def test_a_non_finite_step_leaves_everything_but_the_step_as_it_was(rounds, platform, monkeypatch):
    """Also in the form that accelerators get, which selects instead of branching."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda old, **by_platform: by_platform[platform](old))
    settings = Optimizer(name="adamw", non_finite="skip", ema_decay=0.9)
    run, clean = (
        Runner(Perceptron(dropout=0.3), mesh_of(2, 2), settings, num_virtual_replicas=4 * rounds) for _ in range(2)
    )
    bad = rows(24, seed=1)
    bad["x"][7] = np.nan  # replica 1
    run.step(rows(24))
    before = jax.device_get(run.state)
    report = run.step(bad)
    after = jax.device_get(run.state)
    assert report.non_finite.tolist() == [0, 1, 0, 0]
    assert (report.step, report.num_updates, report.consecutive_skips) == (2, 1, 1)
    counters = {"step": after.step, "consecutive_skips": after.consecutive_skips}
    jax.tree.map(np.testing.assert_array_equal, after, before._replace(**counters))

    report = run.step(rows(24, seed=2))
    assert (report.num_updates, report.consecutive_skips) == (2, 0)
    clean.step(rows(24))
    clean.state = clean.state._replace(step=clean.state.step + 1)  # the skipped batch still draws its own randomness
    clean.step(rows(24, seed=2))
    jax.tree.map(np.testing.assert_array_equal, run.params, clean.params)


def test_a_sum_that_overflows_is_skipped_though_each_contribution_is_finite():
    run = Runner(Linear(), mesh_of(2, 1), Optimizer(name="sgd", learning_rate=1.0, non_finite="skip"))
    huge = np.float32([[3e38, 0], [3e38, 0]])
    report = run.step({"x": huge, "weight": np.ones(2, np.float32), "tokens": np.float32([0.5, 0.5])})
    assert report.non_finite.tolist() == [0, 0]
    assert report.consecutive_skips == 1
    np.testing.assert_array_equal(run.params["w"], [0, 0])


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_a_weight_that_is_no_number_of_examples_counts_as_non_finite(weight):
    run = Runner(Linear(), mesh_of(1, 1), Optimizer(name="sgd", learning_rate=1.0, non_finite="skip"))
    report = run.step(
        {"x": np.ones((1, 2), np.float32), "weight": np.ones(1, np.float32), "tokens": np.full(1, weight, np.float32)}
    )
    assert (report.consecutive_skips, report.num_updates, bool(report.applied)) == (1, 0, False)
    with pytest.raises(Halted, match=r"weight of the batch of step 1 is"):
        judge(report, Optimizer(name="sgd", non_finite="halt"), np.zeros(1, int))


def test_an_array_of_the_source_named_fault_is_an_array_like_any_other():
    batch = {"x": np.float32([[1, 2]]), "weight": np.ones(1, np.float32)}
    with_fault, without = (Runner(Linear(), mesh_of(1, 1), SGD) for _ in range(2))
    with_fault.step({**batch, "fault": np.ones(1, np.float32)})
    without.step(batch)
    np.testing.assert_array_equal(with_fault.params["w"], without.params["w"])
    assert FAULT in RESERVED_NAMES


class Masks(Linear):
    """The gradient of weight v is the sum of a dropout mask over the rows whose one input is v."""

    def loss(self, params, model_state, batch, *, key, axes):
        mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return jnp.sum(jnp.where(mask, batch["x"], 0) @ params["w"]), LossParts({}, ())


def test_virtual_replicas_draw_their_own_randomness_and_keep_it_when_resized():
    """Identical rows: dropout differs between virtual replicas, and is the same on 8, 4 and 2 devices."""
    powers = np.tile(2.0 ** np.arange(4, dtype=np.float32), 8)
    inputs = np.eye(8, dtype=np.float32)[np.repeat(np.arange(8), 4)] * powers[:, None]
    masks = []
    for shape in [(2, 4), (2, 2), (1, 2)]:
        settings = Optimizer(name="sgd", learning_rate=32.0)  # undoes the division by the weight
        run = Runner(Masks(8), mesh_of(*shape), settings, num_virtual_replicas=8)
        run.step({"x": inputs, "weight": np.ones(32, np.float32)})
        masks.append(-run.params["w"])
    np.testing.assert_array_equal(masks[1], masks[0])
    np.testing.assert_array_equal(masks[2], masks[0])
    assert len(set(masks[0].tolist())) > 2


def test_initial_parameters_are_the_same_for_every_number_of_devices():
    first = Runner(Perceptron(), mesh_of(1, 1), SGD, seed=3).params
    for shape in [(1, 2), (2, 4)]:
        jax.tree.map(np.testing.assert_array_equal, Runner(Perceptron(), mesh_of(*shape), SGD, seed=3).params, first)


def test_frozen_parameters_are_neither_changed_nor_in_the_optimizer():
    run = Runner(Perceptron(), mesh_of(2, 2), Optimizer(name="adamw", frozen=("hidden/*",)))
    before = run.params
    run.step(rows(8))
    jax.tree.map(np.testing.assert_array_equal, run.params["hidden"], before["hidden"])
    assert not np.array_equal(run.params["out"]["kernel"], before["out"]["kernel"])
    assert not any(leaf.shape == (5, 8) for leaf in jax.tree.leaves(run.state.optimizer))


class Counted(Perceptron):
    """Counts how often its loss is traced."""

    traces = 0

    def loss(self, *args, **kwargs):
        type(self).traces += 1
        return super().loss(*args, **kwargs)


def test_the_step_compiles_once_and_donates_its_state():
    run = Runner(Counted(), mesh_of(2, 4), SGD)
    short = rows(16, seed=1)
    short["weight"][9:] = 0
    first = run.state
    run.step(rows(16))
    traces = Counted.traces
    assert traces > 0
    for batch in (short, rows(16, seed=2)):
        run.step(batch)
    assert Counted.traces == traces
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))


def test_nobody_waits_for_the_weight_of_a_batch_until_the_forward_pass_is_done():
    """Of the two all-reduces that XLA makes of a step, the first sums nothing but the weight and the examples."""
    run = Runner(Linear(), mesh_of(2, 4), SGD)
    batch = meshes.place_rows(run.mesh, {"x": np.ones((8, 2), np.float32), "weight": np.ones(8, np.float32)})
    program = run.program.lower(run.state, batch).compile().as_text()
    entry = program[program.index("\nENTRY ") :]
    sums = [line for line in entry.splitlines() if " all-reduce(" in line]
    assert len(sums) == 2
    assert len(re.findall(r"\w+\[", sums[0].split(" all-reduce(")[0])) == 1
    assert len(re.findall(r"\w+\[", sums[1].split(" all-reduce(")[0])) == 2


def test_a_report_is_read_bit_by_bit_as_it_was_packed():
    """Counters past 2**24 stay exact, NaN keeps its payload, and a narrow dtype comes back as it was."""
    payload = np.array([0x7FC01234, 0xFF800001], np.uint32).view(np.float32)
    values: dict[str, Any] = {
        "step": np.int32(2**31 - 1),
        "num_updates": np.int32(2**24 + 1),
        "consecutive_skips": np.int32(-1),
        "metrics": {"loss": (np.float32(1e-45), np.float32(-0.0)), "half": (jnp.bfloat16(1.5), np.float32(np.inf))},
        "examples": np.float32(3),
        "grad_norm": np.float32(np.nan),
        "learning_rate": np.float32(0.1),
        "non_finite": payload,
        "applied": np.bool_(True),
        "example_ids": np.arange(-1, 5, dtype=np.int32).reshape(2, 3),
    }
    report = Report(**values)
    back = read(jax.jit(pack)(report))
    assert jax.tree.structure(back) == jax.tree.structure(report)
    for actual, expected in zip(jax.tree.leaves(back), jax.tree.leaves(report), strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == np.asarray(expected).tobytes()
    assert read(pack(report._replace(example_ids=None))).example_ids is None
