"""Times how soon a failure ends a run, and prints a Markdown table: for each fault, from the moment that it strikes.

    python scripts/bench/detection_times.py [--bare-jax]            rank 1 of two processes fails as step 5 begins
    python scripts/bench/detection_times.py --hosts [--bare-jax]    a host of two is lost (net lab: Linux, as root)

Known after: until the agent knows, as its verdict says. Over after: until every process is gone; between hosts, until
the agents of the hosts that are left are. With --bare-jax the same befalls a loop of all-reduces in bare JAX, with its
own limits as they are: over is when the processes that nothing befell have ended, by which signal or with which code.
Times are medians over the repetitions.
"""

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import netlab  # noqa: E402

from trainer.launch.rendezvous import reserved_address  # noqa: E402

KINDS = ("kill", "stop", "raise", "sleep", "spin")
EVENTS: dict[str, tuple[Callable[[netlab.Lab], None], Sequence[int]]] = {
    "host of agent 0 killed": (lambda lab: lab.kill_host(0), [1]),
    "other host killed": (lambda lab: lab.kill_host(1), [0]),
    "link cut": (lambda lab: lab.cut(1), [0, 1]),
}
"""What befalls two hosts, and which of them are left to notice."""
STEP = 5
START_SECONDS = 300.0
"""For a run to come as far as the fault; a hang is a failure of the benchmark."""
PORT = 29400


class Ended(NamedTuple):
    """Seconds from the fault until it was known and until all was over (None: not within the cap), and how it ended."""

    known: float | None
    over: float | None
    how: str


def environment(**more: str) -> dict[str, str]:
    """Ours, with this checkout to import from and no proxy, which would stall bare JAX."""
    kept = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **more}


def train(run_dir: Path, limit: float, *arguments: str) -> list[str]:
    """The command of a run that lasts until something befalls it."""
    settings = [f"timeouts.step_seconds={limit}", "run.num_steps=1000000", "observe.log_every_steps=1"]
    settings += ["mesh.nodes=2", "mesh.devices_per_node=1"]
    command = [sys.executable, "-P", "-m", "trainer", "train", "digits_mlp", "--run-dir", str(run_dir), *arguments]
    return [*command, *(word for setting in settings for word in ("--set", setting))]


def bare(coordinator: str, rank: int, fault: str = "none") -> list[str]:
    return [sys.executable, str(ROOT / "scripts/bench/bare_jax_loop.py"), coordinator, "2", str(rank), fault, str(STEP)]


def wait_for(text: str, file: Path, processes: Sequence[subprocess.Popen]) -> float:
    """The time when ``text`` stood in ``file``."""
    deadline = time.monotonic() + START_SECONDS
    while not (file.exists() and text in file.read_text()):
        if time.monotonic() > deadline or all(process.poll() is not None for process in processes):
            sys.exit(f"detection_times.py: a run did not come as far as its fault: {text!r} is not in {file}")
        time.sleep(0.005)
    return time.monotonic()


def end_of(processes: Sequence[subprocess.Popen], begin: float, cap: float) -> tuple[float | None, str]:
    """Seconds from ``begin`` until all have ended, None if not within ``cap``; and how they did."""
    try:
        for process in processes:
            process.wait(max(0.0, begin + cap - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None, ""
    codes = [process.returncode for process in processes]
    return time.monotonic() - begin, ", ".join(
        sorted({signal.Signals(-code).name if code < 0 else str(code) for code in codes})
    )


def ours(kind: str, limit: float, cap: float, directory: Path) -> Ended:
    """One run on this host in which rank 1 fails."""
    run_dir = directory / "run"
    fault = f'debug.faults=[{{kind="{kind}", rank=1, step={STEP}}}]'
    command = train(run_dir, limit, "--processes", "2", "--set", fault)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(), **quiet) as agent:
        begin = wait_for("debug.faults: ", run_dir / "attempts/1/logs/rank-1.log", [agent])
        over, how = end_of([agent], begin, cap + limit)
        agent.kill()
    return Ended(json.loads((run_dir / "verdict.json").read_text())["seconds_to_detection"], over, how)


def bare_jax(kind: str, limit: float, cap: float, directory: Path) -> Ended:
    """The same in bare JAX."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(reserved_address("127.0.0.1", 2))
        processes = [logged(stack, bare(coordinator, rank, kind), directory / str(rank)) for rank in range(2)]
        begin = wait_for("debug.faults: ", directory / "1", processes)
        return Ended(None, *end_of(processes[:1], begin, cap))


def logged(stack: ExitStack, command: list[str], log: Path, popen: Callable = subprocess.Popen) -> subprocess.Popen:
    """Starts ``command``, its output going to ``log``; killed when ``stack`` is left."""
    file = stack.enter_context(log.open("wb"))
    process = popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def ours_on_hosts(event: str, limit: float, cap: float, directory: Path) -> Ended:
    """One run on two hosts, of which one is lost."""
    befall, left = EVENTS[event]
    run_dir, env = directory / "run", environment(LOCKSTEP_TOKEN=secrets.token_hex(16))
    with netlab.Lab(hosts=2, rate="1gbit") as lab:
        options = ["--num-hosts", "2", "--host-index", "{host}", "--rendezvous", f"{{address0}}:{PORT}"]
        command, quiet = train(run_dir, limit, *options), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        agents = [lab.popen(host, lab.fill(command, host), env=env, **quiet) for host in range(2)]
        wait_for(f'"step": {STEP},', run_dir / "metrics.jsonl", agents)
        begin = time.monotonic()
        befall(lab)
        return Ended(None, *end_of([agents[host] for host in left], begin, cap))


def bare_jax_on_hosts(event: str, limit: float, cap: float, directory: Path) -> Ended:
    """The same in bare JAX."""
    befall, left = EVENTS[event]
    with netlab.Lab(hosts=2, rate="1gbit") as lab, ExitStack() as stack:
        processes = [
            logged(
                stack,
                bare(f"{lab.addresses[0]}:{PORT}", host),
                directory / str(host),
                lambda command, host=host, **options: lab.popen(host, command, **options),
            )
            for host in range(2)
        ]
        wait_for(f"step {STEP} done", directory / "0", processes)
        begin = time.monotonic()
        befall(lab)
        return Ended(None, *end_of([processes[host] for host in left], begin, cap))


def median(times: Sequence[float | None], cap: float) -> str:
    """As a cell of the table."""
    if all(seconds is None for seconds in times):
        return f"not within {cap:g} s"
    middle = statistics.median(float("inf") if seconds is None else seconds for seconds in times)
    return f"{middle:.1f} s" if middle < float("inf") else f"mostly not within {cap:g} s"


def row(name: str, mine: Sequence[Ended], theirs: Sequence[Ended], cap: float) -> str:
    hows = [", ".join(sorted({ended.how for ended in column if ended.how})) for column in (mine, theirs)]
    known = [ended.known for ended in mine if ended.known is not None]
    cells = [name, hows[0], median(known, cap) if known else "-", median([ended.over for ended in mine], cap)]
    if theirs:
        cells.append(median([ended.over for ended in theirs], cap) + (f" ({hows[1]})" if hows[1] else ""))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", action="store_true", help="between two hosts of a net lab")
    parser.add_argument("--bare-jax", action="store_true", help="the same in bare JAX, beside it")
    parser.add_argument("--faults", nargs="+", help="which rows (default: all)")
    parser.add_argument("--limit", type=float, default=10.0, help="timeouts.step_seconds (default: 10)")
    parser.add_argument(
        "--cap", type=float, default=60.0, help="seconds after which bare JAX is given up (default: 60)"
    )
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    names = tuple(EVENTS) if args.hosts else KINDS
    if unknown := set(args.faults or ()) - set(names):
        parser.error(f"--faults: {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves no lab behind
    subjects = [ours_on_hosts, bare_jax_on_hosts] if args.hosts else [ours, bare_jax]
    print(f"timeouts.step_seconds = {args.limit:g}, medians of {args.repeat}\n")
    headings = ["fault", "exit code", "known after", "over after", *(["bare JAX over after"] if args.bare_jax else [])]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for name in args.faults or names:
        ends: list[list[Ended]] = [[], []]
        for _ in range(args.repeat):
            for column, subject in zip(ends, subjects[: 1 + args.bare_jax], strict=False):
                with tempfile.TemporaryDirectory() as directory:
                    column.append(subject(name, args.limit, args.cap, Path(directory)))
        print(row(name, *ends, args.cap), flush=True)


if __name__ == "__main__":
    try:
        main()
    except netlab.LabError as error:
        print(f"detection_times.py: {error}", file=sys.stderr)
        sys.exit(2)
