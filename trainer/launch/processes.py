"""The worker processes of one attempt on this host: started, listened to, told what to do, and ended. Loads no JAX."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import ExitCode
from trainer.launch.abort import describe_exit, explain_abort, log_tail
from trainer.launch.signals import HEEDED
from trainer.launch.spec import Event, Job, WorkerSpec, parse
from trainer.launch.verdict import Failure
from trainer.placement import Placement
from trainer.resilience import wording
from trainer.resilience.policy import RankView
from trainer.resilience.preemption import Ask
from trainer.resilience.progress import HOLD, Block, Marks
from trainer.rundir import RunDir

POLL_SECONDS = 0.05
PIPE_BYTES = 65536
"""What a pipe can hold."""
STACKS_SECONDS = 1.0
"""For printing the stacks of a worker that is stuck."""


@dataclass
class Worker:
    """A worker process and what is known of it.

    seen:  when it was last seen alive.
    asks:  the signals that it was sent itself.
    marks: the last that were read.
    """

    rank: int
    process: subprocess.Popen[bytes]
    report_fd: int
    log: Path
    signal_fd: int = -1
    block: Block = field(default_factory=Block)
    received: bytes = b""
    finished: Event | None = None
    failure: Failure | None = None
    swept: bool = False
    seen: float = 0.0
    asks: list[Ask] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def view(self) -> RankView:
        """What is known of it now. One whose marks can be read no more keeps its last."""
        if self.block.fd >= 0:
            self.marks = self.block.marks()
        done = bool(self.failure or self.finished or not self.running or self.marks.unlimited)
        return RankView(self.rank, socket.gethostname(), self.marks, done, self.running and is_stopped(self))


def is_stopped(worker: Worker) -> bool:
    """Whether the process was stopped by a signal."""
    try:
        stat = Path(f"/proc/{worker.process.pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Holds back the signals that a worker is to heed; it inherits that, and lets them in once it can heed them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spawn(job: Job, run_dir: RunDir, placement: Placement) -> Worker:
    """Starts one worker, its output going to its log."""
    rank = placement.rank
    log = run_dir.log(job.attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    report, report_writer = os.pipe()
    signals, signals_writer = os.pipe()
    display = os.dup(1) if rank == 0 else None
    block = Block()
    spec = WorkerSpec(
        job=job,
        placement=placement,
        report_fd=report_writer,
        display_fd=display,
        agent_pid=os.getpid(),
        signal_fd=signals_writer,
        progress_fd=block.fd,
    )
    given = [report_writer, signals_writer, *([] if display is None else [display])]
    for fd in (report, signals, signals_writer):
        os.set_blocking(fd, False)
    try:
        with log.open("ab") as output, blocked_signals():
            # -P: a directory called 'trainer' where the user stands must not be taken for ours.
            # A session of its own: Ctrl-C reaches the agent alone, and the worker's children can be ended with it.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.launch.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=[*given, block.fd],
                start_new_session=True,
            )
    finally:
        for fd in given:
            os.close(fd)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # one that is gone already is noticed like any other
        process.stdin.write(spec.dumps().encode())
    return Worker(rank, process, report, log, signals, block, seen=time.monotonic())


def listen(workers: Sequence[Worker], seconds: float) -> None:
    """Takes in what the workers report within the next ``seconds``, and notes those that are gone."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if worker.running:
                selector.register(worker.report_fd, selectors.EVENT_READ, worker)
        begin = time.monotonic()
        for key, _ in selector.select(seconds):
            if not receive(key.data):
                time.sleep(max(0.0, begin + seconds - time.monotonic()))  # closed, which is always ready
    for worker in workers:
        reap(worker)


def receive(worker: Worker) -> bool:
    """Takes in all that the worker has reported; False once its pipe is closed and empty."""
    hear_signals(worker)
    try:
        chunk = os.read(worker.report_fd, PIPE_BYTES)
    except BlockingIOError:
        return True
    *lines, worker.received = (worker.received + chunk).split(b"\n")
    for line in lines:
        note(worker, parse(line))
    return bool(chunk)


def hear_signals(worker: Worker) -> None:
    """Notes the signals that the worker was sent."""
    if worker.signal_fd < 0:
        return
    with suppress(BlockingIOError):
        for number in os.read(worker.signal_fd, PIPE_BYTES):
            if number in HEEDED:
                worker.asks.append(Ask(signal.Signals(number).name, time.monotonic(), f"rank {worker.rank}"))


def note(worker: Worker, event: Event) -> None:
    """Takes in one report."""
    if event.event == "finished":
        worker.finished = event
    elif event.event == "failed" and worker.failure is None:
        message = event.message
        if not event.explained:
            message = f"{wording.who(worker.view())} failed {wording.where(worker.marks)}: {message}"
        worker.failure = Failure(
            worker.rank, event.seconds, event.exit_code, message, event.explained, noticed_after=_since(event.seconds)
        )


def reap(worker: Worker) -> None:
    """Notes the worker's exit, if it has exited, and sweeps up its children."""
    hear_signals(worker)
    if worker.process.poll() is None:
        worker.seen = time.monotonic()
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
    view = worker.view()
    worker.failure = Failure(
        rank=worker.rank,
        seconds=time.monotonic(),
        exit_code=exit_code,
        message=explanation or f"{wording.who(view)} {describe_exit(code)} {wording.where(view.marks)}",
        explained=explanation is not None,
        returncode=code,
        noticed_after=_since(worker.seen) if worker.seen else None,
    )


def dump_stacks(workers: Sequence[Worker]) -> None:
    """Has the workers print the stacks of all their threads into their logs. A stopped one is continued for that."""
    for worker in workers:
        worker.block.command(HOLD)  # none is to go on if a stopped one lets it
    for worker in workers:
        if worker.running and worker.marks.listens:
            kill_one(worker, signal.SIGUSR2)
            kill_one(worker, signal.SIGCONT)
    time.sleep(STACKS_SECONDS)


def end(workers: Sequence[Worker]) -> None:
    """Ends every worker that still runs, at once, and takes back what they held. May be called twice."""
    for worker in workers:
        if worker.running:
            kill(worker, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()
        if worker.block.fd >= 0:
            worker.view()
            worker.block.close()
            os.close(worker.report_fd)
            os.close(worker.signal_fd)


def kill(worker: Worker, number: signal.Signals) -> None:
    """Signals the worker and its children. Its group carries its own process id."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, number)


def kill_one(worker: Worker, number: signal.Signals) -> None:
    """Signals the worker alone; a child may not know the signal."""
    with suppress(ProcessLookupError):
        worker.process.send_signal(number)


def _since(seconds: float) -> float:
    return max(0.0, time.monotonic() - seconds)
