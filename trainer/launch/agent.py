"""The agent: starts the workers of this host, watches them, and ends all when one fails. It never loads JAX.

Exit codes are the agent's. A worker reports through a pipe what became of it; where it cannot, its end is judged from
outside. Nothing outlives the agent, not even when it is killed (see ``worker.die_with_agent``).
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.errors import ExitCode
from trainer.launch.abort import describe_exit, explain_abort, last_lines, log_tail
from trainer.launch.spec import Event, Job, WorkerSpec, parse
from trainer.launch.verdict import Failure, Verdict, judge, record, say, tell
from trainer.placement import Placement
from trainer.rundir import RunDir

POLL_SECONDS = 0.05
PIPE_BYTES = 65536
"""What a pipe can hold."""
SETTLE_SECONDS = 0.5
"""After the first failure, how long to listen for others: the one noticed first need not be the cause."""
TERM_SECONDS = 5.0
"""From SIGTERM to SIGKILL."""
LEAVE_SECONDS = 60.0
"""From a worker's report that its work is done and saved until it must be gone."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass
class Worker:
    """A worker process and what is known of it."""

    rank: int
    process: subprocess.Popen[bytes]
    report_fd: int
    log: Path
    received: bytes = b""
    finished: Event | None = None
    failure: Failure | None = None
    swept: bool = False

    @property
    def running(self) -> bool:
        return self.process.returncode is None


@dataclass
class Signals:
    """The signals that the agent was sent, in order, each with the time on the host's monotonic clock."""

    received: list[tuple[str, float]] = field(default_factory=list)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received.append((signal.Signals(number).name, time.monotonic()))


def run(job: Job) -> int:
    """Runs ``job`` to its end and returns the exit code. Says why it failed on stderr, once, and in verdict.json."""
    run_dir = RunDir(Path(job.run_dir))
    attempt = job.attempt
    with noting_signals() as signals, reserved_port() as port:
        workers: list[Worker] = []
        try:
            for rank in range(job.num_processes):
                workers.append(spawn(job, run_dir, rank, port))
            watch(workers, signals)
        finally:
            end(workers, signals)
            with suppress(OSError):
                attempt = run_dir.restore_replaced(attempt)
    for worker in workers:
        worker.log = run_dir.log(attempt, worker.rank)
    verdict = conclude(workers, signals)
    record(verdict, run_dir, attempt)
    announce(verdict, workers)
    return int(verdict.exit_code)


def conclude(workers: Sequence[Worker], signals: Signals) -> Verdict:
    failures = [worker.failure for worker in workers if worker.failure]
    all_finished = all(worker.finished for worker in workers)
    return judge(failures, None if all_finished or not signals.received else signals.received[0])


@contextmanager
def noting_signals() -> Iterator[Signals]:
    """Notes signals that ask the agent to end, instead of ending. Only a main thread can.

    One that is ignored, as under nohup, stays ignored.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    heeded = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    previous: dict[int, Any] = {number: signal.signal(number, signals.note) for number in heeded}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on loopback for the workers' coordinator, which no other run on this host gets meanwhile.

    The socket is bound and stays so, but never listens. With SO_REUSEPORT, which the coordinator sets too, the
    coordinator can bind beside it, while the kernel gives the port to nobody who asks for any free one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def spawn(job: Job, run_dir: RunDir, rank: int, port: int) -> Worker:
    """Starts one worker, its output going to its log."""
    log = run_dir.log(job.attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    display = os.dup(1) if rank == 0 else None
    coordinator = f"127.0.0.1:{port}" if job.num_processes > 1 else ""
    spec = WorkerSpec(job, Placement(rank, job.num_processes, coordinator), writer, display, os.getpid())
    inherited = [writer] if display is None else [writer, display]
    try:
        with log.open("ab") as output:
            # -P: a directory called 'trainer' where the user stands must not be taken for ours.
            # A session of its own: Ctrl-C reaches the agent alone, and the worker's children can be ended with it.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.launch.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=inherited,
                start_new_session=True,
            )
    finally:
        for fd in inherited:
            os.close(fd)
    os.set_blocking(reader, False)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # one that is gone already is noticed like any other
        process.stdin.write(spec.dumps().encode())
    return Worker(rank, process, reader, log)


def watch(workers: Sequence[Worker], signals: Signals) -> None:
    """Returns when all workers are gone, or a while after the first failure, or when a signal came."""
    settled = float("inf")
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.report_fd, selectors.EVENT_READ, worker)
        while any(worker.running for worker in workers) and not signals.received and time.monotonic() < settled:
            for key, _ in selector.select(POLL_SECONDS):
                if not receive(key.data):
                    selector.unregister(key.fd)
            for worker in workers:
                reap(worker)
            if any(worker.failure for worker in workers):
                settled = min(settled, time.monotonic() + SETTLE_SECONDS)


def receive(worker: Worker) -> bool:
    """Takes in all that the worker has reported; False once its pipe is closed and empty."""
    try:
        chunk = os.read(worker.report_fd, PIPE_BYTES)
    except BlockingIOError:
        return True
    *lines, worker.received = (worker.received + chunk).split(b"\n")
    for line in lines:
        note(worker, parse(line))
    return bool(chunk)


def note(worker: Worker, event: Event) -> None:
    if event.event == "finished":
        worker.finished = event
    elif event.event == "failed" and worker.failure is None:
        message = event.message if event.explained else f"rank {worker.rank} failed: {event.message}"
        worker.failure = Failure(worker.rank, event.seconds, event.exit_code, message, event.explained)


def reap(worker: Worker) -> None:
    """Notes the worker's exit, if it has exited, and sweeps up its children; ends one that finished but stays."""
    if worker.process.poll() is None:
        if worker.finished and time.monotonic() > worker.finished.seconds + LEAVE_SECONDS:
            kill(worker, signal.SIGKILL)
        return
    if worker.swept:
        return
    worker.swept = True
    kill(worker, signal.SIGKILL)
    receive(worker)  # its last words
    if worker.finished or worker.failure:
        return
    code = worker.process.returncode
    explanation = explain_abort(log_tail(worker.log))
    exit_code = ExitCode.PROGRAM_FAULT if code >= 0 else ExitCode.DIED  # who ends by itself does so again
    if explanation is not None:
        exit_code = ExitCode.SETTINGS_REFUSED
    worker.failure = Failure(
        rank=worker.rank,
        seconds=time.monotonic(),
        exit_code=exit_code,
        message=explanation or f"rank {worker.rank} {describe_exit(code)}",
        explained=explanation is not None,
        returncode=code,
    )


def end(workers: Sequence[Worker], signals: Signals) -> None:
    """Ends every worker that still runs: SIGTERM, and SIGKILL after a while, or at a second signal."""
    for worker in workers:
        if worker.running:
            kill(worker, signal.SIGTERM)
    deadline = time.monotonic() + TERM_SECONDS
    while any(worker.process.poll() is None for worker in workers):
        if time.monotonic() > deadline or len(signals.received) > 1:
            break
        time.sleep(POLL_SECONDS)
    for worker in workers:
        if worker.running:
            kill(worker, signal.SIGKILL)
        worker.process.wait()
        os.close(worker.report_fd)


def kill(worker: Worker, number: signal.Signals) -> None:
    """Signals the worker and its children. Its group carries its own process id."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, number)


def announce(verdict: Verdict, workers: Sequence[Worker]) -> None:
    """Says why the run failed: one line if that explains it, else with the end of the culprit's log."""
    if verdict.exit_code == ExitCode.COMPLETED:
        return
    if os.isatty(1):
        with suppress(OSError):
            os.write(1, b"\x1b[?25h")  # a progress line that was cut off has left the cursor hidden
    failure = verdict.failure
    if failure is not None and not failure.explained:
        log = workers[failure.rank].log
        say(last_lines(log_tail(log)))
        tell(f"the log is {log}")
    tell(verdict.message)
