"""What an agent shows when it joins, and what makes two of them unable to train together."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.launch.rendezvous_group import Member


@dataclass(frozen=True)
class Ticket:
    """What one agent was started with.

    attempt: the attempt that it means to join; 0: whichever there is.
    digest:  a hash of its resolved settings.
    """

    member: Member
    num_hosts: int
    attempt: int
    digest: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Ticket":
        """The ticket in ``as_json``'s form.

        Raises:
            TypeError: it is none.
        """
        if not isinstance(values, Mapping) or not isinstance(values.get("member"), Mapping):
            raise TypeError("no ticket")
        ticket = cls(**{**values, "member": Member(**values["member"])})
        numbers = (ticket.member.host_index, ticket.member.num_workers, ticket.num_hosts, ticket.attempt)
        texts = (ticket.member.hostname, ticket.digest)
        if not all(type(number) is int for number in numbers) or not all(isinstance(text, str) for text in texts):
            raise TypeError("no ticket")
        return ticket


def contradiction(mine: Ticket, theirs: Ticket, taken: Member | None) -> str:
    """Why agent 0, with the ticket ``mine``, cannot train together with ``theirs``; "" if it can.

    taken: the member that already has their index, if any.
    """
    me, other = mine.member, theirs.member
    index, who, here = other.host_index, f"host {other.host_index} ({other.hostname})", f"host 0 ({me.hostname})"
    if theirs.num_hosts != mine.num_hosts:
        return f"{who} has --num-hosts {theirs.num_hosts}, {here} has --num-hosts {mine.num_hosts}: make them alike"
    if taken is not None:
        return (
            f"two agents were started as host {index}, on {taken.hostname} and on {other.hostname}: "
            "give each its own --host-index, and start one agent a host"
        )
    if not 0 < index < mine.num_hosts:
        return f"{who} is out of range: --host-index goes from 0 to {mine.num_hosts - 1}"
    if other.num_workers != me.num_workers:
        return (
            f"{who} has --processes {other.num_workers}, {here} has --processes {me.num_workers}: "
            "every host starts as many workers as the others"
        )
    if theirs.digest != mine.digest:
        return (
            f"{who} has other settings than {here}: start all with the same CONFIG, --set and environment, and on "
            "--resume with a run directory on a disk that all share"
        )
    return ""
