"""A task that breaks its contract is refused in one line that names the method, before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toy import Linear, Perceptron
from toy_task import Mean

from trainer.errors import SettingsRefused
from trainer.task import LossParts
from trainer.task_check import Subject, check_evaluation, check_task

BATCH = {
    "x": jax.ShapeDtypeStruct((8, 5), jnp.float32),
    "y": jax.ShapeDtypeStruct((8,), jnp.float32),
    "weight": jax.ShapeDtypeStruct((8,), jnp.float32),
}


def check(task: Any) -> None:
    """Both checks, with virtual replicas of two rows."""
    subject = Subject(task, "m:Task", "toy")
    check_task(subject, BATCH, 2)
    check_evaluation(subject, BATCH, 2)


@pytest.mark.parametrize("task", [Perceptron(), Perceptron(dropout=0.5), Linear(5)])
def test_a_task_that_keeps_the_contract_passes(task):
    check(task)


def test_plain_tuples_pass():
    image = {"image": jax.ShapeDtypeStruct((8, 8, 8, 1), jnp.float32), "weight": BATCH["weight"]}
    mean: Any = Mean()
    check_task(Subject(mean, "m:Mean", "toy"), image, 2)


def _raise(error):
    raise error


GOOD = {"loss": (jnp.float32(0), jnp.float32(1))}


@pytest.mark.parametrize(
    ("method", "function", "words"),
    [
        ("init", lambda key: {"w": jnp.zeros(5)}, "init: must return two dicts, .* not a dict"),
        ("init", lambda key: (jnp.zeros(5), {}), "init: must return two dicts"),
        ("init", lambda key: ({"a": {"w": jnp.zeros(5, int)}}, {}), r"init: parameter 'a/w' is int32\[5\].*floats"),
        ("init", lambda key: ({"w": jnp.zeros((0, 5))}, {}), r"init: parameter 'w' is float32\[0, 5\].*nothing"),
        ("init", lambda key: ({"w": jnp.zeros(5)}, {"s": jnp.zeros(0)}), "model state 's'"),
        ("weight", lambda batch: batch["weight"], r"weight: must return a float scalar, not float32\[2\]"),
        ("weight", lambda batch: jnp.int32(3), "weight: must return a float scalar, not int32"),
        ("weight", lambda batch: batch["mask"], r"toy' \(x float32\[8, 5\].*weight raised KeyError: 'mask'"),
        ("weight", lambda batch: _raise(TypeError("first\nsecond")), "weight raised TypeError: first$"),
        ("loss", lambda *_, key, axes: jnp.float32(0), r"loss: must return \(loss, LossParts"),
        ("loss", lambda *_, key, axes: (jnp.zeros(2), LossParts({}, ())), "float scalar as the loss"),
        ("loss", lambda *_, key, axes: (jnp.float32(0), LossParts(GOOD, ())), "loss: metric 'loss': the trainer"),
        (
            "loss",
            lambda *_, key, axes: (jnp.float32(0), LossParts({"acc": jnp.float32(1)}, ())),
            r"loss: metric 'acc' must be \(sum, weight\)",
        ),
        ("next_model_state", lambda state, _: {"n": jnp.zeros(1)}, "next_model_state: must keep .* n is absent before"),
        ("evaluate", lambda *_: {}, "evaluate: must return 'loss'"),
        ("evaluate", lambda *_: {"loss": jnp.float32(0)}, "evaluate: metric 'loss' must be"),
        ("evaluate", lambda *_: GOOD | {"step": GOOD["loss"]}, "evaluate: metric 'step': the trainer"),
        ("evaluate", lambda *_: None, "evaluate: must give its metrics as a dict, not None"),
    ],
)
def test_a_broken_contract_is_refused(method, function, words):
    task = type("Broken", (Linear,), {method: staticmethod(function)})(5)
    with pytest.raises(SettingsRefused, match=words) as refusal:
        check(task)
    assert "m:Task" in str(refusal.value)
    assert "\n" not in str(refusal.value)
