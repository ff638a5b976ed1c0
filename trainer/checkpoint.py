"""Checkpoints with orbax: what is in one, how it is written beside training, and how it comes back.

A checkpoint at step k is the state after k batches. Its items are the pytrees ``params``, ``model_state``,
``optimizer`` and ``sync``, and the JSON texts ``data`` (the position in the data) and ``meta`` (counters, settings,
versions). An item without any array is stored as one zero named "empty", since orbax refuses to write nothing.
"""

import importlib.metadata
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from trainer.errors import InputRefused
from trainer.state import TrainState

FORMAT_VERSION = 1
ARRAYS = ("params", "model_state", "optimizer", "sync")
TEXTS = ("data", "meta")
COUNTERS = ("step", "num_updates", "consecutive_skips")


EMPTY = "empty"
DAMAGE = (KeyError, ValueError, AttributeError, TypeError, OSError)
"""What orbax raises on items that are not there or that are not what they should be."""


class Restored(NamedTuple):
    """A checkpoint read back: the state on its mesh, the position in the data, and ``meta``."""

    state: TrainState
    data: dict[str, Any]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory. All processes call the same methods in the same order."""

    def __init__(self, directory: Path | str, *, keep: int = 1, create: bool = True) -> None:
        """Opens ``directory``, making it if there is none; after each save the ``keep`` newest stay.

        Raises:
            InputRefused: it is no directory, or cannot be written where ``create``.
        """
        self._directory = directory if "://" in str(directory) else Path(directory).resolve()
        unusable = f"checkpoint.directory = {directory} cannot be used"
        if isinstance(self._directory, Path):
            _check_directory(self._directory, create, unusable)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=create, enable_async_checkpointing=True)
        try:
            self._manager = ocp.CheckpointManager(self._directory, item_names=(*ARRAYS, *TEXTS), options=options)
        except DAMAGE as error:
            raise InputRefused(f"{unusable}: {type(error).__name__}: {first_line(error)}") from error

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._directory)

    def latest(self) -> int | None:
        """The newest step, or None."""
        return self._manager.latest_step()

    def path(self, step: int) -> str:
        """Where the checkpoint of ``step`` lies."""
        return f"{self._directory}/{step}"

    def save(self, state: TrainState, data: dict[str, Any], meta: dict[str, Any]) -> None:
        """Starts writing ``state``; returns when the arrays may be changed, and the writing goes on beside.

        Raises:
            InputRefused: there is a checkpoint of this step, or a later one, already.
        """
        counters = {name: int(getattr(state, name)) for name in COUNTERS}
        step = counters["step"]
        meta = {"format_version": FORMAT_VERSION, "versions": versions(), **counters, **meta}
        arrays = {name: ocp.args.StandardSave(_not_empty(getattr(state, name))) for name in ARRAYS}
        texts = {"data": ocp.args.JsonSave(data), "meta": ocp.args.JsonSave(meta)}
        if not self._manager.save(step, args=ocp.args.Composite(**arrays, **texts)):
            raise InputRefused(f"{self._directory} holds step {self.latest()} already, so step {step} was not saved")

    def meta(self, step: int) -> dict[str, Any]:
        """The ``meta`` of a checkpoint, without its arrays."""
        meta = self._restore(step, meta=ocp.args.JsonRestore())["meta"]
        if missing := sorted({"format_version", *COUNTERS} - set(meta if isinstance(meta, dict) else ())):
            raise InputRefused(f"{self.path(step)}/meta is damaged: it lacks {', '.join(missing)}")
        if meta["format_version"] != FORMAT_VERSION:
            raise InputRefused(
                f"{self.path(step)} has format version {meta['format_version']}; "
                f"this version of Lockstep reads {FORMAT_VERSION}"
            )
        return meta

    def restore(self, step: int, abstract: TrainState) -> Restored:
        """Reads a checkpoint back onto the shardings of ``abstract``."""
        meta = self.meta(step)
        arrays = {name: ocp.args.StandardRestore(_not_empty(getattr(abstract, name))) for name in ARRAYS}
        restored = {}
        for name, wanted in {**arrays, "data": ocp.args.JsonRestore()}.items():
            restored |= self._restore(step, **{name: wanted})
        given = {name: restored[name] if _has_leaves(abstract, name) else getattr(abstract, name) for name in ARRAYS}
        counters = {name: _counter(meta[name], abstract.step.sharding) for name in COUNTERS}
        return Restored(TrainState(**given, **counters), restored["data"], meta)

    def read(self, step: int, item: str) -> Any:
        """One item's arrays on the host, in nested dicts and lists, whatever mesh and optimizer they came from."""
        path = f"{self.path(step)}/{item}"
        try:
            with ocp.PyTreeCheckpointer() as reader:
                leaves = reader.metadata(path).item_metadata.tree
                as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
                return _without_empty(reader.restore(path, restore_args=as_numpy))
        except DAMAGE as error:
            raise _damaged(path, error) from error

    def _restore(self, step: int, **item: Any) -> dict[str, Any]:
        """One item, named as in the checkpoint, read as its arguments say."""
        (name,) = item
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**item))
            return {name: found[name]}
        except DAMAGE as error:
            raise _damaged(f"{self.path(step)}/{name}", error) from error

    def wait(self) -> None:
        """Waits until what was saved is on disk; raises what went wrong there."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and releases the directory."""
        self._manager.close()


def versions() -> dict[str, str]:
    """The versions of the packages that a result depends on."""
    names = ("lockstep-trainer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def first_line(error: Exception) -> str:
    """The first line of what an exception says."""
    return str(error).strip().split("\n", 1)[0]


def _damaged(path: str, error: Exception) -> InputRefused:
    return InputRefused(
        f"{path} is missing, damaged or of other settings ({type(error).__name__}: {first_line(error)}): "
        "remove this checkpoint to go on from the one before"
    )


def _check_directory(directory: Path, create: bool, unusable: str) -> None:
    """Refuses what is no directory, or cannot be made or written where ``create``."""
    try:
        if create:
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputRefused(f"{unusable}: {error.strerror or error}") from error
    if not directory.is_dir():
        raise InputRefused(f"{unusable}: it is no directory")
    if create and not os.access(directory, os.W_OK | os.X_OK):
        raise InputRefused(f"{unusable}: it cannot be written")


def _counter(value: int, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback((), sharding, lambda _: np.int32(value))


def _has_leaves(state: TrainState, name: str) -> bool:
    return bool(jax.tree.leaves(getattr(state, name)))


def _not_empty(tree: Any) -> Any:
    return tree if jax.tree.leaves(tree) else {EMPTY: np.zeros(())}


def _without_empty(tree: Any) -> Any:
    return {} if isinstance(tree, dict) and tree.keys() == {EMPTY} and np.shape(tree[EMPTY]) == () else tree
