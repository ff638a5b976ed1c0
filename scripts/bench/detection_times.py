"""Times how soon a failure ends a run, and prints a table: for each fault, from the moment that it strikes.

A small task is trained by several processes; rank 1 fails as step 5 begins. Times are medians over the repetitions:
until the agent knows, and until every process is gone.

    python scripts/bench/detection_times.py [--processes 2] [--limit 10] [--repeat 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
KINDS = ("kill", "stop", "raise", "sleep", "spin")
STEP = 5


class Times(NamedTuple):
    """Seconds from the fault until all processes were gone, and those until the agent knew, as its verdict says."""

    gone: float
    known: float
    exit_code: int


def strike(kind: str, processes: int, limit: float, directory: Path) -> Times:
    """One run in which rank 1 fails."""
    run_dir = directory / "run"
    command = [sys.executable, "-m", "trainer", "train", "digits_mlp", "--run-dir", str(run_dir), "--overwrite"]
    command += ["--processes", str(processes), "--set", f"timeouts.step_seconds={limit}", "--set", "mesh.nodes=4"]
    command += ["--set", f'debug.faults=[{{kind="{kind}", rank=1, step={STEP}}}]', "--set", "mesh.devices_per_node=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = run_dir / "attempts" / "1" / "logs" / "rank-1.log"
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    while agent.poll() is None and not (log.exists() and "debug.faults: " in log.read_text()):
        time.sleep(0.005)
    begin = time.monotonic()
    code = agent.wait()
    gone = time.monotonic() - begin
    return Times(gone, json.loads((run_dir / "verdict.json").read_text())["seconds_to_detection"], code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2, choices=(2, 4))
    parser.add_argument("--limit", type=float, default=10.0, help="timeouts.step_seconds")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.processes} processes, timeouts.step_seconds = {args.limit:g}, medians of {args.repeat}")
    print("| fault | exit code | known after | all gone after |\n|---|---|---|---|")
    for kind in KINDS:
        times = []
        for _ in range(args.repeat):
            with tempfile.TemporaryDirectory() as directory:
                times.append(strike(kind, args.processes, args.limit, Path(directory)))
        codes = ", ".join(sorted({str(time.exit_code) for time in times}))
        known, gone = (statistics.median(column) for column in list(zip(*times, strict=True))[1::-1])
        print(f"| {kind} | {codes} | {known:.2f} s | {gone:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
