"""What the agent tells a worker, and what a worker tells its agent."""

import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.placement import Placement


@dataclass(frozen=True)
class Job:
    """One attempt at a run on this host.

    config:        the resolved settings, as TOML.
    run_dir:       path of the run directory, made ready by ``RunDir.open``.
    attempt:       the number that ``RunDir.open`` returned; 0 if this is none, and leaves no verdict.
    num_processes: how many workers.
    resume:        whether the user asked to go on with an existing run.
    max_restarts:  how often the agent starts the workers again after an end that is worth another try.
    entry:         import path of what the workers call: (config, run_dir, attempt, console, **args) -> None.
    args:          keywords for the entry, of kinds that JSON holds.
    """

    config: str
    run_dir: str
    attempt: int = 1
    num_processes: int = 1
    resume: bool = False
    max_restarts: int = 0
    entry: str = "trainer.loop:run"
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSpec:
    """One worker's part of a job, which it reads from its standard input: settings may hold secrets, and the
    environment is passed on to every child.

    report_fd:  inherited file descriptor for events.
    display_fd: inherited file descriptor of the agent's standard output, for rank 0; None for the others.
    agent_pid:  whom the worker must not outlive.
    signal_fd:  inherited file descriptor for the numbers of signals that the worker is sent.
    progress_fd: inherited file descriptor of the memory for its marks.
    """

    job: Job
    placement: Placement
    report_fd: int
    display_fd: int | None
    agent_pid: int
    signal_fd: int
    progress_fd: int

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "WorkerSpec":
        values = json.loads(text)
        return cls(**values | {"job": Job(**values["job"]), "placement": Placement(**values["placement"])})


@dataclass(frozen=True)
class Event:
    """One line from a worker to its agent.

    event:     "started" (JAX runs), "finished" (the work is done and saved) or "failed".
    exit_code: of a failure, see ``errors.ExitCode``; of a worker that saved and stopped early, PREEMPTED.
    message:   of either of these, one line.
    explained: whether the message says all that a user needs, so that no traceback has to be shown.
    seconds:   when, on the host's monotonic clock, which its processes share.
    """

    event: str
    exit_code: int = 0
    message: str = ""
    explained: bool = True
    seconds: float = field(default_factory=time.monotonic)


def send(fd: int, event: Event) -> None:
    """Writes ``event`` to the agent. An agent that is gone is no reason to fail."""
    # A pipe holds 64 KiB, and JSON makes at most six bytes of a character: so one write takes all of it.
    short = replace(event, message=event.message[:10_000])
    try:
        os.write(fd, (json.dumps(asdict(short)) + "\n").encode())
    except OSError:
        return


def parse(line: bytes) -> Event:
    """The event in one line that ``send`` wrote."""
    return Event(**json.loads(line))
