"""What the banner and the closing summary say of a run, gathered from its pieces."""

import math
from collections.abc import Sequence

import jax

from trainer import state as states
from trainer.assembly import Assembly
from trainer.checkpoint import Checkpoints
from trainer.display import Facts, Summary
from trainer.hooks import Recorder
from trainer.metrics import Row
from trainer.rundir import RunDir
from trainer.sync import choose, payload_bytes


def facts(pieces: Assembly, run_dir: RunDir, attempt: int, resumed_step: int | None) -> Facts:
    """What is about to run."""
    config, mesh = pieces.config, pieces.mesh
    batch, num_processes = config.data.global_batch, jax.process_count()
    num_virtual_replicas = pieces.work.num_virtual_replicas
    device = mesh.devices.flat[0]
    gradient = states.trainable_part(pieces.parts, pieces.shapes.params)
    choice = choose(
        gradient,
        pieces.links,
        algorithm=config.sync.algorithm,
        across=config.sync.across,
        bucket_mib=config.sync.bucket_mib,
        profile=pieces.profile,
    )
    return Facts(
        name=config.run.name,
        model=config.task.target,
        num_params=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pieces.shapes.params)),
        global_batch=batch,
        process_batch=batch // num_processes,
        replica_batch=batch // mesh.size,
        virtual_replica_batch=batch // num_virtual_replicas,
        num_virtual_replicas=num_virtual_replicas,
        platform=device.platform,
        device_kind=device.device_kind,
        num_nodes=mesh.shape["node"],
        devices_per_node=mesh.shape["local"],
        num_processes=num_processes,
        algorithm=choice.reason,
        exchanged_bytes=payload_bytes(gradient),
        num_steps=config.run.num_steps,
        num_epochs=config.run.num_steps / pieces.loader.batches_per_epoch,
        optimizer=config.optimizer.name,
        schedule=f"{config.optimizer.schedule} learning rate {config.optimizer.learning_rate:g}",
        run_directory=str(run_dir.path),
        attempt=attempt,
        resumed_step=resumed_step,
    )


def summary(
    pieces: Assembly,
    recorder: Recorder,
    evaluations: Sequence[Row],
    checkpoints: Checkpoints,
    run_dir: RunDir,
    seconds: float,
) -> Summary:
    """What came out of it; ``seconds`` is this attempt's whole time."""
    row, newest = recorder.last_row, checkpoints.latest()
    step_seconds, examples_per_second = recorder.pace.total()
    return Summary(
        num_steps=pieces.config.run.num_steps,
        seconds=seconds,
        step_seconds=step_seconds,
        examples_per_second=examples_per_second,
        final=_metrics(evaluations[-1]) if evaluations else _metrics(row),
        best=_best(evaluations),
        checkpoint=None if newest is None else checkpoints.path(newest),
        metrics_path=str(run_dir.metrics),
    )


def _metrics(row: Row) -> dict[str, float]:
    return {name: row[name] for name in ("loss", "accuracy") if name in row}


def _best(rows: Sequence[Row]) -> dict[str, float]:
    if len(rows) < 2:
        return {}
    choose_best = {"loss": min, "accuracy": max}
    values = {name: [row.get(name) for row in rows] for name in choose_best}
    given = {name: [value for value in found if value is not None] for name, found in values.items()}
    return {name: choose_best[name](found) for name, found in given.items() if found}
