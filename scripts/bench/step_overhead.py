"""Times the train step against a hand-written ``jit`` loop of the same model and optimizer, in one process, paired.

The other loop is what one writes without a trainer: parameters replicated and the batch sharded by ``NamedSharding``,
the mean loss differentiated, and the gradient exchange left to XLA's automatic partitioning.

    python scripts/bench/step_overhead.py [--nodes 2] [--local 4] [--blocks 30] [--steps 10]

Blocks of steps of the two alternate; the ratio is taken block by block, and its median is what counts.
"""

import argparse
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from trainer import config_file, runtime
from trainer import mesh as meshes
from trainer import state as states
from trainer.assembly import assemble
from trainer.placement import Placement
from trainer.step import read, train_program

CONFIG = Path(__file__).parents[2] / "configs"


def plain_program(pieces, state):
    """The hand-written step: ``(params, model_state, optimizer_state, key, batch) -> (…, loss)``."""
    task, optimizer = pieces.parts.task, pieces.parts.optimizer

    def step(params, optimizer_state, key, batch):
        key, dropout_key = jax.random.split(key)

        def loss(params):
            total, _ = task.loss(params, state.model_state, batch, key=dropout_key, axes=())
            return total / jnp.sum(batch["weight"])

        value, gradient = jax.value_and_grad(loss)(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, key, value

    return jax.jit(step, donate_argnums=(0, 1, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="digits_vit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    overrides = [f"mesh.nodes={args.nodes}", f"mesh.devices_per_node={args.local}", *args.set]
    config = config_file.load(CONFIG / f"{args.config}.toml", overrides)
    runtime.start(config.mesh, Placement(), init_seconds=60, shutdown_seconds=60, cache_dir=None)
    pieces = assemble(config)

    ours_state = states.create_on_mesh(pieces.parts, pieces.mesh, 0)
    ours = train_program(pieces.parts, pieces.work, pieces.schedule, pieces.shapes)
    plain = plain_program(pieces, ours_state)
    copy = meshes.place_replicated(pieces.mesh, jax.device_get((ours_state.params, ours_state.optimizer)))
    plain_state = (*copy, jax.device_put(jax.random.key(0), meshes.replicated(pieces.mesh)))

    with pieces.loader.iterate(0) as batches:
        batch = meshes.place_rows(pieces.mesh, pieces.prepare_rows(next(batches), 0))

    def block_of_ours():
        nonlocal ours_state
        for _ in range(args.steps):
            ours_state, report = ours(ours_state, batch)
            read(report)

    def block_of_plain():
        nonlocal plain_state
        for _ in range(args.steps):
            *plain_state, loss = plain(*plain_state, batch)
            jax.device_get(loss)

    def seconds(block):
        begin = time.perf_counter()
        block()
        return (time.perf_counter() - begin) / args.steps

    for block in (block_of_ours, block_of_plain):
        block()
    pairs = [(seconds(block_of_ours), seconds(block_of_plain)) for _ in range(args.blocks)]
    ratios = [a / b for a, b in pairs]
    print(f"median step: ours {statistics.median(a for a, _ in pairs) * 1e3:.1f} ms, ", end="")
    print(f"plain jit {statistics.median(b for _, b in pairs) * 1e3:.1f} ms")
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"ratio, block by block: median {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
