"""What is done with a run afterwards: evaluate its newest checkpoint, or export the parameters."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import save_file

from trainer import config_file
from trainer.assembly import assemble
from trainer.checkpoint import catalog
from trainer.checkpoint.manifest import is_local
from trainer.checkpoint.reading import named
from trainer.checkpoint.store import Checkpoints
from trainer.config import Config
from trainer.errors import InputRefused, SettingsRefused
from trainer.evaluation import Evaluator
from trainer.launch.verdict import tell
from trainer.metrics import to_json
from trainer.rundir import RunDir

FORMATS = (".safetensors", ".npz")
EMA = "ema_params/"
"""Within an optimizer's state the moving averages are named like this, and then like their parameters."""


def evaluate(config: Config, run_dir: RunDir, attempt: int, console: Console | None) -> None:
    """Prints the newest checkpoint's metrics on the test split, as one line of JSON.

    Raises:
        InputRefused: there is no checkpoint, or no test data.
    """
    del attempt
    pieces = assemble(config)
    evaluator = Evaluator(pieces)
    with newest_checkpoint(config, run_dir) as (checkpoints, step):
        state = checkpoints.restore(step, pieces.shapes).state
    row = {"step": step, **evaluator(state)}
    if console is not None:
        console.print(json.dumps(to_json(row), allow_nan=False), soft_wrap=True, markup=False, highlight=False)


def export(run_dir: RunDir, output: Path) -> str:
    """Writes the newest checkpoint's parameters to ``output``, one array a leaf, named 'a/b/c'. Tells what it wrote.

    They are the moving average where the optimizer keeps one.

    Raises:
        SettingsRefused: ``output`` ends in neither .safetensors nor .npz.
        InputRefused: there is no checkpoint, or ``output`` cannot be written.
    """
    if output.suffix not in FORMATS:
        raise SettingsRefused(f"--output {output}: must end in {' or '.join(FORMATS)}")
    config = config_file.load_saved(run_dir.config)
    with newest_checkpoint(config, run_dir) as (checkpoints, step):
        arrays = named_arrays(checkpoints.read(step, "params"))
        if config.optimizer.ema_decay:
            averages = named_arrays(checkpoints.read(step, "optimizer"))
            arrays |= {name.partition(EMA)[2]: average for name, average in averages.items() if EMA in name}
    try:
        write_arrays(output, arrays)
    except (OSError, SafetensorError) as error:
        raise InputRefused(
            f"--output {output} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    return f"{len(arrays)} arrays of step {step} written to {output}"


def write_arrays(output: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes ``arrays`` to ``output``, whole or not at all. NumPy's format knows no bfloat16: float32 stands for it."""
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.tmp{output.suffix}")
    try:
        if output.suffix == ".npz":
            # The dtypes that NumPy itself does not know are of kind V, and float32 holds each of their values.
            known = {
                name: array.astype(np.float32) if array.dtype.kind == "V" else array for name, array in arrays.items()
            }
            np.savez(temporary, **known)  # pyright: ignore[reportArgumentType] # the stub takes a name for allow_pickle
        else:
            save_file(arrays, temporary)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)


def named_arrays(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree of nested dicts as contiguous NumPy arrays of the same shapes, by their path 'a/b/c'."""
    return {name: np.asarray(leaf, order="C") for name, leaf in named(tree).items()}


@contextmanager
def newest_checkpoint(config: Config, run_dir: RunDir) -> Iterator[tuple[Checkpoints, int]]:
    """The run's checkpoints, open for reading, and the newest good one's step.

    Raises:
        InputRefused: there is none.
    """
    directory = catalog.directory_of(config, run_dir)
    if is_local(directory) and not Path(directory).is_dir():
        raise InputRefused(f"{run_dir.path} has no checkpoint yet: there is no directory {directory}")
    checkpoints = Checkpoints(directory, run_id=run_dir.id, create=False)
    try:
        step, warnings = checkpoints.select()
        for warning in warnings:
            tell(f"warning: {warning}")
        if step is None:
            raise InputRefused(f"{directory} holds no checkpoint yet")
        yield checkpoints, step
    finally:
        checkpoints.close()
