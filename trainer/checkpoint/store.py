"""Saving beside training with orbax, and the door to all that is known of a run's checkpoints.

A checkpoint at step k is the state after k batches. Its items are the pytrees ``params``, ``model_state``,
``optimizer`` and ``sync``, and the JSON texts ``data`` (the position in the data) and ``meta`` (counters, settings,
versions). It counts once its manifest is there, which one process writes after all parts are on the disk.

Memory: while a save is under way, each process holds a copy in host memory of the part of the state that it writes.
Parts of two saves are never held at once: a save waits for the one before.
"""

import errno
import importlib.metadata
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from trainer import runtime
from trainer.checkpoint import catalog, manifest, reading
from trainer.checkpoint.anchor import Anchor
from trainer.checkpoint.catalog import Retention, Selection
from trainer.checkpoint.manifest import FORMAT_VERSION, Damaged
from trainer.checkpoint.shared import require_shared
from trainer.errors import InputRefused
from trainer.resilience import progress
from trainer.state import TrainState

COUNTERS = ("step", "num_updates", "consecutive_skips")
ARRAYS = tuple(name for name in TrainState._fields if name not in COUNTERS)
NO_LIMIT_SECONDS = 7 * 86400
"""What orbax is told to wait for a write: whether a save is stuck is for the agent to judge."""


class Restored(NamedTuple):
    """A checkpoint read back: the state on its mesh, the position in the data, ``meta``, and what was moved."""

    state: TrainState
    data: dict[str, Any]
    meta: dict[str, Any]
    residuals: reading.Residuals | None = None


class Checkpoints:
    """The checkpoints in one directory. All processes call the same methods in the same order."""

    def __init__(
        self,
        directory: Path | str,
        *,
        retention: Retention = Retention(),  # noqa: B008 # a tuple, which nobody can change
        run_id: str = "",
        create: bool = True,
        on_saved: Callable[[int, float], None] = lambda step, seconds: None,
    ) -> None:
        """Opens ``directory``, making it if there is none; after each save those of ``retention`` stay.

        run_id: the run whose checkpoints they are; "": any run's.
        create: it is to be written, by all processes.
        on_saved: told the step of each save, once it is complete, and how many seconds that took; in the thread that
                calls the methods, at the next ``check``, ``wait``, ``save`` or ``close``.

        Raises:
            InputRefused: it is no directory, or, where ``create``, cannot be written or is not shared.
        """
        unusable = f"checkpoint.directory = {directory} cannot be used"
        self._directory = catalog.location(directory)
        try:
            if create:
                self._directory.mkdir(parents=True, exist_ok=True)
            is_directory = self._directory.is_dir()
        except (OSError, ValueError, RuntimeError) as error:
            raise InputRefused(
                f"{unusable}: {getattr(error, 'strerror', None) or reading.first_line(error)}"
            ) from error
        if not is_directory:
            raise InputRefused(f"{unusable}: it is no directory")
        if create:
            require_shared(self._directory)
        try:
            self._anchor = Anchor(self._directory)  # only now, for one that was refused must not be held
        except OSError as error:
            raise InputRefused(f"{unusable}: {error.strerror}") from error
        self._retention, self._run_id, self._on_saved = retention, run_id, on_saved
        self._scores: dict[int, float | None] = {}
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(), async_options=ocp.AsyncOptions(timeout_secs=NO_LIMIT_SECONDS)
        )
        self._finishing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._saving, self._save_seconds = 0, 0.0

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._directory)

    def path(self, step: int) -> str:
        """Where the checkpoint of ``step`` lies."""
        return f"{self._directory}/{step}"

    def latest(self) -> int | None:
        """The newest step whose checkpoint is complete, or None."""
        newest = catalog.newest_in(self._directory)
        return None if newest is None else newest.step

    def select(self, *, of_any_run: bool = False) -> Selection:
        """What to resume from, as rank 0 finds it, with every byte checked; the same in all processes.

        of_any_run: also from what another run has written.

        Raises:
            InputRefused: see ``catalog.select``; in all processes alike.
        """
        found = {"step": None, "warnings": [], "refusal": ""}
        if runtime.rank() == 0:
            try:
                found |= catalog.select(self._directory, "" if of_any_run else self._run_id)._asdict()
            except InputRefused as refusal:
                found["refusal"] = str(refusal)
            progress.current().saved(found["step"] or 0)
        found = runtime.agree("checkpoint to resume from", found)[0]
        if found["refusal"]:
            raise InputRefused(found["refusal"])
        return Selection(found["step"], tuple(found["warnings"]))

    def remove_leftovers(self) -> None:
        """Deletes what saves that were cut off have left. Only the one run that writes here may call it."""
        if runtime.rank() == 0:
            catalog.remove_leftovers(self._directory)

    def note_scores(self, scores: Mapping[int, float | None]) -> None:
        """Takes evaluations' ``best_metric``, by step, for ``keep_best``."""
        self._scores = {**self._scores, **scores}

    def save(self, state: TrainState, data: dict[str, Any], meta: dict[str, Any]) -> None:
        """Starts writing ``state``; returns when the arrays may be changed, and the writing goes on beside.

        What is there of this step already is replaced: it is damaged, or the run has gone back before it.

        Raises:
            InputRefused: this save cannot start, or the one before has failed.
        """
        self.wait()
        begin = time.perf_counter()
        counters = {name: int(getattr(state, name)) for name in COUNTERS}
        meta = {"format_version": FORMAT_VERSION, "versions": versions(), **counters, **meta}
        arrays = {name: ocp.args.StandardSave(reading.not_empty(getattr(state, name))) for name in ARRAYS}
        texts = {"data": ocp.args.JsonSave(data), "meta": ocp.args.JsonSave(meta)}
        self._saving = counters["step"]
        path = self._directory / str(self._saving)
        try:
            if lost := self._anchor.lost():  # orbax would make it anew, or write among what is another's
                raise FileNotFoundError(errno.ENOENT, lost)
            if runtime.rank() == 0:
                catalog.remove(path)
            self._orbax.save(path, args=ocp.args.Composite(**arrays, **texts), force=True)
        except (OSError, ValueError) as error:
            if runtime.is_of_a_lost_peer(error):
                raise
            raise self._failed(error) from error
        self._finishing = threading.Thread(target=self._finish, args=(path, begin), name="checkpoint", daemon=True)
        self._finishing.start()

    def _finish(self, path: Path, begin: float) -> None:
        """In a thread of its own: makes the checkpoint complete, and only then deletes what it makes superfluous."""
        try:
            self._orbax.wait_until_finished()
            if lost := self._anchor.lost():
                raise FileNotFoundError(errno.ENOENT, lost)
            if runtime.rank() == 0:
                manifest.write(path, int(path.name), self._run_id)
                self._save_seconds = time.perf_counter() - begin
                progress.current().saved(int(path.name))
                catalog.tidy(self._directory, self._retention, self._scores)
        except BaseException as error:
            self._failure = error

    def check(self) -> None:
        """Raises what went wrong in the background, as soon as it is known; does not wait."""
        if self._finishing is not None and not self._finishing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until what was saved is complete on the disk.

        Raises:
            InputRefused: it could not be written.
        """
        finishing = self._finishing
        if finishing is not None:
            finishing.join()
            self._finishing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            is_storage = isinstance(failure, OSError | ValueError | Damaged) or self._anchor.lost()
            if is_storage and not runtime.is_of_a_lost_peer(failure):
                raise self._failed(failure) from failure
            raise failure
        if finishing is not None:
            self._on_saved(self._saving, self._save_seconds)

    def _failed(self, error: BaseException) -> InputRefused:
        lost = self._anchor.lost()
        try:
            newest = None if lost else self.latest()
        except OSError:
            newest = None
        intact = "there is none before it" if newest is None else f"step {newest} is intact"
        return InputRefused(
            f"the checkpoint of step {self._saving} could not be written to {self._directory}: "
            f"{lost or storage_fault(error)}; {intact}: mend that, then go on with --resume"
        )

    def meta(self, step: int) -> dict[str, Any]:
        """The ``meta`` of a checkpoint, without its arrays."""
        meta = reading.restore_with(self.path(step), ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        if missing := sorted({"format_version", *COUNTERS} - set(meta if isinstance(meta, dict) else ())):
            raise InputRefused(f"{self.path(step)}/meta is damaged: it lacks {', '.join(missing)}")
        if meta["format_version"] != FORMAT_VERSION:
            raise InputRefused(
                f"{self.path(step)} has format version {meta['format_version']}; "
                f"this version of Lockstep reads {FORMAT_VERSION}"
            )
        return meta

    def restore(self, step: int, abstract: TrainState) -> Restored:
        """Reads a checkpoint back onto the shardings of ``abstract``, whatever mesh it was saved on.

        Raises:
            InputRefused: it is damaged, or of other settings; then the message lists the leaves that differ.
        """
        path, meta = self.path(step), self.meta(step)
        stored = {name: reading.stored_leaves(path, name) for name in ARRAYS}
        found = {name: reading.differences(name, stored[name], getattr(abstract, name)) for name in ARRAYS}
        resize = bool(found["sync"]) and reading.fits_resized(stored["sync"], abstract.sync)
        if wrong := [one for name in ARRAYS for one in found[name] if not (resize and name == "sync")]:
            raise reading.mismatch(path, wrong, _remedy(path, found))
        items = {
            name: reading.restore_item(path, name, getattr(abstract, name))
            for name in ARRAYS
            if not (resize and name == "sync")
        }
        residuals = None
        if resize:
            items["sync"], residuals = reading.restore_resized(path, "sync", abstract.sync)
        data = reading.restore_with(path, ocp.args.Composite(data=ocp.args.JsonRestore()))["data"]
        counters = {name: _counter(meta[name], abstract.step.sharding) for name in COUNTERS}
        return Restored(TrainState(**items, **counters), data, meta, residuals)

    def read(self, step: int, item: str) -> Any:
        """One item's arrays on the host, in nested dicts and lists, whatever mesh and optimizer they came from."""
        return reading.read(self.path(step), item)

    def close(self) -> None:
        """Waits for the last save and releases what it needed."""
        try:
            self.wait()
        finally:
            self._orbax.close()
            self._anchor.close()


def parameters(source: str, abstract: TrainState) -> tuple[str, Any, Any]:
    """The path of the checkpoint that ``source`` names, and its parameters and model state as NumPy arrays.

    source: a run directory, a directory of checkpoints (the newest good one counts in both), or a checkpoint.

    Raises:
        InputRefused: in all processes alike, there is none, or its leaves are not those of ``abstract``.
    """
    path, refusal = "", ""
    if runtime.rank() == 0:
        try:
            path = str(catalog.resolve(catalog.location(source)))
        except (InputRefused, OSError) as error:
            refusal = str(error)
    path, refusal = runtime.agree("checkpoint to start from", [path, refusal])[0]
    if refusal:
        raise InputRefused(f"checkpoint.init_from = {source}: {refusal}")
    wanted = {"params": abstract.params, "model_state": abstract.model_state}
    stored = {name: reading.stored_leaves(path, name) for name in wanted}
    wrong = [one for name, tree in wanted.items() for one in reading.differences(name, stored[name], tree)]
    if wrong:
        raise reading.mismatch(path, wrong, "give task.args as in the run that it comes from, or another --init-from")
    trees = [reading.as_tree(reading.named(reading.read(path, name)), tree) for name, tree in wanted.items()]
    return path, trees[0], trees[1]


def storage_fault(error: BaseException) -> str:
    """What storage complains of, in a few words: orbax and TensorStore wrap it in many."""
    text = str(getattr(error, "strerror", None) or reading.first_line(error))
    known = ("No space left on device", "Disk quota exceeded", "Read-only file system", "Permission denied")
    return next((words for words in known if words in str(error)), text)


def versions() -> dict[str, str]:
    """The versions of the packages that a result depends on."""
    names = ("lockstep-trainer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def _remedy(path: str, found: Mapping[str, list[reading.Difference]]) -> str:
    if found["params"] or found["model_state"]:
        return (
            "go on with the settings, the code and the data that the run was started with, or start a new run with "
            "another --run-dir"
        )
    return f"its parameters fit: --init-from {path} starts a new run from them alone, with another --run-dir"


def _counter(value: int, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback((), sharding, lambda _: np.int32(value))
