"""What a checkpoint costs: how long the loop is held by a save, against a synchronous save, and what a restore takes.

    python scripts/bench/checkpoint_cost.py --mib 1024 --saves 5 --directory /where/checkpoints/go

The state is that of Adam: parameters and two moments, of ``--mib`` MiB together or what whole leaves of ``--leaf-mib``
make of it, replicated over ``--devices`` emulated devices. Prints JSON: medians over the saves, the first of which is
not counted.

    held_seconds         from the call of ``save`` to its return, with nothing else under way
    background_seconds   from there until the checkpoint is complete, its manifest written
    synchronous_seconds  the same state saved by ``orbax.checkpoint.Checkpointer``, which returns when it is on the disk
    held_share           held_seconds / synchronous_seconds
    restore_seconds      reading it back onto the devices, after its checksums have been verified
    verify_seconds       reading every byte once for the checksums
    peak_extra_mib       the most resident memory during the saves, less what was resident before
"""

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import psutil

from trainer import mesh as meshes
from trainer.checkpoint import catalog
from trainer.checkpoint.store import Checkpoints
from trainer.state import TrainState


def state_of(mesh: jax.sharding.Mesh, mib: int, leaf_mib: int) -> TrainState:
    """A state of ``mib`` MiB on every device of ``mesh``."""
    num_leaves = max(1, mib // 3 // leaf_mib)
    generator = np.random.default_rng(0)

    def tree() -> dict[str, np.ndarray]:
        return {f"{i}": generator.standard_normal(leaf_mib << 18, np.float32) for i in range(num_leaves)}

    zero = np.zeros((), np.int32)
    host = TrainState(zero, zero, zero, tree(), {}, {"mu": tree(), "nu": tree()}, ())
    return meshes.place_replicated(mesh, host)


class Peak:
    """The most resident memory while it runs, in bytes above that at the start."""

    def __enter__(self) -> "Peak":
        process = psutil.Process()
        self.before = self.most = process.memory_info().rss
        self._done = threading.Event()

        def watch() -> None:
            while not self._done.wait(0.01):
                self.most = max(self.most, process.memory_info().rss)

        self._thread = threading.Thread(target=watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()


def timed(function: Any, *arguments: Any, **keywords: Any) -> float:
    begin = time.perf_counter()
    function(*arguments, **keywords)
    return time.perf_counter() - begin


def measure(state: TrainState, directory: Path, saves: int) -> dict[str, float]:
    held, background, synchronous = [], [], []
    checkpoints = Checkpoints(directory / "ours")
    items = {name: ocp.args.StandardSave(getattr(state, name)) for name in ("params", "optimizer")}
    with Peak() as peak:
        for number in range(1, saves + 2):
            moment = state._replace(step=jnp.int32(number))
            held.append(timed(checkpoints.save, moment, {}, {}))
            background.append(timed(checkpoints.wait))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as plain:
        for _ in range(saves + 1):
            path = directory / "plain"
            synchronous.append(timed(plain.save, path, args=ocp.args.Composite(**items), force=True))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    verify = timed(catalog.select, directory / "ours")
    restore = timed(lambda: jax.block_until_ready(checkpoints.restore(saves + 1, shapes).state))
    checkpoints.close()
    seconds = {"held": held, "background": background, "synchronous": synchronous}
    medians = {f"{name}_seconds": statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        **medians,
        "held_share": medians["held_seconds"] / medians["synchronous_seconds"],
        "restore_seconds": restore,
        "verify_seconds": verify,
        "peak_extra_mib": (peak.most - peak.before) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--leaf-mib", type=int, default=16)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, -1), meshes.AXES)
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        state = state_of(mesh, options.mib, options.leaf_mib)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        found = measure(state, directory, options.saves)
    finally:
        shutil.rmtree(directory)
    print(json.dumps({"state_mib": num_bytes / 2**20, **found}, indent=2))


if __name__ == "__main__":
    main()
