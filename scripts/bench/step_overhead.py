"""Times the train step against a hand-written ``jit`` loop of the same model and optimizer, in one process, paired.

The other loop is what one writes without a trainer: parameters replicated and the batch sharded by ``NamedSharding``,
the mean loss differentiated, and the gradient exchange left to XLA's automatic partitioning.

    python scripts/bench/step_overhead.py [--config digits_vit] [--nodes 2] [--local 4] [--blocks 30] [--steps 10]

Blocks of steps of the two alternate; the ratio is taken block by block, and its median is what counts: ``wall`` on a
quiet machine, ``cpu`` (seconds of all threads) where other jobs run beside it.
"""

import jax
import jax.numpy as jnp
import optax
from emulated import Seconds, arguments, pairs, report, start, timed

from trainer import mesh as meshes
from trainer import state as states
from trainer.assembly import Assembly
from trainer.report import read
from trainer.state import TrainState
from trainer.step import train_program


def plain_program(pieces: Assembly, state: TrainState):
    """The hand-written step: ``(params, optimizer_state, key, batch) -> (…, loss)``."""
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
    args = arguments(blocks=30, steps=10)
    pieces = start(args)
    ours_state = states.create_on_mesh(pieces.parts, pieces.mesh, 0)
    ours = train_program(pieces.parts, pieces.work, pieces.schedule, pieces.shapes)
    plain = plain_program(pieces, ours_state)
    copy = meshes.place_replicated(pieces.mesh, jax.device_get((ours_state.params, ours_state.optimizer)))
    plain_state = (*copy, jax.device_put(jax.random.key(0), meshes.replicated(pieces.mesh)))

    with pieces.loader.iterate(0) as batches:
        batch = meshes.place_rows(pieces.mesh, pieces.prepare_rows(next(batches), 0))

    def steps_of_ours() -> None:
        nonlocal ours_state
        for _ in range(args.steps):
            ours_state, packed = ours(ours_state, batch)
            read(packed)

    def steps_of_plain() -> None:
        nonlocal plain_state
        for _ in range(args.steps):
            *plain_state, loss = plain(*plain_state, batch)
            jax.device_get(loss)

    def block_of_ours() -> Seconds:
        return timed(steps_of_ours, args.steps)

    def block_of_plain() -> Seconds:
        return timed(steps_of_plain, args.steps)

    report(pairs(block_of_ours, block_of_plain, args.blocks), ("ours", "plain jit"))


if __name__ == "__main__":
    main()
