"""Times a worker's marks: a loop of steps of a few milliseconds with marks and without, paired block by block.

    python scripts/bench/progress_cost.py [--milliseconds 5] [--blocks 20] [--steps 100]

A step here is a host that waits on nothing but the clock, so that all that differs is the marks. An agent's readings
are made in a second process, as often as an agent makes them.
"""

import argparse
import os
import statistics
import time

from trainer.launch.processes import POLL_SECONDS
from trainer.resilience.progress import Block, Progress


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def marked(worker: Progress, num_steps: int, seconds: float) -> float:
    """Seconds that ``num_steps`` steps take with all the marks that the loop makes."""
    batches = worker.reading(iter(range(1, num_steps + 2)))
    program = worker.dispatching(lambda: busy(seconds))
    begin = time.perf_counter()
    for _ in range(num_steps):
        program()
        step = next(batches)
        with worker.awaiting(step):
            pass
        worker.must_stop(step)
    return time.perf_counter() - begin


def plain(num_steps: int, seconds: float) -> float:
    """The same without marks."""
    begin = time.perf_counter()
    for _ in range(num_steps):
        busy(seconds)
    return time.perf_counter() - begin


def read_on(block: Block, parent: int) -> None:
    """What the agent does, for as long as ``parent`` lives."""
    while os.getppid() == parent:
        block.marks()
        time.sleep(POLL_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    block, parent = Block(), os.getpid()
    worker = Progress(os.dup(block.fd))
    if os.fork() == 0:
        read_on(block, parent)
        os._exit(0)
    ratios = []
    for number in range(args.blocks):
        pair = [
            lambda: marked(worker, args.steps, args.milliseconds / 1e3),
            lambda: plain(args.steps, args.milliseconds / 1e3),
        ]
        order = (0, 1) if number % 2 else (1, 0)
        taken = {which: pair[which]() for which in order}
        ratios.append(taken[0] / taken[1])
    alone = statistics.median(marked(worker, args.steps, 0.0) for _ in range(args.blocks)) / args.steps
    print(f"the marks of a step alone: {alone * 1e6:.1f} us")
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"with marks / without: median {statistics.median(ratios):.4f} (quartiles {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
