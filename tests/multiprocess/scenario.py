"""One run of the toy task under an agent, in which something goes wrong, watched from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).parents[1]
SETTINGS = """
run = {{ name = "toy", num_steps = 6, eval_every_steps = 3 }}
task.target = "toy_task:Mean"
data = {{ source = "digits", global_batch = 16 }}
optimizer = {{ name = "sgd", learning_rate = 0.01, momentum = 0.9 }}
mesh = {{ nodes = {processes}, devices_per_node = 1, platform = "cpu" }}
checkpoint.every_steps = 2
observe.log_every_steps = 1
debug.digest_every = 1
"""
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Result:
    """What came of a run: exit code, stderr, verdict, whole checkpoints, seconds its end took, and its processes."""

    path: Path
    code: int
    errors: str
    verdict: dict[str, Any]
    checkpoints: list[int]
    seconds: float
    pids: tuple[int, ...]

    def log(self, rank: int, attempt: int = 1) -> str:
        return (self.path / "attempts" / str(attempt) / "logs" / f"rank-{rank}.log").read_text()

    def orphans(self) -> list[int]:
        """Processes of the run that are still there; a zombie is not."""
        return [pid for pid in self.pids if is_alive(pid)]


class Run:
    """A run that goes on."""

    def __init__(self, path: Path, processes: int, arguments: Sequence[str] = (), settings: Sequence[str] = ()) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        config = path.parent / f"{path.name}.toml"
        config.write_text(SETTINGS.format(processes=processes))
        command = [sys.executable, "-m", "trainer", "train", str(config), "--run-dir", str(path), *arguments]
        command += ["--processes", str(processes), *(word for text in settings for word in ("--set", text))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        environment |= {"LOCKSTEP_COMPILATION_CACHE": "off"}
        environment.pop("XLA_FLAGS", None)
        self._errors = path.parent / f"{path.name}.err"
        with self._errors.open("w") as errors:
            self.agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        self._pids: set[int] = set()

    def wait_for(self, sign: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> bool:
        """Waits for ``sign``; False if the run ended before."""
        deadline = time.monotonic() + seconds
        while not sign():
            assert time.monotonic() < deadline, f"{self.path} did not come that far: {self._errors.read_text()}"
            if self.agent.poll() is not None:
                return bool(sign())
            self.workers()
            time.sleep(0.02)
        return True

    def logged(self, text: str, rank: int, attempt: int = 1) -> Callable[[], bool]:
        """A sign: ``text`` stands in the log of ``rank``."""
        log = self.path / "attempts" / str(attempt) / "logs" / f"rank-{rank}.log"
        return lambda: log.exists() and text in log.read_text()

    def recorded(self, step: int) -> Callable[[], bool]:
        """A sign: there is a row of ``step``."""
        rows = self.path / "metrics.jsonl"
        return lambda: rows.exists() and f'"step": {step},' in rows.read_text()

    def workers(self) -> list[int]:
        """The workers' process ids, rank by rank."""
        try:
            children = [child.pid for child in psutil.Process(self.agent.pid).children()]
        except psutil.NoSuchProcess:
            children = []
        self._pids.update(children)
        return sorted(children)

    def signal(self, number: signal.Signals, targets: Sequence[str | int]) -> None:
        """Sends a signal to "agent" or to ranks."""
        workers = self.workers()
        for target in targets:
            os.kill(self.agent.pid if target == "agent" else workers[int(target)], number)

    def finish(self, since: float | None = None, seconds: float = PATIENCE_SECONDS) -> Result:
        """Waits for the end; ``since`` is where ``Result.seconds`` counts from."""
        begin = time.monotonic() if since is None else since
        try:
            self.wait_for(lambda: self.agent.poll() is not None, seconds)
        finally:
            if self.agent.poll() is None:
                self.agent.kill()
                self.agent.wait()
        taken = time.monotonic() - begin
        verdict = json.loads((self.path / "verdict.json").read_text())
        steps = sorted(int(manifest.parent.name) for manifest in self.path.glob("checkpoints/*/manifest.json"))
        errors = self._errors.read_text()
        return Result(self.path, self.agent.returncode, errors, verdict, steps, taken, tuple(self._pids))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(path: Path, processes: int, arguments: Sequence[str] = (), settings: Sequence[str] = ()) -> Result:
    """A run that nobody disturbs, to its end."""
    return Run(path, processes, arguments, settings).finish()
