"""Times the training loop with a row of metrics for every step against one for every 50 steps, in one process, paired.

Rows are written to a file and shown on a console, as in a run; blocks of steps of the two alternate.

    python scripts/bench/logging_cost.py [--config digits_vit] [--nodes 2] [--local 4] [--blocks 10] [--steps 50]

The ratio is taken block by block, and its median is what counts: above 1, logging every step costs.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from trainer import config_file, loop, runtime
from trainer import state as states
from trainer.assembly import Assembly, assemble
from trainer.display import Display, NullDisplay
from trainer.metrics import MetricsWriter
from trainer.placement import Placement

CONFIG = Path(__file__).parents[2] / "configs"


def logging_every(pieces: Assembly, log_every_steps: int, end: int) -> Assembly:
    """``pieces`` of a run that logs every so many steps and ends after step ``end``."""
    config = pieces.config
    run = config.run.model_copy(update={"num_steps": end})
    observe = config.observe.model_copy(update={"log_every_steps": log_every_steps})
    return replace(pieces, config=config.model_copy(update={"run": run, "observe": observe}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="digits_vit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    overrides = [f"mesh.nodes={args.nodes}", f"mesh.devices_per_node={args.local}", *args.set]
    config = config_file.load(CONFIG / f"{args.config}.toml", overrides)
    runtime.start(config.mesh, Placement(), init_seconds=60, shutdown_seconds=60, cache_dir=None)
    pieces = assemble(config)
    program = loop.compile_step(pieces, NullDisplay())
    state = states.create_on_mesh(pieces.parts, pieces.mesh, config.run.seed)
    step, num_steps = 0, 2 * args.steps * (args.blocks + 1)

    def seconds(log_every_steps: int) -> float:
        """Seconds a step, over one block."""
        nonlocal state, step
        block = logging_every(pieces, log_every_steps, step + args.steps)
        recorder = loop.make_recorder(block, writer, display, 0, step)
        with block.loader.iterate(step) as batches:
            begin = time.perf_counter()
            state = loop.train(block, state, program, batches, recorder, ())
            taken = time.perf_counter() - begin
        step += args.steps
        return taken / args.steps

    def pair(first: int) -> tuple[float, float]:
        """Seconds a step of every step and every 50; which goes first alternates, for a machine may drift."""
        taken = {every: seconds(every) for every in (first, 51 - first)}
        return taken[1], taken[50]

    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "console.txt").open("w") as file:
        console = Console(file=file, width=120, force_terminal=True)
        with MetricsWriter(Path(directory) / "metrics.jsonl") as writer, Display(console, num_steps) as display:
            pair(first=1)  # the first steps of all warm up
            pairs = [pair(first=(1, 50)[block % 2]) for block in range(args.blocks)]
    ratios = [every / seldom for every, seldom in pairs]
    print(f"median step: every step {statistics.median(a for a, _ in pairs) * 1e3:.2f} ms, ", end="")
    print(f"every 50 steps {statistics.median(b for _, b in pairs) * 1e3:.2f} ms")
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"ratio, block by block: median {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
