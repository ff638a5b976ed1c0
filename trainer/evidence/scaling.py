"""``lockstep bench scaling``: the train step on 1, 2, 4, ... replicas, and where the time goes that is lost.

On each number of replicas three things are timed in turn: the whole step; the step of each process by itself, its
gradients summed with nobody; and the exchange of a gradient by itself. What that amounts to is in scaling_table.py.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console

from trainer import mesh as meshes
from trainer import runtime
from trainer import state as states
from trainer.assembly import Assembly, assemble, exchange_of
from trainer.config import Config
from trainer.errors import Halted, SettingsRefused
from trainer.evidence.exchange_bench import local_devices, meeting
from trainer.evidence.output import deliver
from trainer.evidence.scaling_table import Point, Row, Times, as_json, row, table
from trainer.evidence.timing import Action, agreed_repeats, in_turn, machine, once
from trainer.rundir import RunDir
from trainer.state import TrainState
from trainer.step import train_program


def run(
    config: Config,
    run_dir: RunDir,
    attempt: int,
    console: Console | None,
    *,
    fixed_batch: bool,
    seconds: float,
    json_path: str,
) -> None:
    """Measures ``config``'s step on 1, 2, 4, ... of its replicas. Every process calls it.

    Args:
        fixed_batch: whether the global batch stays the same (strong scaling), rather than the batch per replica.
        seconds: how long to measure each number of replicas.
        json_path: "" for none, "-" for standard output in place of the table.

    Raises:
        SettingsRefused: the settings do not fit each other, or there is but one replica.
        Halted: the numbers are not finite, so that steps were skipped and times mean nothing.
    """
    del run_dir, attempt
    pieces = assemble(config)
    if pieces.mesh.size == 1:
        raise SettingsRefused(
            "mesh.nodes * mesh.devices_per_node = 1: there is nothing to scale to; set at least one of them to 2"
        )
    told, where = None if json_path == "-" else console, machine(pieces.mesh)
    rows: list[Row] = []
    for point in points(pieces.mesh.shape["node"], pieces.mesh.shape["local"]):
        if told is not None:
            told.print(f"{point.replicas} of {pieces.mesh.size} replicas …", highlight=False)
        batch = pieces.config.data.global_batch // (1 if fixed_batch else pieces.mesh.size // point.replicas)
        everyone = [times for times in runtime.agree("times", measure(pieces, point, batch, seconds)) if times]
        rows.append(row(point, batch, everyone, rows[0] if rows else None))
    if runtime.rank() == 0:
        deliver(console, json_path, as_json(where, rows, fixed_batch), lambda result: table(rows, where, fixed_batch))


def points(num_nodes: int, devices_per_node: int) -> list[Point]:
    """1, 2, 4, ... devices of one node, then all devices of 2, 4, ... nodes; of both also all there are.

    >>> [point.replicas for point in points(3, 4)]
    [1, 2, 4, 8, 12]
    """
    within = [Point(1, count) for count in _doublings(devices_per_node)]
    return [*within, *(Point(count, devices_per_node) for count in _doublings(num_nodes)[1:])]


def _doublings(largest: int) -> list[int]:
    return sorted({*(2**power for power in range(largest.bit_length())), largest})


def measure(pieces: Assembly, point: Point, batch: int, budget_seconds: float) -> Times | None:
    """This process's times at ``point`` with a global ``batch``; None if none of the devices are its own."""
    mesh = Mesh(pieces.mesh.devices[: point.nodes, : point.devices_per_node], meshes.AXES)
    num_local = local_devices(mesh)
    if not num_local:
        agreed_repeats(None, budget_seconds)
        return None
    mine = [device for device in mesh.devices.flat if device.process_index == runtime.rank()]
    local = Mesh(np.array(mine).reshape(1, -1), meshes.AXES)
    whole, alone = on_mesh(pieces, mesh, batch), on_mesh(pieces, local, batch // mesh.size * num_local)
    alone = dataclasses.replace(alone, parts=alone.parts._replace(sync=optax.identity()))
    alone = dataclasses.replace(alone, shapes=states.abstract(alone.parts, local))
    steps, computes = Steps(whole), Steps(alone)
    actions = {"step": steps, "compute": computes, "exchange": exchanging(whole, steps.state)}
    for compiling in actions.values():
        once(compiling)
    repeats = agreed_repeats(sum(once(action) for action in actions.values()), budget_seconds)
    times = in_turn(actions, repeats, meeting(mesh))
    steps.check()
    return times


def on_mesh(pieces: Assembly, mesh: Mesh, batch: int) -> Assembly:
    """``pieces`` for a global ``batch`` on some of their devices, each with as many virtual replicas as before.

    The mapping is shard_map, whatever the settings say, for pmap has costs of its own at every call.
    """
    rounds = pieces.work.rounds
    data = pieces.config.data.model_copy(update={"global_batch": batch})
    summing = pieces.config.sync.model_copy(update={"mapping": "shard_map"})
    config = pieces.config.model_copy(update={"data": data, "sync": summing})
    parts = pieces.parts._replace(sync=exchange_of(config, mesh, pieces.profile, pieces.links.num_hosts))
    return dataclasses.replace(
        pieces,
        config=config,
        mesh=mesh,
        parts=parts,
        work=pieces.work._replace(mesh=mesh, num_virtual_replicas=rounds * mesh.size, mapping="shard_map"),
        shapes=states.abstract(parts, mesh),
    )


class Steps:
    """Calling it takes one step, always on the same batch."""

    def __init__(self, pieces: Assembly) -> None:
        self._program = train_program(pieces.parts, pieces.work, pieces.schedule, pieces.shapes)
        self._batch = some_batch(pieces)
        self.state: TrainState = states.create_on_mesh(pieces.parts, pieces.mesh, pieces.config.run.seed)

    def __call__(self) -> Any:
        self.state, report = self._program(self.state, self._batch)
        return self.state, report

    def check(self) -> None:
        """Raises Halted if a step was skipped, since that takes another time."""
        steps, updates = int(self.state.step), int(self.state.num_updates)
        if updates < steps:
            raise Halted(
                f"{steps - updates} of {steps} steps on the first batch were not finite, so their times mean nothing: "
                "lower optimizer.learning_rate"
            )


def some_batch(pieces: Assembly) -> dict[str, jax.Array]:
    """A batch made of this process's rows of the first one, which are repeated where they are too few."""
    rows = pieces.prepare_rows(pieces.loader.read(0), step=0)
    count = pieces.config.data.global_batch // pieces.mesh.size * local_devices(pieces.mesh)
    return meshes.place_rows(
        pieces.mesh, {name: np.resize(value, (count, *value.shape[1:])) for name, value in rows.items()}
    )


def exchanging(pieces: Assembly, state: TrainState) -> Action:
    """An action that exchanges a gradient of zeros."""
    shapes, spec = (
        states.trainable_part(pieces.parts, pieces.shapes.params),
        states.specs(pieces.shapes, pieces.mesh).sync,
    )
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    carried = (meshes.place_replicated(pieces.mesh, zeros), jax.tree.map(jax.numpy.copy, state.sync))

    def body(gradient: Any, sync_state: Any) -> Any:
        return pieces.parts.sync.update(gradient, sync_state)

    specs = (PartitionSpec(), spec)
    mapped = jax.shard_map(body, mesh=pieces.mesh, in_specs=specs, out_specs=specs, check_vma=False)
    program = jax.jit(mapped, donate_argnums=(0, 1))

    def action() -> Any:
        nonlocal carried
        carried = program(*carried)
        return carried

    return action
