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
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.config import Config
from trainer.errors import ExitCode, LockstepError
from trainer.launch import rendezvous, restarts
from trainer.launch.abort import last_lines, log_tail
from trainer.launch.clusters import Place
from trainer.launch.lead import Lead, logs_to_show
from trainer.launch.processes import POLL_SECONDS, Worker, dump_stacks, end, kill, listen, spawn
from trainer.launch.rendezvous import Abandoned, Group
from trainer.launch.report import Report
from trainer.launch.signals import heed, taken
from trainer.launch.spec import Job
from trainer.launch.verdict import Saved, Verdict, advice, newest_checkpoint, places, record, say, tell
from trainer.placement import Placement
from trainer.resilience.preemption import Ask
from trainer.resilience.progress import HOLD, RUN
from trainer.rundir import RunDir

LEAVE_SECONDS = 10.0
"""How long the agents wait for each other once the verdict is agreed."""


@dataclass
class Signals:
    """The signals that the agent was sent, in order."""

    received: list[Ask] = field(default_factory=list)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(Ask(signal.Signals(number).name, time.monotonic()))


@dataclass
class Orders:
    """What this host's workers were last told, and since when; and whether their end was decided."""

    command: int = RUN
    since: float = 0.0
    over: bool = False


@dataclass(frozen=True)
class Ended:
    """How an attempt ended, the same on every host.

    verdict:      what verdict.json holds.
    why:          what to say about another attempt, "" if there was never to be one.
    next_attempt: its number; 0: there is none.
    tail:         the rank whose log's end tells why the run failed, if anything needs telling.
    logs:         the ranks whose logs to name.
    alone:        whether this host knows no better, because it has lost agent 0.
    """

    verdict: dict[str, Any]
    attempt: int
    why: str = ""
    next_attempt: int = 0
    tail: int | None = None
    logs: Sequence[int] = ()
    alone: bool = False


def run(job: Job, place: Place | None = None) -> int:
    """Runs ``job`` to its end and returns the exit code. Says why it failed on stderr, once, and in verdict.json.

    An attempt that ends with a worker stuck or dead is followed by another, up to ``max_restarts`` times. The agents of
    several hosts act alike: agent 0 judges, and the others do as it says.

    place: which of the run's hosts this is; None: there is no other.
    """
    run_dir, config = RunDir(Path(job.run_dir)), Config.model_validate(tomllib.loads(job.config))
    place = place or Place()
    history = [step_of(newest_checkpoint(config, run_dir))]
    with noting_signals() as signals:
        while True:
            ended = run_attempt(job, place, run_dir, config, signals, history)
            if not ended.next_attempt:
                break
            if place.host_index:
                announce(ended, run_dir, place)
            tell(ended.why)
            job = replace(job, attempt=ended.next_attempt, resume=True)
    return leave(ended, run_dir, place)


def run_attempt(
    job: Job, place: Place, run_dir: RunDir, config: Config, signals: Signals, history: list[int | None]
) -> Ended:
    """Meets the other hosts, and runs this one's workers to their end."""
    attempt = job.attempt
    try:
        with rendezvous.join(
            place,
            num_workers=job.num_processes,
            attempt=attempt,
            digest=sha256(job.config.encode()).hexdigest(),
            init_seconds=config.timeouts.init_seconds,
            abandoned=lambda: bool(signals.received),
        ) as group:
            attempt = group.meeting.attempt
            if place.num_hosts == 1 and signals.received:
                raise Abandoned
            lead = Lead()
            run_workers(replace(job, attempt=attempt), group, run_dir, config, signals, lead)
            if group.host_index == 0:
                ended = conclude(job, group, run_dir, config, lead, history)
                group.decide("ended", asdict(ended))
            else:
                ended = Ended(**await_verdict(group))
            group.leave(LEAVE_SECONDS)
            return ended
    except Abandoned:
        asked = f"{signals.received[0].signal}" if signals.received else "a signal to another host"
        event = "all hosts had met" if place.num_hosts > 1 else "the workers were started"
        verdict = Verdict(ExitCode.PREEMPTED, f"ended by {asked} before {event}")
    except LockstepError as error:
        verdict = Verdict(error.exit_code, str(error))
    saved = None if place.host_index else newest_checkpoint(config, run_dir)  # the disk may be lost with agent 0
    verdict = replace(verdict, last_checkpoint=saved, advice=advice(verdict.exit_code, saved))
    return Ended(verdict.as_json(attempt), attempt, alone=place.host_index > 0)


def run_workers(job: Job, group: Group, run_dir: RunDir, config: Config, signals: Signals, lead: Lead) -> None:
    """Starts this host's workers, and returns when all are gone: by themselves, or because agent 0 said so.

    Raises:
        LeaderLost: agent 0 is lost; the workers are gone.
    """
    workers: list[Worker] = []
    meeting, ranks, orders = group.meeting, group.meeting.ranks(group.host_index), Orders()
    try:
        for local, rank in enumerate(ranks):
            placement = Placement(rank, meeting.num_processes, meeting.coordinator, local, len(ranks))
            workers.append(spawn(job, run_dir, placement))
        watch_over(workers, signals, config, group, orders, lead)
    except BaseException:
        if group.host_index == 0:
            with suppress(OSError):
                run_dir.restore_replaced(job.attempt)
        raise
    finally:
        end(workers)
        group.publish(report(workers, signals, orders, group).as_json())


def conclude(job: Job, group: Group, run_dir: RunDir, config: Config, lead: Lead, history: list[int | None]) -> Ended:
    """On agent 0: the verdict, and whether there is another attempt; then the verdict on this one is recorded."""
    marked = max((view.marks.saved for view in lead.look(group).ranks), default=0)
    verdict = lead.conclude(group, newest_checkpoint(config, run_dir, marked))
    history.append(step_of(verdict.last_checkpoint))
    again = restarts.decide(verdict.exit_code, history, job.max_restarts)
    tail, logs = logs_to_show(verdict)
    attempt = group.meeting.attempt
    if not again.go or lead.look(group).asks:
        if again.why and not again.go:
            verdict = replace(verdict, message=f"{verdict.message}\n{again.why}")
        return Ended(verdict.as_json(attempt), attempt, again.why, tail=tail, logs=logs)
    verdict = replace(verdict, advice=f"nothing: {again.why}")
    ended = Ended(verdict.as_json(attempt), attempt, again.why, tail=tail, logs=logs)
    record(ended.verdict, places(run_dir, attempt))
    announce(ended, run_dir, Place())
    return replace(ended, next_attempt=run_dir.begin_attempt())


def await_verdict(group: Group) -> dict[str, Any]:
    """What agent 0 says about the attempt.

    Raises:
        LeaderLost: it is lost before it could.
    """
    while not (ended := group.decided("ended")):
        time.sleep(POLL_SECONDS)
    return ended


def leave(ended: Ended, run_dir: RunDir, place: Place) -> int:
    """Writes and announces the last attempt's verdict, and returns its exit code."""
    if place.host_index == 0:
        attempt = ended.attempt
        with suppress(OSError):
            attempt = run_dir.restore_replaced(attempt)
        ended = replace(ended, attempt=attempt, verdict={**ended.verdict, "attempt": attempt})
    record(ended.verdict, own_places(ended, run_dir, place))
    announce(ended, run_dir, place)
    return int(ended.verdict["exit_code"])


def own_places(ended: Ended, run_dir: RunDir, place: Place) -> Sequence[Path]:
    """Where this host records the verdict: host 0 does it for all; another has a file of its own, if it is alone."""
    if not place.host_index:
        return places(run_dir, ended.attempt)
    own = run_dir.attempt_dir(ended.attempt) / f"verdict.host-{place.host_index}.json"
    return [own] if ended.alone and ended.attempt else []


def step_of(saved: Saved | None) -> int | None:
    return saved.step if saved else None


@contextmanager
def noting_signals() -> Iterator[Signals]:
    """Notes signals that ask the agent to end, those too that came just before. Only a main thread can.

    One that is ignored, as under nohup, stays ignored.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    previous = heed(signals.note)
    signals.received[:0] = [Ask(signal.Signals(number).name, seconds) for number, seconds in taken()]
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def watch_over(
    workers: Sequence[Worker], signals: Signals, config: Config, group: Group, orders: Orders, lead: Lead
) -> None:
    """Returns when all hosts' workers are gone, or have to go: after a failure, stuck, or out of time.

    Raises:
        LeaderLost: agent 0 is lost.
    """
    while not orders.over:
        listen(workers, POLL_SECONDS)
        dismiss(workers, config.timeouts.shutdown_seconds)
        group.publish(report(workers, signals, orders, group).as_json())
        if group.host_index == 0:
            lead.decide(group, config)
        obey(workers, group, orders)


def obey(workers: Sequence[Worker], group: Group, orders: Orders) -> None:
    """Does what agent 0 has decided, if it is new."""
    command = group.decided("stop") or group.decided("hold") or RUN
    if command != orders.command:
        for worker in workers:
            worker.block.command(command)
        orders.command, orders.since = command, time.monotonic()
    if last := group.decided("end"):
        if last["stacks"]:
            dump_stacks(workers)
        orders.over = True


def report(workers: Sequence[Worker], signals: Signals, orders: Orders, group: Group) -> Report:
    """What is known of this host's workers now."""
    several = len(group.meeting.members) > 1
    here = f"the agent of host {group.host_index}" if several else "the agent"
    asks = [*(ask._replace(to=here) for ask in signals.received), *(ask for worker in workers for ask in worker.asks)]
    return Report(
        ranks=tuple(worker.view() for worker in workers),
        failures=tuple(worker.failure for worker in workers if worker.failure),
        finished=tuple(worker.finished for worker in workers if worker.finished),
        asks=tuple(asks),
        running=any(worker.running for worker in workers),
        held_seconds=time.monotonic() - orders.since if orders.command == HOLD else 0.0,
    )


def dismiss(workers: Sequence[Worker], shutdown_seconds: float) -> None:
    """Ends workers that have done and saved everything, but do not go."""
    for worker in workers:
        if worker.running and worker.finished and time.monotonic() > worker.finished.seconds + shutdown_seconds:
            kill(worker, signal.SIGKILL)


def announce(ended: Ended, run_dir: RunDir, place: Place) -> None:
    """Says why the run failed: one line if that explains it, else with the end of the culprit's log, on one host."""
    code = ExitCode(ended.verdict["exit_code"])
    if code == ExitCode.COMPLETED:
        return
    if os.isatty(1):
        with suppress(OSError):
            os.write(1, b"\x1b[?25h")  # a progress line that was cut off has left the cursor hidden
    if place.host_index == 0:
        if ended.tail is not None:
            say(last_lines(log_tail(run_dir.log(ended.attempt, ended.tail))))
        for rank in ended.logs:
            tell(f"the log is {run_dir.log(ended.attempt, rank)}")
    tell(ended.verdict["message"])
    following = ended.verdict["next"]
    if code.worth_retrying and not following.startswith("nothing"):
        tell(f"next: {following}")
