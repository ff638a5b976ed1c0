"""``lockstep bench sync``: what the exchange takes here, by algorithm and size, and the links that explain it.

The time is that of one exchange of a float32 vector among others in a loop on the device, with nothing else to do; of
several processes the slowest counts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console

from trainer import mesh as meshes
from trainer import runtime, sync
from trainer.config import Config
from trainer.errors import SettingsRefused
from trainer.evidence.exchange_table import Measured, Way, as_json, fitted, table
from trainer.evidence.output import deliver, number_of_bytes
from trainer.evidence.timing import agreed_repeats, in_turn, machine, once, slowest
from trainer.rundir import RunDir

LOOP_BYTES = 2**20
"""Exchanges smaller than this are repeated within one program, so that calling it costs little beside them."""

LONGEST_LOOP = 16


def run(
    config: Config,
    run_dir: RunDir,
    attempt: int,
    console: Console | None,
    *,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    seconds: float,
    json_path: str,
    profile_path: str,
) -> None:
    """Measures on the mesh of ``config``, shows a table, and writes what is asked for. Every process calls it.

    Args:
        sizes: bytes, multiples of four.
        seconds: how long to measure each size, all algorithms together.
        json_path: "" for none, "-" for standard output in place of the table.
        profile_path: where the fitted links go, for ``sync.profile``; "" for nowhere.

    Raises:
        SettingsRefused: there is nothing to exchange.
    """
    del run_dir, attempt
    mesh = meshes.make(config.mesh)
    if mesh.size == 1:
        raise SettingsRefused(
            "mesh.nodes * mesh.devices_per_node = 1: one replica exchanges nothing; set at least one of them to 2"
        )
    told, where = None if json_path == "-" else console, machine(mesh)
    measured: list[Measured] = []
    for size in sizes:
        if told is not None:
            told.print(f"exchanging {number_of_bytes(size)} …", highlight=False)
        measured += measure(mesh, ways(mesh, algorithms), size, seconds)
    if runtime.rank() == 0:
        profile = fitted(measured)
        deliver(console, json_path, as_json(where, measured, profile), lambda result: table(result, where))
        if profile_path:
            sync.write_profile(profile, Path(profile_path))


def ways(mesh: Mesh, algorithms: Sequence[str]) -> list[Way]:
    """The ways that differ on this mesh: across a single node there is nothing to choose."""
    across = sync.ACROSS if mesh.shape["node"] > 1 else sync.ACROSS[:1]
    return [Way(name, over) for name in algorithms for over in (across if name == "hierarchical" else ("ring",))]


def measure(mesh: Mesh, candidates: Sequence[Way], size: int, budget_seconds: float) -> list[Measured]:
    """Times all candidates at one size, in turn, for about ``budget_seconds`` in all; every process must call it."""
    loop = min(max(LOOP_BYTES // size, 1), LONGEST_LOOP)
    vector = meshes.place_rows(mesh, {"vector": np.ones((local_devices(mesh), size // 4), np.float32)})["vector"]
    programs = {way.name: exchange_program(mesh, way, loop) for way in candidates}

    def action(program: Callable[[jax.Array], jax.Array]) -> Callable[[], jax.Array]:
        def exchange() -> jax.Array:
            nonlocal vector  # donated: at the largest sizes there is no room for one each
            vector = program(vector)
            return vector

        return exchange

    actions = {name: action(program) for name, program in programs.items()}
    for compiling in actions.values():
        once(compiling)
    repeats = agreed_repeats(sum(once(exchange) for exchange in actions.values()), budget_seconds)
    everyone = runtime.agree("seconds", in_turn(actions, repeats, meet=meeting(mesh)))
    return [
        Measured(way, size, slowest([times[way.name] for times in everyone]) / loop, counted(mesh, way, size))
        for way in candidates
    ]


def exchange_program(mesh: Mesh, way: Way, loop: int) -> Any:
    """A jitted function that exchanges a vector of shape (replicas, n), a row for each, ``loop`` times over."""
    across = way.across if way.algorithm == "hierarchical" else "auto"
    transform = sync.all_reduce(mesh, algorithm=way.algorithm, across=across)

    def body(rows: jax.Array) -> jax.Array:
        def again(_: int, vector: jax.Array) -> Any:
            return transform.update(vector, transform.init(vector))[0]

        return jax.lax.fori_loop(0, loop, again, rows[0])[None]

    spec = PartitionSpec(meshes.AXES)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), donate_argnums=0)


def meeting(mesh: Mesh) -> Callable[[], jax.Array]:
    """An action that is done when all processes of ``mesh`` have begun it."""
    one = meshes.place_rows(mesh, {"one": np.ones(local_devices(mesh), np.float32)})["one"]
    spec = PartitionSpec(meshes.AXES)
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(jnp.sum(x), meshes.AXES), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )
    program = jax.jit(mapped)
    return lambda: program(one)


def local_devices(mesh: Mesh) -> int:
    """How many of the mesh's devices are this process's."""
    return sum(device.process_index == jax.process_index() for device in mesh.devices.flat)


def counted(mesh: Mesh, way: Way, size: int) -> sync.Traffic:
    """What one exchange of ``size`` bytes sends."""
    vector = jax.ShapeDtypeStruct((size // 4,), np.float32)
    return sync.traffic(vector, mesh.shape["node"], mesh.shape["local"], algorithm=way.algorithm, across=way.across)
