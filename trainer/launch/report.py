"""What an agent says of its own host's workers, so that agent 0 can judge all of them alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.errors import ExitCode
from trainer.launch.rendezvous_group import Group
from trainer.launch.spec import Event
from trainer.launch.verdict import Failure
from trainer.resilience.policy import RankView
from trainer.resilience.preemption import Ask
from trainer.resilience.progress import Marks


@dataclass(frozen=True)
class Report:
    """The workers of one host, or of several, at one moment. Times are on the clock of whoever holds it.

    ranks:        what is known of each.
    failures:     of those that ended without being asked to.
    finished:     of those that have done and saved their work.
    asks:         the signals that asked for an end, to the agent or to a worker.
    running:      whether any worker still runs.
    held_seconds: for how long all have been told to hold.
    """

    ranks: tuple[RankView, ...] = ()
    failures: tuple[Failure, ...] = ()
    finished: tuple[Event, ...] = ()
    asks: tuple[Ask, ...] = ()
    running: bool = True
    held_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ranks": [(rank, host, list(marks), done, stopped) for rank, host, marks, done, stopped in self.ranks],
            "asks": [list(ask) for ask in self.asks],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], local: Callable[[float], float]) -> "Report":
        """The report in ``as_json``'s form, its times put on this host's clock by ``local``."""

        def rank_view(rank: int, host: str, marks: Sequence[Any], done: bool, stopped: bool) -> RankView:
            known = Marks(*marks)
            return RankView(rank, host, known._replace(moved=local(known.moved)), done, stopped)

        failures = [Failure(**failure) for failure in values["failures"]]
        finished = [Event(**event) for event in values["finished"]]
        return cls(
            ranks=tuple(rank_view(*view) for view in values["ranks"]),
            failures=tuple(replace(failure, seconds=local(failure.seconds)) for failure in failures),
            finished=tuple(replace(event, seconds=local(event.seconds)) for event in finished),
            asks=tuple(Ask(name, local(seconds), to) for name, seconds, to in values["asks"]),
            running=values["running"],
            held_seconds=values["held_seconds"],
        )


def gather(group: Group, lost_since: dict[int, float], now: float) -> Report:
    """The reports of all hosts as one, on agent 0's clock. Each host that is lost counts as one failure.

    lost_since: when each lost host was found to be so; added to here.
    """
    meeting, lost = group.meeting, group.lost()
    reports = {
        host: Report.from_json(view, lambda seconds, host=host: group.local_seconds(host, seconds))
        for host, view in group.views().items()
    }
    living = [host for host in range(len(meeting.members)) if host not in lost]
    failures = [failure for report in reports.values() for failure in report.failures]
    for host, why in lost.items():
        ranks = meeting.ranks(host)
        numbers = ", ".join(map(str, ranks))
        message = f"host {host} ({meeting.members[host].hostname}) with ranks {numbers} is lost: {why}"
        found = lost_since.setdefault(host, now)
        failures.append(Failure(ranks[0], found, int(ExitCode.DIED), message, explained=True))
    return Report(
        ranks=tuple(
            replace_done(view, host in lost) for host, report in sorted(reports.items()) for view in report.ranks
        ),
        failures=tuple(failures),
        finished=tuple(event for report in reports.values() for event in report.finished),
        asks=tuple(sorted((ask for r in reports.values() for ask in r.asks), key=lambda ask: ask.seconds)),
        running=any(host not in reports or reports[host].running for host in living),
        held_seconds=min((reports[host].held_seconds if host in reports else 0.0 for host in living), default=0.0),
    )


def replace_done(view: RankView, done: bool) -> RankView:
    """``view``, needing no watching any more if ``done``."""
    return view._replace(done=view.done or done)
