"""The training loop, top to bottom. A feature becomes a hook, a task or a transformation; never a branch in here."""

import errno
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import jax
import numpy as np
from rich.console import Console

from trainer import config_file, metrics, runtime
from trainer import mesh as meshes
from trainer import state as states
from trainer.assembly import Assembly, assemble
from trainer.checkpoint import catalog
from trainer.checkpoint.catalog import Retention, Selection
from trainer.checkpoint.store import Checkpoints, parameters
from trainer.config import Config
from trainer.display import Display, NullDisplay
from trainer.errors import Halted, InputRefused, Preempted, SettingsRefused
from trainer.evaluation import Evaluator
from trainer.hooks import (
    Every,
    Hook,
    Moment,
    digesting,
    evaluating,
    measuring_residuals,
    saving,
    scoring,
    stopping,
)
from trainer.metrics import MetricsWriter, Row
from trainer.recorder import Recorder
from trainer.resilience import progress
from trainer.rundir import RunDir
from trainer.state import TrainState
from trainer.step import train_program
from trainer.story import Sending, changes, facts, sending, summary, topology, warnings

FULL = (errno.ENOSPC, errno.EDQUOT)

Batch = dict[str, jax.Array]
Program = Callable[[TrainState, Batch], Any]


def run(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Trains until ``run.num_steps`` batches are consumed, going on from the run's newest checkpoint if there is one.

    Every process calls it. Rank 0 writes the run directory, and shows progress on ``console``.

    Raises:
        LockstepError: settings, data or a checkpoint are refused, or the numbers cannot be trusted.
    """
    begin = time.perf_counter()
    first = runtime.rank() == 0
    # Rank 0 decides, before it writes the settings: elsewhere the run directory may be another machine's.
    is_new = runtime.agree("new run", not run_dir.config.is_file())[0]
    with ExitStack() as stack:
        display = stack.enter_context(Display(console, config.run.num_steps) if first and console else NullDisplay())
        pieces = assemble(config, attempt)
        evaluator = Evaluator(pieces)
        run_id = identity(run_dir, is_new)
        checkpoints = open_checkpoints(config, run_dir, run_id, evaluator, display)
        found = checkpoints.select(of_any_run=is_new)

        sent = sending(pieces)
        display.banner(facts(pieces, sent, run_dir, attempt, found.step))
        for text in [*warnings(pieces), *found.warnings]:
            display.warning(text)
        marks = progress.current()
        marks.enter("compile")
        program = compile_step(pieces, display)
        state = starting_state(pieces, checkpoints, found, is_new, display)
        start = int(state.step)
        marks.starts_at(start)
        # Only now that nothing was refused does the directory become a run's, or its settings change.
        writer = stack.enter_context(MetricsWriter(run_dir.metrics)) if first else None
        if first:
            run_dir.write_id(run_id)
            run_dir.write_config(config_file.dump(pieces.config, redact=True))
        if not is_new:
            checkpoints.remove_leftovers()
        checkpoints.note_scores(past_scores(config, run_dir, start))
        recorder = make_recorder(pieces, sent, writer, display, attempt, start)
        evaluations: list[Row] = []
        saves = Every(config.checkpoint.every_steps, saving(pieces, checkpoints, recorder, attempt))
        hooks = (
            Every(config.debug.digest_every, digesting(recorder), at_end=False),
            Every(config.observe.log_every_steps, measuring_residuals(pieces, recorder)),
            Every(1, lambda moment: checkpoints.check()),
            saves,
            Every(config.run.eval_every_steps, evaluating(evaluator, recorder, writer, display, attempt, evaluations)),
            Every(config.run.eval_every_steps, scoring(config, checkpoints, evaluations)),
            stopping(saves),
        )
        batches = stack.enter_context(pieces.loader.iterate(start))
        with ending(checkpoints, run_dir):
            train(pieces, state, marks.dispatching(program), marks.reading(batches), recorder, hooks)
        with marks.phase("checkpoint"):
            checkpoints.close()
        seconds = time.perf_counter() - begin
        display.summary(summary(pieces, recorder, evaluations, checkpoints, run_dir, seconds))


def train(
    pieces: Assembly,
    state: TrainState,
    program: Program,
    batches: Iterator[dict[str, np.ndarray]],
    recorder: Recorder,
    hooks: tuple[Hook, ...],
) -> TrainState:
    """Steps from ``state`` to ``run.num_steps``; while the device computes a step, the host prepares the next batch."""
    start, end = int(state.step), pieces.config.run.num_steps

    def batch_of(step: int) -> Batch:
        return meshes.place_rows(pieces.mesh, pieces.prepare_rows(next(batches), step))

    batch = batch_of(start + 1) if start < end else {}
    for step in range(start + 1, end + 1):
        state, report = program(state, batch)
        batch = batch_of(step + 1) if step < end else {}
        recorder.push(step, report)
        for hook in hooks:
            hook(Moment(step, state, last=step == end))
    recorder.flush()
    return state


@contextmanager
def ending(checkpoints: Checkpoints, run_dir: RunDir) -> Iterator[None]:
    """Around the training: however it ends, a save that is under way is completed where every rank ends alike.

    Raises:
        InputRefused: the run directory's disk is full.
    """
    try:
        yield
    except Halted:
        with suppress(InputRefused), progress.current().phase("checkpoint"):  # what halted the run came first
            checkpoints.wait()
        raise
    except Preempted:
        with progress.current().phase("checkpoint"):
            checkpoints.wait()
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise InputRefused(
            f"{run_dir.path} cannot be written: {error.strerror}; free space, then go on with --resume"
        ) from error


def compile_step(pieces: Assembly, display: Display) -> Program:
    """Compiles the train step, once for the whole run.

    Raises:
        SettingsRefused: the task does not take the batches of this source.
    """
    begin = time.perf_counter()
    batch = pieces.batch_shapes()
    try:
        lowered = train_program(pieces.parts, pieces.work, pieces.schedule, pieces.shapes).lower(pieces.shapes, batch)
    except (KeyError, ValueError) as error:
        shapes = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.items())
        raise SettingsRefused(
            f"task.target = {pieces.config.task.target!r} cannot take the batches of data.source = "
            f"{pieces.config.data.source!r} ({shapes}): {type(error).__name__}: {error}"
        ) from error
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else None
    display.compiled(time.perf_counter() - begin, num_bytes)
    return compiled


def identity(run_dir: RunDir, is_new: bool) -> str:
    """The run's id, a new one where it ``is_new``; the same in all processes."""
    return runtime.agree("run id", secrets.token_hex(8) if is_new else run_dir.id)[0]


def open_checkpoints(
    config: Config, run_dir: RunDir, run_id: str, evaluator: Evaluator, display: Display
) -> Checkpoints:
    """The run's checkpoints, to be written; each that is complete is shown.

    Raises:
        SettingsRefused: the best are to be kept by a metric that no evaluation gives.
        InputRefused: see ``Checkpoints``.
    """
    settings = config.checkpoint
    if settings.keep_best and settings.best_metric not in evaluator.metric_names:
        raise SettingsRefused(
            f"checkpoint.best_metric = {settings.best_metric!r}: an evaluation of {config.task.target} gives "
            f"{', '.join(evaluator.metric_names)}"
        )
    retention = Retention(settings.keep, settings.keep_best, settings.best_metric, settings.best_mode)
    directory = catalog.directory_of(config, run_dir)
    return Checkpoints(directory, retention=retention, run_id=run_id, on_saved=display.saved)


def starting_state(
    pieces: Assembly, checkpoints: Checkpoints, found: Selection, is_new: bool, display: Display
) -> TrainState:
    """The state of the checkpoint that was ``found``; if none was, a fresh one, from other parameters where asked.

    Raises:
        InputRefused: the checkpoint does not continue with these settings or this data, or the run ``is_new`` and
            has no business with the checkpoints that are there.
    """
    config, newest = pieces.config, found.step
    if newest is None:
        start = None
        if config.checkpoint.init_from:
            path, *start = parameters(config.checkpoint.init_from, pieces.shapes)
            display.note(f"parameters from {path}")
        return states.create_on_mesh(pieces.parts, pieces.mesh, config.run.seed, start)
    if is_new:
        raise InputRefused(
            f"checkpoint.directory = {checkpoints.directory} holds checkpoints already (step {newest}): point "
            "checkpoint.directory elsewhere, or resume the run they belong to"
        )
    catalog.refuse_shorter(checkpoints.path(newest), newest, config.run.num_steps)
    with progress.current().phase("checkpoint"):
        restored = checkpoints.restore(newest, pieces.shapes)
    pieces.loader.check_state(restored.data)
    for change in changes(restored, topology(pieces)):
        display.note(change)
    return restored.state


def past_scores(config: Config, run_dir: RunDir, start: int) -> dict[int, float | None]:
    """What earlier attempts' evaluations up to step ``start`` said of ``checkpoint.best_metric``."""
    if not run_dir.metrics.is_file():
        return {}
    return catalog.scores_of(metrics.read(run_dir.metrics, "eval"), config.checkpoint.best_metric, start)


def make_recorder(
    pieces: Assembly, sent: Sending, writer: MetricsWriter | None, display: Display, attempt: int, start: int
) -> Recorder:
    """The recorder of this attempt: a row for its first step, every so many, and the last."""
    config, loader = pieces.config, pieces.loader
    due = Every(config.observe.log_every_steps, lambda moment: None)

    def is_due(step: int) -> bool:
        return step == start + 1 or due.is_due(step, last=step == config.run.num_steps)

    return Recorder(
        writer=writer,
        display=display,
        optimizer=config.optimizer,
        ranks=np.array([meshes.rank_of_replica(pieces.mesh, replica) for replica in range(pieces.mesh.size)]),
        is_due=is_due,
        constant=lambda step: {"epoch": loader.epoch(step), "attempt": attempt},
        wire_bytes=sent.wire_bytes,
    )
