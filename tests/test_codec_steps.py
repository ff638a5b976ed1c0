"""The train step with every codec: accumulation, uneven batches, the skip policy, clipping, bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import Perceptron, Runner, mesh_of, rows

from trainer import sync
from trainer.config import Optimizer

ARGS = {"topk": {"ratio": 0.25}, "randomk": {"ratio": 0.25}, "powersgd": {"rank": 1}}
RARE = ("bf16", "fp16", "int4")
"""Codecs that do nothing here that another does not do too."""

SGD = Optimizer(name="sgd", learning_rate=1.0, non_finite="skip")


class Half(Perceptron):
    """Computes in bfloat16; its parameters are float32."""

    def _errors(self, params, x, y):
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x, y))
        return super()._errors(*narrow).astype(jnp.float32)


def exchange_of(codec, **changes) -> dict[str, Any]:
    return {"codec": codec, "codec_args": ARGS.get(codec, {}), "error_feedback": True, **changes}


def uneven(seed=0):
    """96 rows, of which two of the eight virtual replicas have none."""
    batch = rows(96, seed=seed)
    batch["weight"][5:40] = 0
    return batch


def gradient_of(task, params, batch):
    weight = batch["weight"].sum()
    return jax.grad(lambda p: task.loss(p, {}, batch, key=jax.random.key(0), axes=())[0] / weight)(params)


def kept(run, name):
    """What is kept of each leaf, as the mean over its owners."""
    found = {"hidden": {}, "out": {}}
    for field in (run.state.sync.by_node, run.state.sync.by_shard, run.state.sync.by_replica):
        for path, leaf in jax.tree_util.tree_leaves_with_path(field.get(name, ()) if field else ()):
            found[path[0].key][path[1].key] = np.asarray(leaf).mean(axis=0)
    return found


def assert_is_skipped(run, batch):
    """The batch, once spoiled, changes nothing but the counters."""
    state = jax.device_get(run.state)
    batch["x"][50] = np.nan
    report = run.step(batch)
    assert report.non_finite.sum() == 1
    counters = {"step": state.step + 1, "consecutive_skips": state.consecutive_skips + 1}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state), state._replace(**counters))


@pytest.mark.parametrize(
    ("codec", "task"),
    [
        *(pytest.param(codec, Perceptron(), marks=[pytest.mark.slow] * (codec in RARE)) for codec in sync.CODECS),
        *(pytest.param(codec, Half(), id=f"{codec}-bfloat16") for codec in ("int8", "powersgd")),
    ],
)
def test_an_update_and_what_it_kept_are_the_gradient_of_the_union_batch(codec, task):
    run = Runner(task, mesh_of(2, 2), SGD, num_virtual_replicas=8, exchange=exchange_of(codec))
    before, batch = run.params, uneven()
    expected = gradient_of(task, before, batch)
    report = run.step(batch)
    residual = kept(run, "residual")
    # The bfloat16 gradient of a virtual replica's rows is rounded before it is summed.
    bound = 0.02 if isinstance(task, Half) else 2e-6
    for part, leaves in expected.items():
        for name, leaf in leaves.items():
            moved = before[part][name] - run.params[part][name]
            np.testing.assert_allclose(moved + residual[part].get(name, 0), leaf, rtol=0, atol=bound)
    assert residual["hidden"]
    assert report.num_updates == 1

    assert_is_skipped(run, batch)


def test_clipping_comes_after_the_exchange():
    clipped = Optimizer(name="sgd", learning_rate=1.0, clip_norm=1e-3)
    run = Runner(Perceptron(), mesh_of(2, 2), clipped, exchange=exchange_of("int8"))
    before = run.params
    report = run.step(rows(32))
    moved = jax.tree.map(np.subtract, before, run.params)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(moved)))
    assert report.grad_norm > 0.1
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_momentum_correction_of_what_is_sent_whole_is_momentum():
    """A rank of 4 saves nothing on such small matrices, so all leaves are exchanged exactly."""
    exchange: dict[str, Any] = {"codec": "powersgd", "error_feedback": True, "momentum_correction": 0.9}
    ours = Runner(Perceptron(), mesh_of(2, 2), SGD, num_virtual_replicas=8, exchange=exchange)
    plain = Runner(Perceptron(), mesh_of(2, 2), Optimizer(name="sgd", learning_rate=1.0, momentum=0.9))
    for run in (ours, plain):
        for seed in range(3):
            run.step(rows(32, seed=seed) | {"weight": uneven()["weight"][:32]})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours.params, plain.params)


@pytest.mark.parametrize(
    "codec", [pytest.param(codec, marks=[pytest.mark.slow] * (codec not in ("int8", "topk"))) for codec in sync.CODECS]
)
def test_momentum_correction_goes_with_accumulation_clipping_skips_and_uneven_batches(codec):
    """Of every step, against NumPy: what was sent is velocity plus old residual less new, and the update that, clipped.

    The third batch is spoiled: as if there had been none.
    """
    clipped = Optimizer(name="sgd", learning_rate=1.0, clip_norm=0.5, non_finite="skip")
    exchange = exchange_of(codec, momentum_correction=0.9)
    run = Runner(Perceptron(), mesh_of(2, 2), clipped, num_virtual_replicas=8, exchange=exchange)
    norms = []
    for seed in range(5):
        before, velocity, residual = run.params, kept(run, "velocity"), kept(run, "residual")
        batch = uneven(seed)
        if seed == 2:
            assert_is_skipped(run, batch)
            continue
        gradient = gradient_of(run.parts.task, before, batch)
        norms.append(float(run.step(batch).grad_norm))
        left = kept(run, "residual")
        sent = {
            (part, name): 0.9 * velocity[part][name] + leaf + residual[part].get(name, 0) - left[part].get(name, 0)
            for part, leaves in gradient.items()
            for name, leaf in leaves.items()
        }
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in sent.values()))
        assert norms[-1] == pytest.approx(norm, rel=1e-4)
        for (part, name), leaf in sent.items():
            moved = before[part][name] - run.params[part][name]
            np.testing.assert_allclose(moved, leaf * min(1.0, 0.5 / norm), rtol=0, atol=5e-6)
    assert max(norms) > 0.5
    assert left["hidden"]
    assert int(run.state.num_updates) == 4


FAST = (("int8", "slow"), ("powersgd", "slow"))
"""One codec for flat vectors and one for whole leaves; the others go the same ways."""


@pytest.mark.parametrize(
    ("codec", "compress"),
    [
        pytest.param(codec, compress, marks=[pytest.mark.slow] * ((codec, compress) not in FAST))
        for codec in sync.CODECS
        for compress in ("slow", "all")
    ],
)
def test_it_is_the_same_under_pmap(codec, compress):
    exchange = exchange_of(codec, compress=compress)
    runs = [Runner(Perceptron(), mesh_of(2, 2), SGD, mapping=name, exchange=exchange) for name in ("shard_map", "pmap")]
    for seed in range(3):
        for run in runs:
            run.step(rows(32, seed=seed))
    first, second = (jax.device_get(run.state) for run in runs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), first, second)
