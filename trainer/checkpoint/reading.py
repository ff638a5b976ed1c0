"""A checkpoint's arrays on the mesh of now, or, where they do not fit, which leaves do not and how.

Parameters and the like fit any mesh. What the exchange keeps for each owner is moved to the owners of now.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from trainer import sync
from trainer.checkpoint.catalog import location
from trainer.errors import InputRefused

EMPTY = "empty"
"""An item without any array is stored as one zero of this name, since orbax refuses to write nothing."""
DAMAGE = (KeyError, ValueError, AttributeError, TypeError, OSError)
"""What orbax raises on items that are not there or that are not what they should be."""
MOST_LINES = 10
"""Leaves that a refusal lists."""
OF_ANOTHER = {"params": "model", "model_state": "model", "optimizer": "optimizer", "sync": "exchange"}
"""What a checkpoint is of if its item does not fit, the most telling first."""

Leaves = Mapping[str, jax.ShapeDtypeStruct]


class Difference(NamedTuple):
    """A leaf that is not the same in a checkpoint (``stored``) and in what is wanted; "absent" where it is missing."""

    name: str
    stored: str
    wanted: str


class Residuals(NamedTuple):
    """That what the exchange kept for ``old`` owners was moved to ``new`` ones."""

    old: int
    new: int


def first_line(error: BaseException) -> str:
    """The first line of what an exception says."""
    return str(error).strip().split("\n", 1)[0]


def damaged(path: object, error: BaseException) -> InputRefused:
    """The refusal of an item that orbax cannot read."""
    return InputRefused(
        f"{path} is missing, damaged or of other settings ({type(error).__name__}: {first_line(error)}): "
        "remove this checkpoint to go on from the one before"
    )


def not_empty(tree: Any) -> Any:
    """``tree`` as it is stored."""
    return tree if jax.tree.leaves(tree) else {EMPTY: np.zeros(())}


def without_empty(tree: Any) -> Any:
    """A tree that was read from a checkpoint as it was before it was stored."""
    return {} if isinstance(tree, dict) and tree.keys() == {EMPTY} and tuple(tree[EMPTY].shape) == () else tree


def read(checkpoint: Path | str, item: str) -> Any:
    """One item's arrays on the host, in nested dicts and lists, whatever mesh and optimizer they came from."""
    path = location(f"{checkpoint}/{item}")
    try:
        with ocp.PyTreeCheckpointer() as reader, _quiet():
            leaves = reader.metadata(path).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
            return without_empty(reader.restore(path, restore_args=as_numpy))
    except DAMAGE as error:
        raise damaged(path, error) from error


def stored_leaves(checkpoint: Path | str, item: str) -> Leaves:
    """The leaves of one item as they were saved, by 'a/b/c', without reading them."""
    path = location(f"{checkpoint}/{item}")
    try:
        with ocp.PyTreeCheckpointer() as reader, _quiet():
            tree = without_empty(reader.metadata(path).item_metadata.tree)
            return {name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for name, leaf in named(tree).items()}
    except DAMAGE as error:
        raise damaged(path, error) from error


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths 'a/b/c', in the tree's order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def differences(item: str, stored: Leaves, wanted: Any) -> list[Difference]:
    """The leaves of one item whose shape or dtype in the checkpoint is not the wanted one."""
    here = {name: _describe(leaf) for name, leaf in named(wanted).items()}
    there = {name: _describe(leaf) for name, leaf in stored.items()}
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return [Difference(f"{item}/{name}", there.get(name, "absent"), here.get(name, "absent")) for name in names]


def mismatch(checkpoint: Path | str, found: list[Difference], remedy: str) -> InputRefused:
    """The refusal that says what does not fit, lists the leaves, and ends with what to do."""
    items = {difference.name.split("/")[0] for difference in found}
    others = list(dict.fromkeys(what for item, what in OF_ANOTHER.items() if item in items))
    # Another model has another optimizer state and other residuals anyway.
    of_another = " and another ".join(others[:1] if others[0] == "model" else others)
    count = "1 leaf differs" if len(found) == 1 else f"{len(found)} leaves differ"
    lines = [f"{checkpoint} is of another {of_another} than these settings make: {count}"]
    lines += [f"  {name}: {stored} in the checkpoint, {wanted} here" for name, stored, wanted in found[:MOST_LINES]]
    if len(found) > MOST_LINES:
        lines.append(f"  and {len(found) - MOST_LINES} more")
    return InputRefused("\n".join([*lines, remedy]))


def restore_item(checkpoint: Path | str, item: str, wanted: Any) -> Any:
    """One item on the shardings of ``wanted``; its leaves have to be the stored ones."""
    if not jax.tree.leaves(wanted):
        return wanted
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted)})
    return restore_with(checkpoint, args)[item]


def restore_with(checkpoint: Path | str, args: ocp.args.Composite) -> Any:
    """What orbax restores from a checkpoint by ``args``, which name one item."""
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader, _quiet():
            return reader.restore(location(checkpoint), args=args)
    except DAMAGE as error:
        (item,) = args.keys()
        raise damaged(f"{checkpoint}/{item}", error) from error


def fits_resized(stored: Leaves, wanted: Any) -> bool:
    """Whether the exchange's state fits once ``sync.resize`` has moved it to the owners of ``wanted``."""
    old = as_tree(stored, wanted)
    if old is None:
        return False
    resized = jax.eval_shape(lambda tree: list(_resized(tree, wanted)), old)
    return all(
        (new.shape, new.dtype) == (leaf.shape, leaf.dtype)
        for new, leaf in zip(resized, jax.tree.leaves(wanted), strict=True)
    )


def restore_resized(checkpoint: Path | str, item: str, wanted: Any) -> tuple[Any, Residuals]:
    """The exchange's state for the owners of ``wanted``, by the rule of ``sync.resize``.

    Every process reads all residuals: its host holds the state of the old owners for that while.
    """
    old = as_tree(named(read(checkpoint, item)), wanted)
    assert old is not None  # fits_resized said so
    before = [leaf.shape for leaf in jax.tree.leaves(old)]
    leaves, treedef = jax.tree.flatten(wanted)
    placed = [_place(np.asarray(new), leaf) for new, leaf in zip(_resized(old, wanted), leaves, strict=True)]
    changed = [(b[0], leaf.shape[0]) for b, leaf in zip(before, leaves, strict=True) if b != leaf.shape]
    return jax.tree.unflatten(treedef, placed), Residuals(*changed[0])


def _resized(old: Any, wanted: Any) -> Iterator[Any]:
    """Each leaf for the number of owners that its counterpart has; one after another, as each may be large."""
    leaves, treedef = jax.tree.flatten(old)
    for index, (leaf, target) in enumerate(zip(leaves, jax.tree.leaves(wanted), strict=True)):
        if leaf.shape == target.shape or not target.shape:
            yield leaf
            continue
        alone = jax.tree.unflatten(treedef, [leaf if at == index else None for at in range(len(leaves))])
        yield from jax.tree.leaves(sync.resize(alone, target.shape[0]))


def as_tree(values: Mapping[str, Any], like: Any) -> Any:
    """``values`` in the structure of ``like``, or None if they are not of the same names."""
    names = list(named(like))
    if sorted(names) != sorted(values):
        return None
    return jax.tree.unflatten(jax.tree.structure(like), [values[name] for name in names])


def _place(value: np.ndarray, like: Any) -> jax.Array:
    return jax.make_array_from_callback(like.shape, like.sharding, partial(np.ndarray.__getitem__, value))


def _describe(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax from warning that an item on its own has no checkpoint's metadata."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
