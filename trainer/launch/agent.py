"""The agent: starts the workers of this host, watches them, and ends all when one fails. It never loads JAX.

Exit codes are the agent's. A worker reports through a pipe what became of it, and marks in shared memory how far it is;
where it cannot, its end is judged from outside. Nothing outlives the agent, not even when it is killed (see
``worker.die_with_agent``).
"""

import os
import signal
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.config import Config
from trainer.errors import ExitCode
from trainer.launch import restarts
from trainer.launch.abort import last_lines, log_tail
from trainer.launch.processes import POLL_SECONDS, Worker, dump_stacks, end, kill, listen, reserved_port, spawn
from trainer.launch.spec import HEEDED, Job
from trainer.launch.verdict import Saved, Verdict, advice, judge, newest_checkpoint, record, say, tell
from trainer.resilience.policy import RankView, Stuck, find_stuck, limits
from trainer.resilience.preemption import Ask, Plan, advance
from trainer.resilience.progress import RUN
from trainer.rundir import RunDir

SETTLE_SECONDS = 0.5
"""After the first failure, how long to listen for others: the one noticed first need not be the cause."""
HALT_SECONDS = 10.0
"""The same, where all ranks halt at the same step and may still be writing the checkpoint before it."""


@dataclass
class Signals:
    """The signals that the agent was sent, in order."""

    received: list[Ask] = field(default_factory=list)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(Ask(signal.Signals(number).name, time.monotonic()))


@dataclass
class Watch:
    """Why the workers of an attempt are watched no longer, if not because all are gone."""

    plan: Plan = field(default_factory=Plan)
    stuck: Stuck | None = None
    settled: float = float("inf")


def run(job: Job) -> int:
    """Runs ``job`` to its end and returns the exit code. Says why it failed on stderr, once, and in verdict.json.

    An attempt that ends with a worker stuck or dead is followed by another, up to ``max_restarts`` times.
    """
    run_dir, config = RunDir(Path(job.run_dir)), Config.model_validate(tomllib.loads(job.config))
    history = [step_of(newest_checkpoint(checkpoint_directory(config, run_dir)))]
    with noting_signals() as signals:
        while True:
            verdict, workers = run_attempt(job, run_dir, config, signals)
            history.append(step_of(verdict.last_checkpoint))
            again = restarts.decide(verdict.exit_code, history, job.max_restarts)
            if not again.go or asks_of(workers, signals):
                break
            verdict = replace(verdict, advice=f"nothing: {again.why}")
            record(verdict, run_dir, job.attempt)
            announce(verdict, workers)
            tell(again.why)
            job = replace(job, attempt=run_dir.begin_attempt(), resume=True)
    if again.why and not again.go:
        verdict = replace(verdict, message=f"{verdict.message}\n{again.why}")
    return leave(verdict, workers, run_dir, job.attempt)


def run_attempt(job: Job, run_dir: RunDir, config: Config, signals: Signals) -> tuple[Verdict, list[Worker]]:
    """Starts the workers, watches them to their end, and judges. All are gone afterwards."""
    workers: list[Worker] = []
    try:
        with reserved_port() as port:
            for rank in range(job.num_processes):
                workers.append(spawn(job, run_dir, rank, port))
            watch = watch_over(workers, signals, config)
    except BaseException:
        with suppress(OSError):
            run_dir.restore_replaced(job.attempt)
        raise
    finally:
        end(workers)
    return conclude(workers, signals, watch, config, run_dir), workers


def leave(verdict: Verdict, workers: Sequence[Worker], run_dir: RunDir, attempt: int) -> int:
    """Writes and announces the last attempt's verdict, and returns its exit code."""
    with suppress(OSError):
        attempt = run_dir.restore_replaced(attempt)
    for worker in workers:
        worker.log = run_dir.log(attempt, worker.rank)
    record(verdict, run_dir, attempt)
    announce(verdict, workers)
    return int(verdict.exit_code)


def checkpoint_directory(config: Config, run_dir: RunDir) -> str:
    """Where the run's checkpoints are."""
    return config.checkpoint.directory or str(run_dir.checkpoints)


def step_of(saved: Saved | None) -> int | None:
    return saved.step if saved else None


@contextmanager
def noting_signals() -> Iterator[Signals]:
    """Notes signals that ask the agent to end, instead of ending. Only a main thread can.

    One that is ignored, as under nohup, stays ignored.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    heeded = [number for number in HEEDED if signal.getsignal(number) != signal.SIG_IGN]
    previous: dict[int, Any] = {number: signal.signal(number, signals.note) for number in heeded}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def watch_over(workers: Sequence[Worker], signals: Signals, config: Config) -> Watch:
    """Returns when all workers are gone, or have to go: a while after the first failure, stuck, or out of time."""
    watch, allowed = Watch(), limits(config.timeouts)
    while any(worker.running for worker in workers):
        listen(workers, POLL_SECONDS)
        dismiss(workers, config.timeouts.shutdown_seconds)
        views, now = [worker.view() for worker in workers], time.monotonic()
        if failures := [worker.failure for worker in workers if worker.failure]:
            halted = all(failure.exit_code == ExitCode.HALTED for failure in failures)
            watch.settled = min(watch.settled, now + (HALT_SECONDS if halted else SETTLE_SECONDS))
        steer(workers, watch, asks_of(workers, signals), views, now, config.timeouts.grace_seconds)
        if watch.plan.command == RUN and not failures:
            watch.stuck = find_stuck(views, allowed, now)
        if watch.stuck:
            dump_stacks(workers)
        if watch.stuck or watch.plan.ends or now > watch.settled:
            break
    return watch


def steer(
    workers: Sequence[Worker], watch: Watch, asks: Sequence[Ask], views: Sequence[RankView], now: float, grace: float
) -> None:
    """Tells the workers where to stop, if they are to."""
    before, watch.plan = watch.plan, advance(watch.plan, asks, views, now, grace)
    if watch.plan.command != before.command:
        for worker in workers:
            worker.block.command(watch.plan.command)


def dismiss(workers: Sequence[Worker], shutdown_seconds: float) -> None:
    """Ends workers that have done and saved everything, but do not go."""
    for worker in workers:
        if worker.running and worker.finished and time.monotonic() > worker.finished.seconds + shutdown_seconds:
            kill(worker, signal.SIGKILL)


def asks_of(workers: Sequence[Worker], signals: Signals) -> list[Ask]:
    """All signals that asked for an end, the earliest first."""
    return sorted([*signals.received, *(ask for worker in workers for ask in worker.asks)], key=lambda ask: ask.seconds)


def conclude(workers: Sequence[Worker], signals: Signals, watch: Watch, config: Config, run_dir: RunDir) -> Verdict:
    """The verdict on an attempt whose workers are all gone."""
    failures = [worker.failure for worker in workers if worker.failure]
    saved = newest_checkpoint(checkpoint_directory(config, run_dir))
    asks = asks_of(workers, signals)
    finished = [worker.finished for worker in workers if worker.finished]
    all_finished = len(finished) == len(workers)
    verdict = judge([w.view() for w in workers], failures, watch.stuck, asks[0] if asks and not all_finished else None)
    if all_finished and finished[0].exit_code == ExitCode.PREEMPTED:
        reason = f"ended by {asks[0].signal} to {asks[0].to}" if asks else "ended early"
        verdict = Verdict(ExitCode.PREEMPTED, f"{reason}: {finished[0].message}")
    elif verdict.exit_code == ExitCode.PREEMPTED:
        late = f": {failures[0].message}" if failures and not watch.plan.ends else f": {watch.plan.ends}"
        kept = f"the newest checkpoint is of step {saved.step}" if saved else "there is no checkpoint"
        verdict = replace(verdict, message=f"{verdict.message}{late if late != ': ' else ''}; {kept}")
    return replace(verdict, last_checkpoint=saved, advice=advice(verdict.exit_code, saved))


def announce(verdict: Verdict, workers: Sequence[Worker]) -> None:
    """Says why the run failed: one line if that explains it, else with the end of the culprit's log."""
    if verdict.exit_code == ExitCode.COMPLETED:
        return
    if os.isatty(1):
        with suppress(OSError):
            os.write(1, b"\x1b[?25h")  # a progress line that was cut off has left the cursor hidden
    failure = verdict.failure
    if failure is not None and not failure.explained:
        say(last_lines(log_tail(workers[failure.rank].log)))
    if (failure is not None and not failure.explained) or verdict.exit_code == ExitCode.STUCK:
        for view in verdict.culprits:
            tell(f"the log is {workers[view.rank].log}")
    tell(verdict.message)
