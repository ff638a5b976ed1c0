"""Whether a task keeps the contract of ``trainer/task.py``, seen from the shapes alone: nothing is computed.

A fault found here is one line that names the method, before anything is compiled or trained.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.errors import LockstepError, SettingsRefused
from trainer.task import Task

Shapes = Mapping[str, jax.ShapeDtypeStruct]

RESERVED_METRICS = frozenset(
    {
        *("kind", "step", "num_updates", "epoch", "attempt", "learning_rate", "grad_norm", "examples"),
        *("step_seconds", "examples_per_second", "num_contributions", "non_finite", "param_digest", "example_ids"),
        "skipped",
    }
)
"""Keys of metrics.jsonl that the trainer writes itself."""


class Subject(NamedTuple):
    """The task under examination, and what to call it and its data: ``task.target`` and ``data.source``."""

    task: Task
    target: str
    source: str


def check_task(subject: Subject, batch: Shapes, rows: int) -> None:
    """Checks ``init``, ``weight``, ``loss`` and ``next_model_state``.

    Args:
        subject: the task.
        batch: shapes of a global training batch.
        rows: how many of its rows a virtual replica takes.

    Raises:
        SettingsRefused: names the method and what is wrong with it.
    """
    task = subject.task
    part = _with_rows(batch, rows)
    params, model_state = _fresh(subject, batch)
    weight = _trace(subject, "weight", batch, task.weight, part)
    if not _is_scalar(weight, jnp.floating):
        raise _refusal(subject, "weight", f"must return a float scalar, not {_describe(weight)}")

    def loss(params: Any, model_state: Any, rows: Any, key: jax.Array) -> Any:
        return task.loss(params, model_state, rows, key=key, axes=())

    key = jax.eval_shape(lambda: jax.random.key(0))
    result = _trace(subject, "loss", batch, loss, params, model_state, part, key)
    if not (_is_tuple(result, 2) and _is_tuple(result[1], 2)):
        raise _refusal(subject, "loss", f"must return (loss, LossParts(metrics, statistics)), not {_describe(result)}")
    total, (metrics, statistics) = result
    if not _is_scalar(total, jnp.floating):
        raise _refusal(subject, "loss", f"must return a float scalar as the loss, not {_describe(total)}")
    _check_metrics(subject, "loss", metrics, RESERVED_METRICS | {"loss"})
    after = _trace(subject, "next_model_state", batch, task.next_model_state, model_state, statistics)
    if (before := _leaves(model_state)) != (now := _leaves(after)):
        path = min(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
        raise _refusal(
            subject,
            "next_model_state",
            f"must keep names, shapes and dtypes, but {path or 'the state'} is {before.get(path, 'absent')} before "
            f"and {now.get(path, 'absent')} after",
        )


def check_evaluation(subject: Subject, batch: Shapes, rows: int) -> tuple[str, ...]:
    """Checks ``evaluate`` on the shapes of a global batch of the test split; otherwise like ``check_task``.

    Returns the names of its metrics.
    """
    params, model_state = _fresh(subject, batch)
    part = _with_rows(batch, rows)
    metrics = _trace(subject, "evaluate", batch, subject.task.evaluate, params, model_state, part)
    _check_metrics(subject, "evaluate", metrics, RESERVED_METRICS)
    if "loss" not in metrics:
        raise _refusal(subject, "evaluate", f"must return 'loss' among its metrics, which are {sorted(metrics)}")
    return tuple(sorted(metrics))


def _fresh(subject: Subject, batch: Shapes) -> tuple[Any, Any]:
    """Shapes of fresh parameters and model state."""
    result = _trace(subject, "init", batch, subject.task.init, jax.eval_shape(lambda: jax.random.key(0)))
    if not (_is_tuple(result, 2) and all(isinstance(part, Mapping) for part in result)):
        raise _refusal(subject, "init", f"must return two dicts, (params, model_state), not {_describe(result)}")
    params, model_state = result
    for what, tree in (("parameter", params), ("model state", model_state)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = f"{what} {_name(path)!r}"
            if 0 in leaf.shape:
                raise _refusal(subject, "init", f"{name} is {_describe(leaf)}, which holds nothing: leave it out")
            if what == "parameter" and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise _refusal(subject, "init", f"{name} is {_describe(leaf)}: parameters must be floats")
    return params, model_state


def _trace(subject: Subject, method: str, batch: Shapes, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except LockstepError:
        raise
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        shapes = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.items())
        raise SettingsRefused(
            f"task.target = {subject.target!r} cannot take the batches of data.source = {subject.source!r} ({shapes}):"
            f" {method} raised {type(error).__name__}: {reason}"
        ) from error


def _check_metrics(subject: Subject, method: str, metrics: Any, reserved: frozenset[str]) -> None:
    if not isinstance(metrics, Mapping):
        raise _refusal(subject, method, f"must give its metrics as a dict, not {_describe(metrics)}")
    for name, pair in metrics.items():
        if not isinstance(name, str):
            raise _refusal(subject, method, f"metric {name!r}: a name must be a string")
        if name in reserved:
            raise _refusal(subject, method, f"metric {name!r}: the trainer writes that itself; choose another name")
        if not (_is_tuple(pair, 2) and all(_is_scalar(number, jnp.number) for number in pair)):
            raise _refusal(
                subject, method, f"metric {name!r} must be (sum, weight), two scalars, not {_describe(pair)}"
            )


def _refusal(subject: Subject, method: str, fault: str) -> SettingsRefused:
    return SettingsRefused(f"task.target = {subject.target!r}: {method}: {fault}; see trainer/task.py")


def _with_rows(batch: Shapes, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((rows, *value.shape[1:]), value.dtype) for name, value in batch.items()}


def _is_tuple(value: Any, length: int) -> bool:
    return isinstance(value, tuple) and len(value) == length


def _is_scalar(value: Any, kind: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct) and value.shape == () and jnp.issubdtype(value.dtype, kind)


def _leaves(tree: Any) -> dict[str, str]:
    """Path -> dtype and shape."""
    return {_name(path): _describe(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _describe(value: Any) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
