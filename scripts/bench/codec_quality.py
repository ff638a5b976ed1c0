"""Whether a model learns the same with codecs: paired runs, on emulated devices, against the exact exchange.

    python scripts/bench/codec_quality.py --config digits_vit --seeds 5 --results digits.json
    python scripts/bench/codec_quality.py --config text_gpt --seeds 2 --codecs int8 sign topk:ratio=0.05 --steps 100 ...

Every codec is trained with and without error feedback, and the exact exchange beside them, with the same seeds: same
parameters, order of examples and dropout. Shown is, for the last evaluation of each metric, the difference from the
exact run with the same seed: its mean, the standard error of that, and each seed's. Every run is a ``lockstep train``
held to one core, so that as many go on at once as there are cores (``--jobs``) and that number changes no result.

``--results`` holds the finished runs: the same command goes on where it was ended, and more codecs or seeds can be
asked for later. Other settings need another file. A run that halts (code 4: not finite) is a result too.

``--lab FILE ...`` (of lab_codecs.py --config, the same configuration, --json) adds a derived time to ``--target``: the
step at whose evaluation it was first reached here, the median of the seeds, times the seconds of a step there. No run
has taken that long; it leaves out start and evaluations.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codec_specs import DEFAULT, EXACT, checked, overrides

from trainer import metrics
from trainer.errors import ExitCode

ROOT = Path(__file__).parents[2]
FEEDBACK = {"with": (True,), "without": (False,), "both": (True, False)}
WITHOUT = ", no feedback"
POLL_SECONDS = 0.1


class Arm(NamedTuple):
    """A codec, with error feedback or without."""

    codec: str
    error_feedback: bool = True

    @property
    def label(self) -> str:
        return self.codec if self.error_feedback else self.codec + WITHOUT


class Results:
    """The finished runs, by arm and seed; kept in a file that is whole at any time."""

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path, self.settings = path, settings
        self.runs: dict[str, dict[str, Any]] = {}
        if path and path.exists():
            held = json.loads(path.read_text())
            if held["settings"] != settings:
                raise SystemExit(f"{path} holds runs with {held['settings']}, not with {settings}: name another file")
            self.runs = held["runs"]

    def get(self, arm: Arm, seed: int) -> dict[str, Any] | None:
        return self.runs.get(arm.label, {}).get(str(seed))

    def add(self, arm: Arm, seed: int, result: dict[str, Any]) -> None:
        self.runs.setdefault(arm.label, {})[str(seed)] = result
        if self.path:
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text(json.dumps({"settings": self.settings, "runs": self.runs}, indent=1))
            os.replace(temporary, self.path)


class Run:
    """One ``lockstep train`` under way, on one core."""

    def __init__(self, settings: dict[str, Any], arm: Arm, seed: int, core: int):
        self.arm, self.seed, self.core = arm, seed, core
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-quality-")
        self.run_dir, self.log = Path(self.folder.name, "run"), Path(self.folder.name, "log")
        self.command = [sys.executable, "-m", "trainer", "train", settings["config"], "--run-dir", str(self.run_dir)]
        steps = [f"run.num_steps={settings['steps']}"] if settings["steps"] else []
        own = overrides(arm.codec, error_feedback=arm.error_feedback)
        for text in ["checkpoint.every_steps=0", *settings["set"], *steps, *own, f"run.seed={seed}"]:
            self.command += ["--set", text]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with self.log.open("wb") as log:
            held = ["taskset", "-c", str(core), *self.command]
            self.process = subprocess.Popen(held, stdout=subprocess.DEVNULL, stderr=log, env=environment)

    def result(self) -> dict[str, Any]:
        """Its exit code and its evaluations, each {"step", "loss", ...}."""
        code = self.process.returncode
        if code not in (ExitCode.COMPLETED, ExitCode.HALTED):
            said = self.log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"{' '.join(self.command)} ended with code {code}:\n{said}")
        left_out = ("kind", "attempt", "examples", "non_finite")
        rows = metrics.read(self.run_dir / "metrics.jsonl", "eval")
        evaluations = [{key: value for key, value in row.items() if key not in left_out} for row in rows]
        return {"exit_code": code, "evaluations": evaluations}

    def end(self) -> None:
        """Ends it if it still runs; the kernel then ends the workers of its agent."""
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def train_all(settings: dict[str, Any], missing: Sequence[tuple[Arm, int]], cores: Sequence[int]) -> Iterator[Run]:
    """Trains ``missing``, one on each core at a time, and gives each run as it ends."""
    waiting, free, running = list(enumerate(missing, start=1)), list(cores), []
    try:
        while waiting or running:
            while waiting and free:
                number, (arm, seed) = waiting.pop(0)
                print(f"{number}/{len(missing)}: {arm.label}, seed {seed}", file=sys.stderr, flush=True)
                running.append(Run(settings, arm, seed, free.pop()))
            for run in [run for run in running if run.process.poll() is not None]:
                yield run
                running.remove(run)
                run.end()
                free.append(run.core)
            time.sleep(POLL_SECONDS)
    finally:
        for run in running:
            run.end()


def last(result: dict[str, Any] | None, metric: str) -> float:
    """The metric at a run's end; NaN where the run halted or is not there."""
    if not result or result["exit_code"] != ExitCode.COMPLETED:
        return math.nan
    value = result["evaluations"][-1][metric]
    return math.nan if value is None else value


def differences(results: Results, arm: Arm, seeds: Sequence[int], metric: str) -> list[float]:
    """Seed by seed, from the exact run with that seed."""
    return [last(results.get(arm, s), metric) - last(results.get(Arm(EXACT), s), metric) for s in seeds]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error: NaN both if a run halted, and the error of a single value.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    if any(math.isnan(value) for value in values):
        return math.nan, math.nan
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def table(results: Results, arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[str]:
    """The exact runs' metrics and every arm's paired differences from them, in Markdown; below, those of each seed."""
    exact = [results.get(Arm(EXACT), seed) or {} for seed in seeds]
    if any(result["exit_code"] == ExitCode.HALTED for result in exact):
        raise SystemExit("an exact run halted: there is nothing to compare with; lower optimizer.learning_rate")
    names = [name for name in exact[0]["evaluations"][-1] if name != "step"]
    found = {arm.label: [differences(results, arm, seeds, metric) for metric in names] for arm in arms}
    yield f"{results.settings['config']}, {len(seeds)} seeds: the exact exchange, and the differences from it with the"
    yield "same seed, as mean ± its standard error"
    yield f"\n| | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    yield _row(EXACT, [_cell([last(result, metric) for result in exact], sign="") for metric in names])
    for label, columns in found.items():
        yield _row(label, [_cell(values, sign="+") for values in columns])
    yield "\neach seed's difference from exact:"
    for label, columns in found.items():
        for metric, values in zip(names, columns, strict=True):
            each = " ".join("halted" if math.isnan(one) else f"{one:+.4f}" for one in values)
            yield f"{label}: {metric} {each}"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"


def _cell(values: Sequence[float], sign: str) -> str:
    mean, error = mean_and_error(values)
    if math.isnan(mean):
        return f"{sum(map(math.isnan, values))} of {len(values)} halted"
    return f"{mean:{sign}.4f}" if math.isnan(error) else f"{mean:{sign}.4f} ± {error:.4f}"


def steps_to(result: dict[str, Any] | None, metric: str, target: float) -> float:
    """The first evaluated step at which the metric was at least (a loss: at most) ``target``; infinity if none."""
    sign = -1 if "loss" in metric else 1
    reached = (
        row["step"]
        for row in (result or {"evaluations": ()})["evaluations"]
        if row[metric] is not None and sign * row[metric] >= sign * target
    )
    return next(reached, math.inf)


def times_to_target(
    results: Results, arms: Sequence[Arm], seeds: Sequence[int], lab: dict[str, Any], metric: str, target: float
) -> Iterator[str]:
    """Derived: median steps to the target here, times the seconds of a step in the lab."""
    yield f"\nderived, not run: time to {metric} {target:g} at {lab['rate']}, {lab['hosts']} x {lab['devices']} devices"
    yield "\n| | steps here, median of seeds | seconds a step there | derived seconds |\n|---|---|---|---|"
    for arm in arms:
        if arm.codec not in lab["codecs"]:
            continue
        steps = statistics.median([steps_to(results.get(arm, seed), metric, target) for seed in seeds])
        seconds = lab["codecs"][arm.codec]["seconds"]
        derived = "not reached" if math.isinf(steps) else f"{steps * seconds:.0f}"
        yield _row(arm.label, [f"{steps:g}", f"{seconds:.3f}", derived])


def read_lab(path: Path, config: str) -> dict[str, Any]:
    """A report of lab_codecs.py, if it holds steps of that configuration."""
    lab = json.loads(path.read_text())
    if lab["config"] != config:
        measured = f"steps of {lab['config']}" if lab["config"] else "exchanges alone"
        raise SystemExit(f"{path} holds {measured}, not steps of {config}: make it with lab_codecs.py --config")
    return lab


def main() -> None:
    options = parser().parse_args()
    labs = [read_lab(path, options.config) for path in options.lab]
    if options.results and not options.results.absolute().parent.is_dir():
        raise SystemExit(f"--results {options.results}: there is no such directory")
    if options.jobs < 1 or options.seeds < 1:
        raise SystemExit(f"--jobs {options.jobs}, --seeds {options.seeds}: give at least 1 of each")
    cores = sorted(os.sched_getaffinity(0))[: options.jobs]
    settings = {"config": options.config, "set": options.set, "steps": options.steps}
    results = Results(options.results, settings)
    arms = [Arm(codec, feedback) for codec in options.codecs for feedback in FEEDBACK[options.feedback]]
    seeds = range(options.seeds)
    wanted = [(arm, seed) for seed in seeds for arm in (Arm(EXACT), *arms)]
    missing = [(arm, seed) for arm, seed in wanted if results.get(arm, seed) is None]
    for ending in (signal.SIGTERM, signal.SIGINT):  # else the runs under way would be left, or a traceback
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    with contextlib.closing(train_all(settings, missing, cores)) as runs:
        for run in runs:
            result = run.result()
            results.add(run.arm, run.seed, result)
            if labs and (known := result["evaluations"]) and options.metric not in known[-1]:
                raise SystemExit(f"--metric {options.metric!r} is none of {', '.join(known[-1])}")
    for line in table(results, arms, seeds):
        print(line)
    for lab in labs:
        for line in times_to_target(results, [Arm(EXACT), *arms], seeds, lab, options.metric, options.target):
            print(line)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--config", default="digits_vit")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as in lockstep train")
    add("--steps", type=int, default=0, help="in place of the configuration's run.num_steps")
    add("--codecs", nargs="+", type=checked, default=DEFAULT, help="such as int8 topk:ratio=0.05")
    add("--feedback", choices=FEEDBACK, default="both", help="error feedback")
    add("--seeds", type=int, default=5, help="so many, from 0")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once, if there are as many cores")
    add("--results", type=Path, help="a JSON file of finished runs, to go on with")
    add("--lab", type=Path, nargs="+", default=[], help="reports of lab_codecs.py, for the derived time to --target")
    add("--metric", default="accuracy")
    add("--target", type=float, default=0.95)
    return result


if __name__ == "__main__":
    main()
