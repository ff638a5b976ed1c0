"""Everything that training changes, as one pytree, and how each part of it lies on the mesh."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import mesh as meshes
from trainer import optimizer
from trainer.sync import state_specs
from trainer.task import Task


class TrainState(NamedTuple):
    """The state after ``step`` batches.

    step:              batches consumed, int32.
    num_updates:       updates applied, int32: steps less the skipped ones.
    consecutive_skips: steps skipped in a row up to now, int32.
    params, model_state: as the task made them.
    optimizer:         the optax state of the trainable parameters.
    sync:              what the exchange carries from step to step.
    """

    step: jax.Array
    num_updates: jax.Array
    consecutive_skips: jax.Array
    params: Any
    model_state: Any
    optimizer: Any
    sync: Any


class Parts(NamedTuple):
    """What a state is made by: the task, the optax chain, the exchange, and which parameters are trained.

    trainable: a pytree of bools like the parameters.
    """

    task: Task
    optimizer: optax.GradientTransformationExtraArgs
    sync: optax.GradientTransformation
    trainable: Any


def trainable_part(parts: Parts, params: Any) -> Any:
    """The trained parameters, with None (which JAX takes for nothing at all) in place of the frozen ones."""
    return optimizer.split(params, parts.trainable)[0]


def create(parts: Parts, key: jax.Array, start: Sequence[Any] | None = None) -> TrainState:
    """A fresh state on one device; a pure function of ``key``, or of ``start``: (params, model_state) to begin with."""
    params, model_state = start or parts.task.init(key)
    trainable = trainable_part(parts, params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        num_updates=zero,
        consecutive_skips=zero,
        params=params,
        model_state=model_state,
        optimizer=parts.optimizer.init(trainable),
        sync=parts.sync.init(trainable),
    )


def specs(state: TrainState, mesh: Mesh) -> TrainState:
    """The partition spec of each leaf: replicated, but for the state of the exchange, which knows its own."""
    replicated = jax.tree.map(lambda _: PartitionSpec(), state)
    return replicated._replace(sync=state_specs(state.sync, mesh=mesh))


def abstract(parts: Parts, mesh: Mesh) -> TrainState:
    """The shapes, dtypes and shardings of the state; nothing is computed."""
    shapes = jax.eval_shape(lambda: create(parts, jax.random.key(0)))

    def with_sharding(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(with_sharding, shapes, specs(shapes, mesh))


def create_on_mesh(parts: Parts, mesh: Mesh, seed: int, start: Sequence[Any] | None = None) -> TrainState:
    """A fresh state on the mesh, sharded as ``specs`` says; ``start``: (params, model_state) to begin with, in NumPy.

    It is computed on one device and copied, since a program for several devices may round differently: the initial
    parameters are the same for every number of devices.
    """
    exact = parts._replace(sync=optax.identity())
    fresh = jax.jit(lambda start: create(exact, jax.random.key(seed), start))(start)
    # What the exchange keeps for each owner would not fit on one device; and it starts with nothing.
    shapes = abstract(parts, mesh)
    trainable, shardings = trainable_part(parts, shapes.params), jax.tree.map(lambda leaf: leaf.sharding, shapes.sync)
    sync = jax.jit(lambda: parts.sync.init(trainable), out_shardings=shardings)()
    return meshes.place_replicated(mesh, fresh)._replace(sync=sync)
