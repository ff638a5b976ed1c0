"""What the workers of the launch tests do in place of training."""

import hashlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console

from trainer import loop, runtime
from trainer.assembly import assemble
from trainer.checkpoint import shared
from trainer.config import Config
from trainer.errors import Halted, InputRefused, SettingsRefused
from trainer.resilience import progress
from trainer.rundir import RunDir, write_json
from trainer.step import train_program

AXES = ("node", "local")


def agree(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Sums ranks over all devices and exchanges host values, and writes what came out."""
    rank, count = runtime.rank(), runtime.num_processes()
    mesh = jax.make_mesh((config.mesh.nodes, jax.device_count() // config.mesh.nodes), AXES, (AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    x = jax.make_array_from_process_local_data(rows, np.full(jax.local_device_count(), rank + 1, np.float32))
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, AXES), mesh=mesh, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec()
        )
    )(x)
    runtime.barrier("after the sum")
    told = runtime.agree("values", {"rank": rank, "text": "ä" * 10**rank, "pair": (1, None)})
    write_json(
        run_dir.path / f"agreed-{rank}.json",
        {
            "devices": jax.device_count(),
            "local_devices": jax.local_device_count(),
            "total": float(total.addressable_data(0)[0]),
            "told": told,
            "processes": count,
            "attempt": attempt,
            "has_console": console is not None,
            "xla_flags": os.environ["XLA_FLAGS"],
            "proxy": os.environ.get("http_proxy"),
        },
    )
    print(f"a line in the log of rank {rank}")
    if console is not None:
        console.print(f"a line on the display, terminal: {console.is_terminal}", highlight=False)


def cached_step(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Takes steps with a donated argument, and writes the result's hash and how often a compiled program was found."""
    found = []
    jax.monitoring.register_event_listener(lambda event, **_: found.append(event) if "cache_hit" in event else None)
    mesh = jax.make_mesh((config.mesh.nodes, jax.device_count() // config.mesh.nodes), AXES, (AxisType.Auto,) * 2)

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2))(w)
        return w - 1e-3 * jax.lax.psum(gradient, AXES)

    specs = (PartitionSpec(), PartitionSpec(AXES))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    program = jax.jit(mapped, donate_argnums=0)
    draw = np.random.default_rng(0).normal
    w0, x0 = draw(size=(12, 64, 64)).astype(np.float32), draw(size=(64, 64)).astype(np.float32)
    w = jax.make_array_from_callback(w0.shape, NamedSharding(mesh, specs[0]), lambda index: w0[index])
    x = jax.make_array_from_callback(x0.shape, NamedSharding(mesh, specs[1]), lambda index: x0[index])
    for _ in range(3):
        w = program(w, x)
    digest = hashlib.sha256(np.asarray(w.addressable_data(0)).tobytes()).hexdigest()
    write_json(run_dir.path / f"cached-{runtime.rank()}.json", {"found": len(found), "digest": digest})


def compiled_step(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Compiles the train step, and writes how many all-reduces it has."""
    pieces = assemble(config)
    program = train_program(pieces.parts, pieces.work, pieces.schedule, pieces.shapes)
    text = program.lower(pieces.shapes, pieces.batch_shapes()).compile().as_text()
    write_json(run_dir.path / f"compiled-{runtime.rank()}.json", text.count(" all-reduce("))


def fail(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Rank 1 fails as the run's name says; the others wait inside a collective that it never joins."""
    Path(run_dir.path / f"pid-{runtime.rank()}").write_text(str(os.getpid()))
    runtime.barrier("all have written")
    if runtime.rank() == 1:
        errors = {
            "settings": SettingsRefused("data.global_batch = 7 does not fit"),
            "input": InputRefused("no such data"),
            "halt": Halted("loss is nan\nat rank 1, step 3"),
            "bug": RuntimeError("a bug in the model"),
            "memory": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes."),
        }
        if config.run.name in errors:
            raise errors[config.run.name]
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[config.run.name])
    runtime.barrier("never met")


def sleep(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Says that it is there, and stays."""
    Path(run_dir.path / f"pid-{runtime.rank()}").write_text(str(os.getpid()))
    sys.stdout.flush()
    time.sleep(600)


def vanish(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Loses its run directory, and halts."""
    shutil.rmtree(run_dir.path)
    raise Halted("the directory is gone")


def elsewhere(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Has its second checkpoint complete, and halts."""
    for step in (4, 7):
        if runtime.rank() == 0:
            progress.current().saved(step)
    raise Halted("stop here")


def refuse(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    raise SettingsRefused("refused")


def unshared(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Trains with a checkpoint directory of each rank's own, and does not wait long for the others' marks."""
    shared.SEEN_WITHIN_SECONDS = 2.0
    own = config.checkpoint.model_copy(update={"directory": f"rank-{runtime.rank()}"})
    loop.run(config.model_copy(update={"checkpoint": own}), run_dir, attempt, console)


def outlive(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Takes longer than any limit, leaving no marks."""
    time.sleep(2 * config.timeouts.init_seconds)
