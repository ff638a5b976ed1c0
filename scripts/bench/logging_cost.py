"""Times the training loop with a row of metrics for every step against one for every 50 steps, in one process, paired.

Rows are written to a file and shown on a console, as in a run; blocks of steps of the two alternate.

    python scripts/bench/logging_cost.py [--config digits_vit] [--nodes 2] [--local 4] [--blocks 10] [--steps 50]

The ratio is taken block by block, and its median is what counts: above 1, logging every step costs.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from emulated import Seconds, arguments, pairs, report, start, timed
from rich.console import Console

from trainer import loop
from trainer import state as states
from trainer.assembly import Assembly
from trainer.display import Display, NullDisplay
from trainer.metrics import MetricsWriter
from trainer.story import sending


def logging_every(pieces: Assembly, log_every_steps: int, end: int) -> Assembly:
    """``pieces`` of a run that logs every so many steps and ends after step ``end``."""
    config = pieces.config
    run = config.run.model_copy(update={"num_steps": end})
    observe = config.observe.model_copy(update={"log_every_steps": log_every_steps})
    return replace(pieces, config=config.model_copy(update={"run": run, "observe": observe}))


def main() -> None:
    args = arguments(blocks=10, steps=50)
    pieces = start(args)
    program = loop.compile_step(pieces, NullDisplay())
    state = states.create_on_mesh(pieces.parts, pieces.mesh, pieces.config.run.seed)
    step, num_steps = 0, 2 * args.steps * (args.blocks + 1)

    def block(log_every_steps: int) -> Seconds:
        nonlocal state, step
        block = logging_every(pieces, log_every_steps, step + args.steps)
        recorder = loop.make_recorder(block, sending(block), writer, display, 0, step)
        with block.loader.iterate(step) as batches:

            def train() -> None:
                nonlocal state
                state = loop.train(block, state, program, batches, recorder, ())

            seconds = timed(train, args.steps)
        step += args.steps
        return seconds

    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "console.txt").open("w") as file:
        console = Console(file=file, width=120, force_terminal=True)
        with MetricsWriter(Path(directory) / "metrics.jsonl") as writer, Display(console, num_steps) as display:
            found = pairs(lambda: block(1), lambda: block(50), args.blocks)
    report(found, ("every step", "every 50 steps"))


if __name__ == "__main__":
    main()
