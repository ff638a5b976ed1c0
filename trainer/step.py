"""One step in three pure functions (contribute, exchange, apply), and the one program they are composed into.

A *contribution* is a replica's gradient sum divided by the global weight: contributions add up to the gradient of the
mean loss over the whole batch, however the batch was shared out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from trainer import mapping as mappings
from trainer.data.source import FAULT
from trainer.mapping import Mapping
from trainer.mesh import AXES
from trainer.optimizer import ema_params, global_norm, merge
from trainer.report import PackedReport, Report, pack
from trainer.state import Parts, TrainState, specs, trainable_part
from trainer.task import Batch, LossParts, Sums


class Work(NamedTuple):
    """How a global batch is cut up: ``num_virtual_replicas`` slices, in order, over the replicas of ``mesh``.

    mapping: how the step is mapped over the replicas.
    """

    mesh: Mesh
    num_virtual_replicas: int
    seed: int
    mapping: Mapping = "shard_map"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the step talks to the other replicas."""
        return mappings.mapped_axes(self.mapping)

    @property
    def rounds(self) -> int:
        """Virtual replicas that each replica computes one after another."""
        return self.num_virtual_replicas // self.mesh.size

    @property
    def hides_exchange(self) -> bool:
        """Whether an exchange can run beside computation: between processes, of one device each if on CPUs."""
        devices = list(self.mesh.devices.flat)
        num_processes = len({device.process_index for device in devices})
        return num_processes > 1 and (num_processes == len(devices) or devices[0].platform != "cpu")


class Sum(NamedTuple):
    """What a replica adds up over its virtual replicas."""

    gradient: Any
    loss: jax.Array
    parts: LossParts


def sum_over_rounds(
    function: Callable[[jax.Array, Batch], Any], batch: Batch, rounds: int, first: jax.Array, last_apart: bool = False
) -> Any:
    """Adds up ``function(virtual_replica, rows)`` over this replica's virtual replicas, one after another.

    Args:
        function: from a virtual replica's index and its rows to a pytree of float32 arrays.
        batch: this replica's rows; dim 0 is a multiple of ``rounds``.
        rounds: how many virtual replicas there are in ``batch``.
        first: index of the first of them.
        last_apart: whether the last one is kept out of the loop, in which no part of a sum is there before all of it:
            so each array can be exchanged as soon as its last summand is known. It is compiled a second time for that.
    """
    if rounds == 1:
        return function(first, batch)
    slices = jax.tree.map(lambda rows: rows.reshape(rounds, rows.shape[0] // rounds, *rows.shape[1:]), batch)
    indices = first + jnp.arange(rounds)
    zero = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, shape.dtype),
        jax.eval_shape(function, first, jax.tree.map(lambda rows: rows[0], slices)),
    )

    def add(total: Any, item: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*item)), None

    if not last_apart:
        return jax.lax.scan(add, zero, (indices, slices))[0]
    before = jax.tree.map(lambda rows: rows[:-1], (indices, slices))
    last = jax.tree.map(lambda rows: rows[-1], (indices, slices))
    return add(jax.lax.scan(add, zero, before)[0], last)[0]


def contribute(parts: Parts, work: Work, state: TrainState, batch: Batch, weight: jax.Array) -> Sum:
    """This replica's contribution: the gradient summed over its rows and divided by the global ``weight``, in float32.

    The loss, metrics and statistics with it are sums, not divided.
    """
    step_key = jax.random.fold_in(jax.random.key(work.seed), state.step)
    divisor = jnp.where(weight > 0, weight, 1)

    def loss(trainable: Any, rows: Batch, key: jax.Array) -> tuple[jax.Array, tuple[jax.Array, LossParts]]:
        fault = rows.pop(FAULT, None)
        params = merge(trainable, state.params)
        total, loss_parts = parts.task.loss(params, state.model_state, rows, key=key, axes=work.axes)
        total = total if fault is None else total * (1 + jnp.sum(fault))
        return total / divisor, (total, loss_parts)  # dividing one number here spares a pass over the whole gradient

    def one(virtual_replica: jax.Array, rows: Batch) -> Sum:
        # Parameters are marked as varying, so that their gradient is not summed over the mesh behind our back.
        trainable = jax.lax.pcast(trainable_part(parts, state.params), work.axes, to="varying")
        key = jax.random.fold_in(step_key, virtual_replica)
        gradient, (total, loss_parts) = jax.grad(loss, has_aux=True)(trainable, dict(rows), key)
        return Sum(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient), total, loss_parts)

    first = jax.lax.axis_index(work.axes) * work.rounds
    return sum_over_rounds(one, batch, work.rounds, first, last_apart=work.hides_exchange)


def is_finite(contribution: Sum) -> jax.Array:
    """Whether a replica's own loss and gradient are all finite."""
    leaves = [contribution.loss, *jax.tree.leaves(contribution.gradient)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def only_if(wanted: jax.Array, change: Callable[[Any], Any], old: Any) -> Any:
    """``change(old)`` if ``wanted``, the same on every replica, or else ``old``.

    On CPUs by a branch, which is taken without copying ``old`` and costs nothing where it is not wanted. Elsewhere by
    computing the change and selecting, since a branch there makes the device wait for the host, or keeps it from
    fusing across it.
    """

    def branch(old: Any) -> Any:
        return jax.lax.cond(wanted, change, lambda old: old, old)

    def select(old: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), change(old), old)

    return jax.lax.platform_dependent(old, cpu=branch, default=select)


def non_finite(work: Work, contribution: Sum, suspected: jax.Array) -> jax.Array:
    """float32 of shape (replicas,), the same on each: 1 where a contribution is not finite; 0 if not ``suspected``."""

    def look(nobody: jax.Array) -> jax.Array:
        here = jax.nn.one_hot(jax.lax.axis_index(work.axes), work.mesh.size)
        return jax.lax.psum(jnp.where(is_finite(contribution), nobody, here), work.axes)

    return only_if(suspected, look, jnp.zeros(work.mesh.size))


def transposed(tree: Any) -> Any:
    """Every matrix transposed; undoes itself.

    The gradient of ``kernel`` in ``x @ kernel`` is computed as its transpose. It stays so from the exchange up to the
    optimizer, into which the way back is fused: anywhere before, above all in front of a branch, it would be a copy.
    """
    return jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, tree)


def exchange(parts: Parts, state: TrainState, contribution: Sum) -> tuple[Any, Any]:
    """The sum of all contributions, ``transposed``, identical bits on every replica; and the exchange's next state."""
    gradient, sync = parts.sync.update(contribution.gradient, state.sync)
    return transposed(gradient), sync


def apply(
    parts: Parts,
    state: TrainState,
    gradient: Any,
    sync: Any,
    statistics: Any,
    *,
    norm: jax.Array,
    wanted: jax.Array,
) -> TrainState:
    """Clips, updates, and counts; where not ``wanted``, only the step is counted and all else stays as it was.

    gradient, sync: as ``exchange`` returned them; norm: the gradient's global norm.
    statistics:     the task's, added up over all replicas.
    """

    def update(state: TrainState) -> TrainState:
        trainable = trainable_part(parts, state.params)
        updates, optimizer = parts.optimizer.update(transposed(gradient), state.optimizer, trainable, norm=norm)
        return state._replace(
            num_updates=state.num_updates + 1,
            params=merge(optax.apply_updates(trainable, updates), state.params),
            model_state=parts.task.next_model_state(state.model_state, statistics),
            optimizer=optimizer,
            sync=sync,
        )

    return only_if(wanted, update, state)._replace(step=state.step + 1)


def _step(
    parts: Parts, work: Work, schedule: optax.Schedule, state: TrainState, batch: Batch
) -> tuple[TrainState, PackedReport]:
    ids = batch.pop("example_id", None)
    weight, examples = jax.lax.psum((_weight(parts, batch), jnp.sum(batch["weight"])), work.axes)
    contribution = contribute(parts, work, state, batch, weight)
    gradient, sync = exchange(parts, state, contribution)
    loss, (metrics, statistics) = jax.lax.psum((contribution.loss, contribution.parts), work.axes)
    norm = global_norm(gradient)
    # One entry that is not finite makes the sum not finite, so a look at the sum says whether to look for whose it was.
    # The loss is named first, for then XLA sums it with the gradient; else with the weight, which everybody waits for.
    flags = non_finite(work, contribution, suspected=~(jnp.isfinite(loss) & jnp.isfinite(norm)))
    finite = (jnp.sum(flags) == 0) & jnp.isfinite(norm) & jnp.isfinite(weight) & (weight >= 0)
    wanted = finite & (weight > 0)
    after = apply(parts, state, gradient, sync, statistics, norm=norm, wanted=wanted)
    after = after._replace(consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1))
    report = Report(
        step=after.step,
        num_updates=after.num_updates,
        consecutive_skips=after.consecutive_skips,
        metrics={"loss": (loss, weight), **metrics},
        examples=examples,
        grad_norm=norm,
        learning_rate=jnp.asarray(schedule(state.num_updates), jnp.float32),
        non_finite=flags,
        applied=wanted,
        example_ids=None if ids is None else jax.lax.all_gather(ids, work.axes, tiled=True),
    )
    return after, pack(report)


def _weight(parts: Parts, batch: Batch) -> jax.Array:
    return parts.task.weight({name: rows for name, rows in batch.items() if name != FAULT})


def train_program(parts: Parts, work: Work, schedule: optax.Schedule, state: TrainState) -> Any:
    """The program ``(state, batch) -> (state, PackedReport)``, to be called or first lowered; the state is donated.

    Args:
        state: the state, or its shapes. The batch is sharded by replica.
    """
    state_specs = specs(state, work.mesh)

    def body(state: TrainState, batch: Batch) -> tuple[TrainState, PackedReport]:
        return _step(parts, work, schedule, state, dict(batch))

    in_specs, out_specs = (state_specs, PartitionSpec(AXES)), (state_specs, PartitionSpec())
    return mappings.program(body, work.mesh, work.mapping, in_specs, out_specs, donate=0)


def evaluation_program(parts: Parts, work: Work) -> Any:
    """The program ``(params, model_state, batch) -> Sums`` over all replicas, in inference mode; nothing is donated."""

    def body(params: Any, model_state: Any, batch: Batch) -> Sums:
        rows = {name: value for name, value in batch.items() if name != "example_id"}

        def one(virtual_replica: jax.Array, rows: Batch) -> Any:
            del virtual_replica
            return parts.task.evaluate(params, model_state, rows), jnp.sum(rows["weight"])

        sums, examples = jax.lax.psum(sum_over_rounds(one, rows, work.rounds, jnp.int32(0)), work.axes)
        return {**sums, "examples": (examples, jnp.ones(()))}

    in_specs = (PartitionSpec(), PartitionSpec(), PartitionSpec(AXES))
    return mappings.program(body, work.mesh, work.mapping, in_specs, PartitionSpec(), donate=())


def params_to_evaluate(state: TrainState) -> Any:
    """The parameters' moving average where the optimizer keeps one, or else the parameters."""
    average = ema_params(state.optimizer)
    return state.params if average is None else merge(average, state.params)
