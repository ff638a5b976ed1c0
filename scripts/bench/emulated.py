"""What the benchmarks on emulated devices share: their arguments, the pieces of a run, and paired timing."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer import config_file, runtime
from trainer.assembly import Assembly, assemble
from trainer.placement import Placement

CONFIGS = Path(__file__).parents[2] / "configs"


class Seconds(NamedTuple):
    """Seconds a step: by the clock, and of all this process's threads, which other jobs on the machine disturb less."""

    wall: float
    cpu: float


def arguments(blocks: int, steps: int) -> argparse.Namespace:
    """The command line: a shipped configuration, a mesh, and so many blocks of so many steps where it does not say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="digits_vit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=blocks)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--set", action="append", default=[])
    return parser.parse_args()


def start(args: argparse.Namespace) -> Assembly:
    """Starts JAX with the emulated devices, and assembles the run."""
    overrides = [f"mesh.nodes={args.nodes}", f"mesh.devices_per_node={args.local}", *args.set]
    config = config_file.load(CONFIGS / f"{args.config}.toml", overrides)
    runtime.start(config.mesh, Placement(), init_seconds=60, shutdown_seconds=60, cache_dir=None)
    return assemble(config)


def timed(work: Callable[[], object], num_steps: int) -> Seconds:
    """The time that ``work``, of ``num_steps`` steps, takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds((time.perf_counter() - wall) / num_steps, (time.process_time() - cpu) / num_steps)


def pairs(
    first: Callable[[], Seconds], second: Callable[[], Seconds], num_blocks: int
) -> list[tuple[Seconds, Seconds]]:
    """Runs blocks of the two in turn, after one of each to warm up; which goes first alternates, for machines drift."""
    first(), second()
    found = []
    for block in range(num_blocks):
        if block % 2:
            after = second()
            found.append((first(), after))
        else:
            found.append((first(), second()))
    return found


def report(found: list[tuple[Seconds, Seconds]], names: tuple[str, str]) -> None:
    """Prints the median step of both, and the quartiles of their ratio, block by block."""
    for clock in Seconds._fields:
        one, other = ([getattr(seconds, clock) for seconds in side] for side in zip(*found, strict=True))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(one, other, strict=True)], n=4)
        steps = [f"{name} {statistics.median(of) * 1e3:.2f} ms" for name, of in zip(names, (one, other), strict=True)]
        quartiles = f"quartiles {low:.3f} to {high:.3f}"
        print(f"{clock}: median step: {', '.join(steps)}; ratio: median {middle:.3f} ({quartiles})")
