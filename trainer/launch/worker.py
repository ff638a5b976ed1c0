"""A worker: a process that runs JAX and does the work. The agent starts it as ``python -m trainer.launch.worker``."""

import ctypes
import faulthandler
import io
import os
import signal
import sys
import textwrap
import tomllib
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from trainer import import_path, runtime
from trainer.config import Config
from trainer.errors import ExitCode, LockstepError, Preempted, SettingsRefused
from trainer.launch.signals import HEEDED, heed
from trainer.launch.spec import Event, Job, WorkerSpec, send
from trainer.launch.verdict import Verdict, places, record, tell
from trainer.placement import Placement
from trainer.resilience import faults, progress
from trainer.resilience.policy import limits
from trainer.rundir import RunDir

Entry = Callable[..., None]
"""(config, run_dir, attempt, console, **args) -> None"""

PLAIN_WIDTH = 120
"""Columns where the display is not a terminal."""
PR_SET_PDEATHSIG = 1
MARGIN_SECONDS = 100.0
"""How far JAX's own limits lie beyond ours."""


def main() -> None:
    """Does what the spec on standard input says, reports the outcome to the agent, and ends the process."""
    spec = WorkerSpec.loads(sys.stdin.read())
    die_with_agent(spec.agent_pid)
    for fd in (spec.report_fd, spec.display_fd, spec.signal_fd, spec.progress_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    marks = progress.attach(spec.progress_fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    marks.listens()
    pass_signals_on(spec.signal_fd)
    finished = Event("finished")
    try:
        console = open_console(spec.display_fd)
        try:
            work(spec.job, spec.placement, console, started=lambda: send(spec.report_fd, Event("started")))
        except Preempted as stopped:
            finished = Event("finished", int(stopped.exit_code), str(stopped))
        marks.enter("shutdown")
        runtime.stop()
    except BaseException as error:
        leave(spec.report_fd, failure_event(error))
    send(spec.report_fd, finished)


def run_here(job: Job) -> int:
    """Runs ``job`` in this very process, for a debugger. Returns the exit code; an unexpected exception propagates."""
    verdict = Verdict(ExitCode.PROGRAM_FAULT, "ended by an exception")
    try:
        if job.num_processes > 1:
            raise SettingsRefused(f"--no-agent runs one process, not --processes {job.num_processes}")
        console = open_console(os.dup(1)) if job.attempt else Console()
        work(job, Placement(), console, started=lambda: None)
        verdict = Verdict(ExitCode.COMPLETED, "completed")
    except LockstepError as error:
        tell(str(error))
        verdict = Verdict(error.exit_code, str(error))
    finally:
        if job.attempt:
            run_dir, attempt = RunDir(Path(job.run_dir)), job.attempt
            with suppress(OSError):
                attempt = run_dir.restore_replaced(attempt)
            record(verdict.as_json(attempt), places(run_dir, attempt))
    return int(verdict.exit_code)


def work(job: Job, placement: Placement, console: Console | None, started: Callable[[], None]) -> None:
    """Starts JAX and calls the job's entry."""
    config = Config.model_validate(tomllib.loads(job.config))
    marks = progress.current()
    marks.on_enter = faults.striker(config.debug.faults, placement.rank, job.attempt)
    marks.enter("init")
    # The agent holds us to the limits, and can say who is at fault; JAX's own only bound the loss of the agent as well.
    longest = max(limits(config.timeouts).values()) + MARGIN_SECONDS
    runtime.start(
        config.mesh,
        placement,
        init_seconds=longest,
        shutdown_seconds=longest,
        heartbeat_seconds=longest,
        cache_dir=runtime.cache_directory(os.environ),
    )
    started()
    if job.entry != Job.entry:
        marks.unlimited()
    entry: Entry = import_path.load(job.entry, "entry")
    entry(config, RunDir(Path(job.run_dir)), job.attempt, console, **job.args)


def pass_signals_on(fd: int) -> None:
    """Tells the agent, through ``fd``, of each signal that asks for an early end, and otherwise runs on.

    The number is written at once, even while this thread is stuck in C. A signal that is ignored stays ignored.
    """
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    heed(lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)


class Display(io.FileIO):
    """Somebody's standard output, written for as long as it can be: a reader that went away must not end a run."""

    gone = False

    def write(self, data: Any, /) -> int:
        """Writes, or does as if; returns the number of bytes taken."""
        if not self.gone:
            try:
                return super().write(data) or 0
            except OSError:
                self.gone = True
        return memoryview(data).nbytes


def open_console(fd: int | None) -> Console | None:
    """A console on the agent's standard output, which goes quiet when that fails; None for a worker that has none."""
    if fd is None:
        return None
    file = io.TextIOWrapper(io.BufferedWriter(Display(fd, "w")), encoding="utf-8", errors="replace")
    width = os.get_terminal_size(fd).columns if file.isatty() else PLAIN_WIDTH
    return Console(file=file, width=width or PLAIN_WIDTH)


def failure_event(error: BaseException) -> Event:
    """What the agent is told about ``error``. The traceback goes to the log, unless the message says it all."""
    if isinstance(error, LockstepError):
        return Event("failed", int(error.exit_code), str(error))
    traceback.print_exception(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        message = (
            "a device ran out of memory: lower data.global_batch, raise optimizer.accumulate_steps, or set "
            f'task.args.compute_dtype = "bfloat16" ({first_line(error)})'
        )
        return Event("failed", int(ExitCode.PROGRAM_FAULT), message)
    return Event("failed", int(ExitCode.PROGRAM_FAULT), f"{type(error).__name__}: {first_line(error)}", explained=False)


def first_line(error: BaseException) -> str:
    return textwrap.shorten((str(error).splitlines() or [""])[0], 200, placeholder=" …")


def leave(report_fd: int, event: Event) -> None:
    """Reports a failure and ends at once: an orderly exit would wait minutes for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    send(report_fd, event)
    os._exit(event.exit_code)


def die_with_agent(agent_pid: int) -> None:
    """Has the kernel kill this process when the agent ends, however it ends.

    A thread that watches a pipe would not do: it cannot run while C code holds the interpreter lock. The agent must not
    start workers from a thread that ends before they do, for that thread's end counts as the parent's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:  # it was gone before the line above
        os._exit(int(ExitCode.DIED))


if __name__ == "__main__":
    main()
