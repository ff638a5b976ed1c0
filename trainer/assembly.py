"""From settings to the pieces of a run: mesh, data, task, optimizer and exchange, checked against each other.

Shapes first: nothing here computes on a device.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trainer import import_path, mapping, optimizer, runtime, sync
from trainer import mesh as meshes
from trainer.config import Config
from trainer.data import Loader, open_source
from trainer.data.source import FAULT
from trainer.errors import InputRefused, SettingsRefused, no_such
from trainer.resilience import faults
from trainer.state import Parts, TrainState, abstract
from trainer.step import Work
from trainer.task import Task
from trainer.task_check import Subject, check_task


@dataclass(frozen=True)
class Assembly:
    """The pieces of a run.

    config: the settings, with ``mesh.virtual_replicas`` made explicit.
    links:  what an exchange has to cross; profile: what ``sync.profile`` says of it.
    shapes: the train state's shapes, dtypes and shardings.
    blank:  stand-ins for this process's rows of a batch, all zeros that take no memory.
    attempt: which one this is, for failures that are staged in one only.
    """

    config: Config
    mesh: Mesh
    loader: Loader
    parts: Parts
    work: Work
    schedule: optax.Schedule
    shapes: TrainState
    blank: dict[str, np.ndarray]
    links: sync.Links
    profile: sync.Profile | None
    attempt: int = 1

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of a global batch as the train program takes it."""
        rows = self.prepare_rows(self.blank, step=0)
        batch = self.config.data.global_batch
        sharding = meshes.by_replica(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((batch, *value.shape[1:]), value.dtype, sharding=sharding)
            for name, value in rows.items()
        }

    def prepare_rows(self, rows: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
        """This process's rows for ``step``, with what debugging adds, and without ids that nobody asked for."""
        debug = self.config.debug
        rows = {name: value for name, value in rows.items() if name != "example_id" or debug.log_example_ids}
        if any(fault.kind == "nan" for fault in debug.faults):
            hit = faults.spoils(debug.faults, jax.process_index(), self.attempt, step)
            rows[FAULT] = np.full_like(rows["weight"], np.nan if hit else 0)
        return rows


def assemble(config: Config, attempt: int = 1) -> Assembly:
    """Builds the pieces; the backend has to be up.

    Raises:
        SettingsRefused: pieces that cannot be had, or that do not fit each other.
        InputRefused: data that cannot be used.
    """
    mesh = meshes.make(config.mesh)
    mapping.check(mesh, config.sync.mapping)
    num_virtual_replicas = resolve_virtual_replicas(config, mesh.size)
    config = with_virtual_replicas(config, num_virtual_replicas)
    _check_faults(config)
    source = open_source(config.data, "train")
    data = config.data
    loader = Loader(
        source,
        seed=config.run.seed,
        global_batch=data.global_batch,
        rows=meshes.local_rows(mesh, data.global_batch),
        num_threads=data.num_threads,
        prefetch_batches=data.prefetch_batches,
    )
    blank = {name: np.broadcast_to(np.zeros((), rows.dtype), rows.shape) for name, rows in loader.read(0).items()}
    _check_same_data(loader.num_examples, blank)
    task = build_task(config)
    batch = task_batch_shapes(blank, data.global_batch)
    check_task(Subject(task, config.task.target, data.source), batch, data.global_batch // num_virtual_replicas)
    params = jax.eval_shape(lambda: task.init(jax.random.key(0))[0])
    trainable = optimizer.trainable_mask(params, config.optimizer.frozen)
    trained_shapes, _ = optimizer.split(params, trainable)
    work = Work(mesh, num_virtual_replicas, config.run.seed, config.sync.mapping)
    links, profile = find_links(mesh), agreed_profile(config.sync.profile)
    parts = Parts(
        task=task,
        optimizer=optimizer.build(config.optimizer, config.run.num_steps, trained_shapes),
        sync=exchange_of(config, mesh, profile, links.num_hosts),
        trainable=trainable,
    )
    return Assembly(
        config=config,
        mesh=mesh,
        loader=loader,
        parts=parts,
        work=work,
        schedule=optimizer.schedule(config.optimizer, config.run.num_steps),
        shapes=abstract(parts, mesh),
        blank=blank,
        links=links,
        profile=profile,
        attempt=attempt,
    )


def exchange_of(
    config: Config, mesh: Mesh, profile: sync.Profile | None, num_hosts: int | None
) -> optax.GradientTransformation:
    """The exchange that ``[sync]`` asks for, over ``mesh``, however the step is mapped over it.

    Of onebit_adam it is that optimizer's too, up to the learning rate.
    """
    settings, mapped = config.optimizer, mapping.mapped_mesh(mesh, config.sync.mapping)
    exchange = sync.all_reduce
    if settings.name == "onebit_adam":
        exchange = partial(sync.onebit_adam, beta1=settings.beta1, beta2=settings.beta2, eps=settings.eps)
    return exchange(
        mapped,
        axes=mapping.mapped_axes(config.sync.mapping),
        devices_per_node=meshes.devices_per_node(mesh),
        algorithm=config.sync.algorithm,
        across=config.sync.across,
        bucket_mib=config.sync.bucket_mib,
        reduce="sum",
        profile=profile,
        num_hosts=num_hosts,
        codec=config.sync.codec,
        codec_args=config.sync.args,
        compress=config.sync.compress,
        error_feedback=config.sync.error_feedback and config.sync.codec != "none",
        warmup_steps=config.sync.warmup_steps,
        momentum_correction=config.sync.momentum_correction,
        seed=config.run.seed,
    )


def find_links(mesh: Mesh) -> sync.Links:
    """What an exchange over ``mesh`` has to cross; every process must call it."""
    platform = mesh.devices.flat[0].platform
    return sync.Links(mesh.shape["node"], mesh.shape["local"], runtime.num_processes(), platform, runtime.num_hosts())


def agreed_profile(path: str) -> sync.Profile | None:
    """The measured links in the file at ``path``, as rank 0 reads it, lest another host's copy make another choice.

    Every process must call it; None for an empty path.

    Raises:
        InputRefused: there is no such file, or it holds something else.
    """
    if not path:
        return None
    if runtime.rank() == 0 and not Path(path).exists():
        raise no_such("sync.profile", path)
    read = sync.read_profile(Path(path)) if runtime.rank() == 0 else None
    fast, slow, seconds = runtime.agree("profile", read)[0]
    return sync.Profile(sync.CostModel(*fast), sync.CostModel(*slow), seconds)


def task_batch_shapes(rows: dict[str, np.ndarray], num_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of ``num_rows`` as a task gets it, given some rows of it."""
    return {
        name: jax.ShapeDtypeStruct((num_rows, *value.shape[1:]), value.dtype)
        for name, value in rows.items()
        if name != "example_id"
    }


def build_task(config: Config) -> Task:
    """The task that ``[task]`` names.

    Raises:
        SettingsRefused: it cannot be imported, does not take these arguments, or is not a task.
    """
    target = config.task.target
    try:
        task = import_path.call(import_path.load(target, "task.target"), "task.args", config.task.args)
    except ValueError as error:
        if isinstance(error, SettingsRefused):
            raise
        raise SettingsRefused(f"task.args do not suit {target}: {error}") from error
    if not isinstance(task, Task):
        wanted = ("init", "weight", "loss", "next_model_state", "evaluate")
        missing = [name for name in wanted if not hasattr(task, name)]
        raise SettingsRefused(
            f"task.target = {target!r} is no task: it lacks {', '.join(missing)}; see trainer/task.py"
        )
    return task


def resolve_virtual_replicas(config: Config, num_replicas: int) -> int:
    """The number of virtual replicas, V: given, or replicas x accumulate_steps.

    Raises:
        SettingsRefused: V is no multiple of the replicas, or the batch no multiple of V; names the nearest that are.
    """
    given, batch = config.mesh.virtual_replicas, config.data.global_batch
    count = num_replicas * config.optimizer.accumulate_steps if given == "auto" else given
    if count % num_replicas:
        raise SettingsRefused(
            f"mesh.virtual_replicas = {count} is no multiple of the {num_replicas} replicas: "
            f"take a number of replicas that divides it ({_divisors(count)})"
        )
    if batch % count:
        below, above = batch // count * count, math.ceil(batch / count) * count
        nearest = f"{below} or {above}" if below else f"{above}"
        how = f"{num_replicas} replicas x optimizer.accumulate_steps = {config.optimizer.accumulate_steps}"
        origin = f" ({how})" if given == "auto" else ""
        raise SettingsRefused(
            f"data.global_batch = {batch} is no multiple of the {count} virtual replicas{origin}: set it to {nearest}"
        )
    return count


def with_virtual_replicas(config: Config, count: int) -> Config:
    """``config`` with ``mesh.virtual_replicas`` made explicit, as a resumed run has to keep it."""
    return config.model_copy(update={"mesh": config.mesh.model_copy(update={"virtual_replicas": count})})


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _check_faults(config: Config) -> None:
    for fault in config.debug.faults:
        if fault.rank >= jax.process_count():
            raise SettingsRefused(
                f"debug.faults names rank {fault.rank}, but ranks go from 0 to {jax.process_count() - 1}"
            )


def _check_same_data(num_examples: int, batch: dict[str, np.ndarray]) -> None:
    """Refuses processes that see different data, such as another version of a file on one host."""
    seen = [num_examples, *sorted((name, str(rows.dtype), rows.shape[1:]) for name, rows in batch.items())]
    everyone = runtime.agree("data", seen)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise InputRefused(f"rank {rank} sees other training data than rank 0: {other}, not {everyone[0]}")
