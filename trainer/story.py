"""What the banner and the closing summary say of a run, gathered from its pieces."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from trainer import state as states
from trainer.assembly import Assembly
from trainer.checkpoint.store import Checkpoints, Restored, versions
from trainer.config import Config
from trainer.display import Facts, Summary, plural
from trainer.metrics import Row
from trainer.recorder import Recorder
from trainer.rundir import RunDir
from trainer.sync import Compression, choose, payload_bytes, traffic
from trainer.sync.codecs import build
from trainer.sync.wire import EXACT


class Sending(NamedTuple):
    """What a run's exchange sends. To know it takes a trace of the exchange, so it is found out once.

    how:        in words.
    wire_bytes: from the number of updates before a step to what its exchange sends, per device.
    """

    how: str
    wire_bytes: Callable[[int], Row]


def facts(pieces: Assembly, sent: Sending, run_dir: RunDir, attempt: int, resumed_step: int | None) -> Facts:
    """What is about to run."""
    config, mesh = pieces.config, pieces.mesh
    batch, num_processes = config.data.global_batch, jax.process_count()
    num_virtual_replicas = pieces.work.num_virtual_replicas
    device = mesh.devices.flat[0]
    gradient = states.trainable_part(pieces.parts, pieces.shapes.params)
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
        algorithm=sent.how,
        exchanged_bytes=payload_bytes(gradient),
        num_steps=config.run.num_steps,
        num_epochs=config.run.num_steps / pieces.loader.batches_per_epoch,
        optimizer=config.optimizer.name,
        schedule=f"{config.optimizer.schedule} learning rate {config.optimizer.learning_rate:g}",
        run_directory=str(run_dir.path),
        attempt=attempt,
        resumed_step=resumed_step,
    )


def warnings(pieces: Assembly) -> list[str]:
    """What is set but will do nothing."""
    settings, nodes = pieces.config.sync, pieces.mesh.shape["node"]
    if settings.codec != "none" and settings.compress == "slow" and nodes == 1:
        return [
            f"sync.codec = {settings.codec!r} does nothing, since with mesh.nodes = 1 there is no slow link: the "
            "exchange is exact; sync.compress = 'all' compresses within the node"
        ]
    return []


def sending(pieces: Assembly) -> Sending:
    """What the run's exchange will send."""
    mesh, settings, codec = pieces.mesh, pieces.config.sync, _compression(pieces)
    gradient = states.trainable_part(pieces.parts, pieces.shapes.params)
    choice = choose(
        gradient,
        pieces.links,
        algorithm=settings.algorithm,
        across=settings.across,
        bucket_mib=settings.bucket_mib,
        profile=pieces.profile,
    )

    def row(compression: Compression | None) -> Row:
        ways = choice._asdict() if compression is None else settings.model_dump()
        counted = traffic(
            gradient,
            mesh.shape["node"],
            mesh.shape["local"],
            algorithm=ways["algorithm"],
            across=ways["across"],
            bucket_mib=ways["bucket_mib"],
            compression=compression,
        )
        return {"wire_bytes_fast": counted.wire_bytes_fast, "wire_bytes_slow": counted.wire_bytes_slow}

    after = row(codec)
    warming = row(codec._replace(codec=EXACT)) if codec is not None and codec.warmup_steps else after
    how = choice.reason if codec is None else _in_words(pieces.config, after["wire_bytes_slow"])
    return Sending(how, lambda num_updates: warming if num_updates < settings.warmup_steps else after)


def _compression(pieces: Assembly) -> Compression | None:
    settings = pieces.config.sync
    if settings.codec == "none":
        return None
    return Compression(
        build(settings.codec, settings.args),
        settings.compress,
        settings.error_feedback,
        settings.warmup_steps,
        settings.momentum_correction,
    )


def _in_words(config: Config, wire_bytes_slow: int) -> str:
    """How a codec is used, and what it leaves to be sent to other nodes after the warm-up."""
    settings = config.sync
    where = "across nodes, exact within them" if settings.compress == "slow" else "everywhere"
    feedback = "with" if settings.error_feedback else "without"
    warmup = f", after {settings.warmup_steps:,} exact updates" if settings.warmup_steps else ""
    what = f"{settings.codec} of the momentum" if config.optimizer.name == "onebit_adam" else settings.codec
    saved = f" ({wire_bytes_slow:,} bytes from each device to other nodes)" if wire_bytes_slow else ""
    return f"{what} {where}, {feedback} error feedback{warmup}{saved}"


def topology(pieces: Assembly) -> dict[str, int]:
    """How the run is spread out, for a checkpoint to remember."""
    mesh = pieces.mesh
    return {"processes": jax.process_count(), "nodes": mesh.shape["node"], "devices_per_node": mesh.shape["local"]}


def changes(restored: Restored, now: Mapping[str, int]) -> list[str]:
    """A line about each thing that is not as it was when the checkpoint was saved: topology, residuals, versions."""
    then, lines = restored.meta.get("topology", now), []
    if dict(then) != dict(now):
        lines.append(f"resumed on {_spread(now)}; the checkpoint was saved on {_spread(then)}")
    if restored.residuals is not None:
        old, new = restored.residuals
        lines.append(f"residuals: each of the {new} owners starts from the mean of the {old} before")
    before, after = restored.meta["versions"], versions()
    other = [f"{name} {before.get(name)} -> {after[name]}" for name in after if before.get(name) != after[name]]
    return [*lines, *([f"other versions than when the checkpoint was saved: {', '.join(other)}"] if other else [])]


def _spread(topology: Mapping[str, int]) -> str:
    nodes, local = topology["nodes"], topology["devices_per_node"]
    return f"{plural(topology['processes'], 'process')}, {nodes} x {local} devices"


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
