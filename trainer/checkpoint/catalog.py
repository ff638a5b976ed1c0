"""Which checkpoints a directory holds, which of them is resumed from, and which are kept. Needs no JAX.

A checkpoint of step k is the directory ``k``. What is damaged or unfinished is named and passed over, never resumed
from, and goes as soon as a newer good checkpoint exists.
"""

import math
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainer import config_file
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import FORMAT_VERSION, Damaged, Manifest, is_local
from trainer.config import Config
from trainer.errors import InputRefused
from trainer.rundir import RunDir

ABANDONED = "abandoned.json"
"""What the manifest of a checkpoint is called after the run has gone back to an older one."""
LEFTOVER = ".orbax-checkpoint-tmp"
"""In the names of directories that orbax is writing, or was when it was killed."""

GOOD, DAMAGED, UNFINISHED, FORSAKEN = "good", "damaged", "unfinished", "abandoned"


class Entry(NamedTuple):
    """A directory named like a step.

    status:  good, damaged, unfinished (no manifest) or abandoned (a run went back to an older step).
    problem: what is wrong with it; "" if it is good.
    """

    step: int
    path: Path
    status: str
    problem: str = ""
    manifest: Manifest | None = None

    @property
    def is_good(self) -> bool:
        return self.status == GOOD


class Selection(NamedTuple):
    """The newest good checkpoint's step, or None, and a line about each newer one that is passed over."""

    step: int | None
    warnings: tuple[str, ...] = ()


class Retention(NamedTuple):
    """How many checkpoints stay: the ``keep`` newest, and the ``keep_best`` with the best ``metric``."""

    keep: int = 1
    keep_best: int = 0
    metric: str = "loss"
    mode: str = "min"


def location(directory: Path | str) -> Path:
    """``directory`` as something with the methods of a path, absolute; also gs://, s3:// and the like.

    Raises:
        InputRefused: nobody here knows that kind of storage.
    """
    if is_local(directory):
        return Path(os.path.abspath(directory))
    from etils import epath  # what orbax takes its paths from; it is slow to import, and most runs have no use for it

    try:
        return epath.Path(directory)  # pyright: ignore[reportReturnType] # it has the methods that are used here
    except (KeyError, ImportError) as error:
        raise InputRefused(f"checkpoint.directory = {directory} cannot be used: no such storage ({error})") from error


def directory_of(config: Config, run_dir: RunDir) -> str:
    """Where a run's checkpoints are. A relative ``checkpoint.directory`` is one within the run directory.

    Raises:
        InputRefused: they would be within the run directory, but for a link that leads out of it.
    """
    given = config.checkpoint.directory
    if given and (not is_local(given) or Path(given).is_absolute()):
        return given
    root = Path(os.path.abspath(run_dir.path))
    path = Path(os.path.normpath(root / (given or run_dir.checkpoints.name)))
    if path.is_relative_to(root) and not path.resolve().is_relative_to(root.resolve()):
        raise InputRefused(
            f"{path} leads out of the run directory through a symbolic link: if {path.resolve()} is where the "
            "checkpoints are to be, set checkpoint.directory to that"
        )
    return str(path)


def entries(directory: Path, *, checksums: bool = False) -> list[Entry]:
    """Every checkpoint in ``directory``, the newest first. Sizes are always compared, and where asked every byte."""
    return [look(path, checksums=checksums) for path in _steps_in(directory)]


def newest_in(directory: Path) -> Entry | None:
    """The newest checkpoint in ``directory`` that is complete, as far as sizes show."""
    return next((entry for path in _steps_in(directory) if (entry := look(path, checksums=False)).is_good), None)


def newest(config: Config, run_dir: RunDir) -> Entry | None:
    """A run's newest checkpoint that is complete, as far as sizes show."""
    return newest_in(location(directory_of(config, run_dir)))


def refuse_shorter(path: Path | str, step: int, num_steps: int) -> None:
    """Refuses to go on from a checkpoint that is past the end of the run.

    Raises:
        InputRefused: it is.
    """
    if step > num_steps:
        raise InputRefused(
            f"{path} is at step {step}, past run.num_steps = {num_steps}: set run.num_steps to {step} or more"
        )


def look(path: Path, *, checksums: bool) -> Entry:
    """What is to be said of the checkpoint in ``path``."""
    step = int(path.name)
    if is_local(path) and path.is_symlink():
        return Entry(step, path, DAMAGED, "it is a symbolic link, which a checkpoint never is")
    if not path.is_dir():
        return Entry(step, path, DAMAGED, "it is no directory")
    manifest = None
    try:
        manifest = manifests.read(path)
        if manifest is None and (path / ABANDONED).exists():
            return Entry(step, path, FORSAKEN, "the run went back to an older step")
        if manifest is None:
            return Entry(step, path, UNFINISHED, f"it has no {manifests.NAME}: its save was never finished")
        if manifest.step != step:
            raise Damaged(f"its manifest is that of step {manifest.step}")
        if manifest.format_version == FORMAT_VERSION:
            manifests.check(path, manifest, checksums=checksums)
        return Entry(step, path, GOOD, manifest=manifest)
    except Damaged as damage:
        return Entry(step, path, DAMAGED, str(damage), manifest)


def select(directory: Path, run_id: str = "", *, step: int | None = None) -> Selection:
    """The newest good checkpoint, read through to the last byte, or that of ``step``.

    run_id: the run that it must be of; "": of any.

    Raises:
        InputRefused: it is of another run or format, or all that were finished are damaged, or ``step`` is not there.
    """
    passed_over: list[Entry] = []
    for entry in entries(directory):
        if step not in (None, entry.step):
            continue
        checked = look(entry.path, checksums=True) if entry.is_good else entry
        if checked.is_good:
            refuse_foreign(checked, run_id)
            return Selection(entry.step, _warnings(passed_over))
        passed_over.append(checked)
    if step is not None:
        raise InputRefused(_no_such_step(directory, step, passed_over))
    if any(entry.status == DAMAGED for entry in passed_over):
        listed = "; ".join(f"{entry.path.name}: {entry.problem}" for entry in passed_over)
        raise InputRefused(f"{directory} holds no good checkpoint ({listed}): remove them to start from the beginning")
    return Selection(None, _warnings(passed_over))


def _warnings(passed_over: Sequence[Entry]) -> tuple[str, ...]:
    return tuple(f"checkpoint {entry.path} is passed over: {entry.problem}" for entry in passed_over)


def refuse_foreign(entry: Entry, run_id: str) -> None:
    """Raises InputRefused if a good checkpoint is of another format than this version reads, or of another run."""
    assert entry.manifest is not None
    theirs = entry.manifest.format_version
    if theirs != FORMAT_VERSION:
        remedy = "a newer version of Lockstep wrote it: install that"
        if theirs < FORMAT_VERSION:
            remedy = "finish or export it with the version of Lockstep that wrote it"
        raise InputRefused(f"{entry.path} has format version {theirs}; this version reads {FORMAT_VERSION}; {remedy}")
    if run_id and entry.manifest.run_id and entry.manifest.run_id != run_id:
        raise InputRefused(
            f"{entry.path} was written by another run ({entry.manifest.run_id}, not {run_id}): point "
            "checkpoint.directory at this run's own checkpoints"
        )


def kept(steps: Collection[int], retention: Retention, scores: Mapping[int, float | None]) -> set[int]:
    """Which of the good checkpoints' steps stay.

    scores: the metric of each evaluation, by its step. A checkpoint has that of the last one at or before it; among
            equals the one nearest to the evaluation is the best. Without a finite score it is none.

    >>> sorted(kept([2, 4, 6, 8], Retention(keep=1, keep_best=1), {2: 0.5, 4: 0.1, 8: 0.9}))
    [4, 8]
    """
    newest = sorted(steps, reverse=True)[: retention.keep]
    sign = 1 if retention.mode == "min" else -1
    values = {step: score_at(step, scores) for step in steps}
    ranked = sorted((sign * value, step) for step, value in values.items() if value is not None)
    return {*newest, *(step for _, step in ranked[: retention.keep_best])}


def score_at(step: int, scores: Mapping[int, float | None]) -> float | None:
    """The metric of the last evaluation at or before ``step``; None if there is none, or it is not finite."""
    past = [at for at in scores if at <= step]
    value = scores[max(past)] if past else None
    return value if value is not None and math.isfinite(value) else None


def scores_of(rows: Sequence[Mapping[str, Any]], metric: str, up_to: int | None = None) -> dict[int, float | None]:
    """The metric in each row of kind ``eval``, by step, up to a step if one is given."""
    return {row["step"]: row.get(metric) for row in rows if up_to is None or row["step"] <= up_to}


def tidy(directory: Path, retention: Retention, scores: Mapping[int, float | None]) -> None:
    """Deletes what is not kept: nothing before there is something good, and nothing newer than that."""
    found = entries(directory)
    good = [entry.step for entry in found if entry.is_good]
    stay = kept(good, retention, scores)
    for entry in found:
        if good and entry.step < max(good) and entry.step not in stay:
            remove(entry.path)


def remove_leftovers(directory: Path) -> None:
    """Deletes what saves that were cut off have left."""
    for entry in list(directory.iterdir()) if directory.is_dir() else []:
        name, mark, _ = entry.name.partition(LEFTOVER)
        if mark and _is_step(name):
            remove(entry)


def remove(path: Path) -> None:
    """Deletes a checkpoint, its manifest first: half of one must not pass for a whole. A link is not followed."""
    if is_local(path) and (path.is_symlink() or not path.is_dir()):
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        (path / manifests.NAME).unlink()
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.rmtree()  # pyright: ignore[reportAttributeAccessIssue] # of a path in an object store


def go_back(directory: Path, step: int, run_id: str = "") -> list[int]:
    """Makes ``step`` the newest checkpoint; returns the later steps, which are abandoned.

    Nothing is deleted: an abandoned checkpoint loses the name of its manifest, and goes when a save overtakes it.

    Raises:
        InputRefused: there is no good checkpoint of ``step``, or it is of another run.
    """
    select(directory, run_id, step=step)
    later = [entry for entry in entries(directory) if entry.step > step and (entry.path / manifests.NAME).exists()]
    for entry in later:
        (entry.path / manifests.NAME).replace(entry.path / ABANDONED)
    return sorted(entry.step for entry in later)


def resolve(source: Path) -> Path:
    """The good checkpoint that ``source`` names: one itself, or the newest of a run or a directory of checkpoints.

    Raises:
        InputRefused: there is none.
    """
    if _is_step(source.name) and (source / manifests.NAME).exists():
        source, step = source.parent, int(source.name)
        select(source, step=step)
        return source / str(step)
    if is_local(source) and (source / "config.toml").is_file():
        run_dir = RunDir(source)
        source = location(directory_of(config_file.load_saved(run_dir.config), run_dir))
    newest = select(source).step
    if newest is None:
        raise InputRefused(f"{source} holds no checkpoint: give a run directory that has one, or a checkpoint")
    return source / str(newest)


def _no_such_step(directory: Path, step: int, found: Sequence[Entry]) -> str:
    if found:
        return f"{found[0].path} cannot be used: {found[0].problem}"
    good = ", ".join(str(entry.step) for entry in reversed(entries(directory)) if entry.is_good) or "none"
    return f"{directory} holds no checkpoint of step {step}; there are: {good}"


def _steps_in(directory: Path) -> list[Path]:
    """What is named like a step, the newest first."""
    found = [entry for entry in directory.iterdir() if _is_step(entry.name)] if directory.is_dir() else []
    return sorted(found, key=lambda entry: int(entry.name), reverse=True)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name
