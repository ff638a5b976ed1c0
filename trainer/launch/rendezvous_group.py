"""What an agent sees of the others: who is there, what each last said, and what agent 0 has decided."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from trainer.errors import ExitCode, LockstepError

View = Mapping[str, Any]
"""What an agent says of its own host's ranks: anything that JSON holds."""

RENEW_SECONDS = 1.0
"""How often each side lets the other hear of it."""
LEASE_SECONDS = 5.0
"""Who has not been heard of for so long is taken for lost."""


class NeverMet(LockstepError):
    """The hosts of the run did not all come within the limit (code 5)."""

    exit_code = ExitCode.STUCK


class LeaderLost(LockstepError):
    """Agent 0, its host or the link to it is lost (code 6)."""

    exit_code = ExitCode.DIED


class Abandoned(Exception):
    """The wait for the other hosts was given up, because this agent was asked to end."""


@dataclass(frozen=True)
class Member:
    """One host of a run: its index, its name, how many workers it starts, and its address as the agents know it."""

    host_index: int
    hostname: str
    num_workers: int
    address: str = ""


@dataclass(frozen=True)
class Meeting:
    """What all agents of an attempt know once they have met.

    members:     the hosts, by index.
    coordinator: HOST:PORT for the workers' ``jax.distributed``; "" for a single worker.
    """

    attempt: int
    members: tuple[Member, ...]
    coordinator: str

    @property
    def num_processes(self) -> int:
        return sum(member.num_workers for member in self.members)

    def ranks(self, host_index: int) -> range:
        """The ranks on a host: they are counted in the order of the hosts."""
        first = sum(member.num_workers for member in self.members[:host_index])
        return range(first, first + self.members[host_index].num_workers)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Meeting":
        return cls(**{**values, "members": tuple(Member(**member) for member in values["members"])})


class Group(Protocol):
    """The agents of one attempt, as one of them sees it. No method blocks but ``leave``.

    Times that travel in views are of the sender's monotonic clock; ``local_seconds`` makes them comparable.
    """

    host_index: int

    @property
    def meeting(self) -> Meeting: ...

    def publish(self, view: View) -> None:
        """Makes ``view`` the newest of this host."""
        ...

    def views(self) -> dict[int, View]:
        """The newest views: of all hosts that have published one on agent 0, of this host elsewhere."""
        ...

    def lost(self) -> dict[int, str]:
        """On agent 0, the hosts that are lost, each with the reason; empty elsewhere.

        Raises:
            LeaderLost: this is not agent 0, and agent 0 is lost.
        """
        ...

    def local_seconds(self, host_index: int, seconds: float) -> float:
        """A time of another host's monotonic clock on this one's, to within the delay of a message."""
        ...

    def decide(self, name: str, value: Any) -> None:
        """On agent 0: makes ``value`` the decision called ``name``, everywhere. The first one stands."""
        ...

    def decided(self, name: str) -> Any:
        """The decision called ``name``; None while there is none.

        Raises:
            LeaderLost: there is none, this is not agent 0, and agent 0 is lost.
        """
        ...

    def leave(self, seconds: float) -> None:
        """Returns when every host that is not lost wants to leave too, or after ``seconds``."""
        ...


class LocalGroup:
    """The group of a run on one host: no socket, no thread."""

    def __init__(self, meeting: Meeting) -> None:
        self.host_index = 0
        self.meeting = meeting
        self._views: dict[int, View] = {}
        self._decisions: dict[str, Any] = {}

    def publish(self, view: View) -> None:
        self._views[0] = view

    def views(self) -> dict[int, View]:
        return dict(self._views)

    def lost(self) -> dict[int, str]:
        return {}

    def local_seconds(self, host_index: int, seconds: float) -> float:
        return seconds

    def decide(self, name: str, value: Any) -> None:
        self._decisions.setdefault(name, value)

    def decided(self, name: str) -> Any:
        return self._decisions.get(name)

    def leave(self, seconds: float) -> None:
        return


def named(members: Sequence[Member]) -> str:
    """Hosts for a message, such as ``0 (a), 2 (c)``."""
    return ", ".join(f"{member.host_index} ({member.hostname})" for member in members)
