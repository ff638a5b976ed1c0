"""Tasks that are small enough to be worked through by hand, and states and steps made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from trainer import mesh as meshes
from trainer import optimizer as optimizers
from trainer import sync
from trainer.config import Optimizer
from trainer.mapping import Mapping, mapped_mesh
from trainer.report import Report, read
from trainer.state import Parts, TrainState, abstract, create_on_mesh
from trainer.step import Work, train_program
from trainer.task import Batch, LossParts, Sums


@dataclass(frozen=True)
class Linear:
    """loss = sum over rows of weight * (x . w): the gradient is the weighted sum of the rows."""

    num_inputs: int = 2

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        return {"w": jnp.zeros(self.num_inputs)}, {}

    def weight(self, batch: Batch) -> jax.Array:
        return jnp.sum(batch["weight"] * batch.get("tokens", jnp.ones_like(batch["weight"])))

    def loss(self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array, axes: Any) -> Any:
        return jnp.sum(batch["weight"] * (batch["x"] @ params["w"])), LossParts({}, ())

    def next_model_state(self, model_state: Any, statistics: Any) -> Any:
        return model_state

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> Sums:
        return {"loss": (jnp.sum(batch["weight"] * (batch["x"] @ params["w"])), jnp.sum(batch["weight"]))}


@dataclass(frozen=True)
class Perceptron(Linear):
    """A two-layer tanh network with squared loss, and dropout on its inputs where ``dropout`` > 0."""

    num_inputs: int = 5
    dropout: float = 0.0

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        return {
            "hidden": {"kernel": 0.5 * jax.random.normal(first, (self.num_inputs, 8)), "bias": jnp.full(8, 0.1)},
            "out": {"kernel": 0.5 * jax.random.normal(second, (8, 1)), "bias": jnp.zeros(1)},
        }, {}

    def loss(self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array, axes: Any) -> Any:
        x = batch["x"]
        if self.dropout:
            x = jnp.where(jax.random.bernoulli(key, 1 - self.dropout, x.shape), x / (1 - self.dropout), 0)
        return jnp.sum(batch["weight"] * self._errors(params, x, batch["y"])), LossParts({}, ())

    def evaluate(self, params: Any, model_state: Any, batch: Batch) -> Sums:
        errors = self._errors(params, batch["x"], batch["y"])
        return {"loss": (jnp.sum(batch["weight"] * errors), jnp.sum(batch["weight"]))}

    def _errors(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return ((hidden @ params["out"]["kernel"] + params["out"]["bias"])[:, 0] - y) ** 2


def mesh_of(nodes: int, local: int) -> Mesh:
    """A mesh over the first of the emulated devices."""
    return Mesh(np.array(jax.devices()[: nodes * local]).reshape(nodes, local), meshes.AXES)


def rows(num_rows: int, num_inputs: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of random rows, all of weight 1."""
    generator = np.random.default_rng(seed)
    return {
        "x": generator.normal(size=(num_rows, num_inputs)).astype(np.float32),
        "y": generator.normal(size=num_rows).astype(np.float32),
        "weight": np.ones(num_rows, np.float32),
    }


class Runner:
    """A train program on a mesh, with its state."""

    def __init__(
        self,
        task: Any,
        mesh: Mesh,
        settings: Optimizer,
        *,
        num_virtual_replicas: int | None = None,
        seed: int = 0,
        mapping: Mapping = "shard_map",
        all_reduce: Callable[..., Any] = sync.all_reduce,
        exchange: dict[str, Any] | None = None,
    ) -> None:
        self.mesh, self.num_traces = mesh, 0
        shapes = jax.eval_shape(lambda: task.init(jax.random.key(0))[0])
        trainable = optimizers.trainable_mask(shapes, settings.frozen)
        chain: optax.GradientTransformation = optimizers.build(settings, 100, optimizers.split(shapes, trainable)[0])
        work = Work(mesh, num_virtual_replicas or mesh.size, seed, mapping)
        summed = all_reduce(
            mapped_mesh(mesh, mapping),
            axes=work.axes,
            devices_per_node=mesh.devices.shape[1],
            reduce="sum",
            **(exchange or {}),
        )
        self.parts = Parts(task, chain, summed, trainable)
        self.state: TrainState = create_on_mesh(self.parts, mesh, seed)
        schedule = optimizers.schedule(settings, 100)
        self.program = train_program(self.parts, work, schedule, abstract(self.parts, mesh))

    def step(self, batch: dict[str, np.ndarray]) -> Report:
        """Takes one step, and returns its report on the host."""
        self.state, report = self.program(self.state, meshes.place_rows(self.mesh, batch))
        return read(report)

    @property
    def params(self) -> Any:
        return jax.device_get(self.state.params)
