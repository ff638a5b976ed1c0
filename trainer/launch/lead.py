"""What agent 0 decides for all hosts, from their reports: when the workers have to stop or end, and the verdict."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainer.config import Config
from trainer.errors import ExitCode
from trainer.launch.rendezvous import Group
from trainer.launch.report import Report, gather
from trainer.launch.verdict import Saved, Verdict, advice, judge
from trainer.resilience.policy import Stuck, find_stuck, limits
from trainer.resilience.preemption import HOLD_SECONDS, Plan, advance
from trainer.resilience.progress import HOLD, RUN

SETTLE_SECONDS = 0.5
"""After the first failure, how long to listen for others: the one noticed first need not be the cause."""
HALT_SECONDS = 10.0
"""The same, where all ranks halt at the same step and may still be writing the checkpoint before it."""
END_SECONDS = 10.0
"""How long to wait for the last reports of hosts that were told to end their workers."""


@dataclass
class Lead:
    """What agent 0 makes of an attempt so far.

    lost: when each host that is lost was found to be so.
    """

    plan: Plan = field(default_factory=Plan)
    stuck: Stuck | None = None
    settled: float = float("inf")
    lost: dict[int, float] = field(default_factory=dict)

    def look(self, group: Group) -> Report:
        """All hosts' newest reports as one."""
        return gather(group, self.lost, time.monotonic())

    def decide(self, group: Group, config: Config) -> None:
        """Decides what has to be: "hold", then "stop" after a step; "end", once all workers are gone or have to go."""
        seen, now = self.look(group), time.monotonic()
        if seen.failures:
            halted = all(failure.exit_code == ExitCode.HALTED for failure in seen.failures)
            self.settled = min(self.settled, now + (HALT_SECONDS if halted else SETTLE_SECONDS))
        self._steer(group, seen, now, config.timeouts.grace_seconds)
        if self.plan.command == RUN and not seen.failures:
            self.stuck = find_stuck(seen.ranks, limits(config.timeouts), now)
        if self.stuck or self.plan.ends or now > self.settled or not seen.running:
            group.decide("end", {"stacks": self.stuck is not None})

    def _steer(self, group: Group, seen: Report, now: float, grace_seconds: float) -> None:
        before = self.plan
        if before.command == HOLD and seen.held_seconds < HOLD_SECONDS:
            before = before._replace(since=now)  # some host has not heard of it yet, or only just
        self.plan = advance(before, seen.asks, seen.ranks, now, grace_seconds)
        if self.plan.command != before.command:
            group.decide("hold" if self.plan.command == HOLD else "stop", self.plan.command)

    def conclude(self, group: Group, saved: Saved | None) -> Verdict:
        """The verdict on an attempt whose workers are gone, or should be. Waits a while for the hosts to say so."""
        deadline = time.monotonic() + END_SECONDS
        while self.look(group).running and time.monotonic() < deadline:
            time.sleep(0.05)
        seen = self.look(group)
        all_finished = len(seen.finished) == group.meeting.num_processes
        asked = seen.asks[0] if seen.asks and not all_finished else None
        verdict = judge(seen.ranks, seen.failures, self.stuck, asked)
        if all_finished and seen.finished[0].exit_code == ExitCode.PREEMPTED:
            reason = f"ended by {seen.asks[0].signal} to {seen.asks[0].to}" if seen.asks else "ended early"
            verdict = Verdict(ExitCode.PREEMPTED, f"{reason}: {seen.finished[0].message}")
        elif verdict.exit_code == ExitCode.PREEMPTED:
            verdict = replace(verdict, message=f"{verdict.message}{self._why_so_late(seen)}; {kept(saved)}")
        return replace(verdict, last_checkpoint=saved, advice=advice(verdict.exit_code, saved))

    def _why_so_late(self, seen: Report) -> str:
        """Why an end that was asked for left nothing saved."""
        late = seen.failures[0].message if seen.failures and not self.plan.ends else self.plan.ends
        return f": {late}" if late else ""


def kept(saved: Saved | None) -> str:
    return f"the newest checkpoint is of step {saved.step}" if saved else "there is no checkpoint"


def logs_to_show(verdict: Verdict) -> tuple[int | None, Sequence[int]]:
    """The rank whose log's end tells why the run failed, None if none has to; and those whose logs to name."""
    failure = verdict.failure
    unexplained = failure is not None and not failure.explained
    named = [view.rank for view in verdict.culprits] if unexplained or verdict.exit_code == ExitCode.STUCK else []
    return (failure.rank if failure is not None and unexplained else None), named
