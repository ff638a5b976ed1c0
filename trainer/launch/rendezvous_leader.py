"""Agent 0's side of the rendezvous: it lets the others in, listens to them, and tells them what it has decided."""

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainer.errors import LockstepError, SettingsRefused
from trainer.launch.rendezvous_group import LEASE_SECONDS, RENEW_SECONDS, Abandoned, Meeting, NeverMet, View, named
from trainer.launch.rendezvous_join import Ticket, contradiction
from trainer.launch.rendezvous_pump import Clock, Pump, wait_for_bytes
from trainer.launch.rendezvous_wire import MOST_BYTES, MOST_BYTES_OF_A_STRANGER, Link, Message, proof, proves

HANDSHAKE_SECONDS = 5.0
"""A connection that has not proven by then that it knows the token is closed."""
MOST_STRANGERS = 64
MOST_REMEMBERED = 5
TURNED_AWAY = "turned away"


class Leader(Pump):
    """A ``rendezvous_group.Group`` on agent 0.

    listener: a listening socket.
    mine:     this host's ticket; the others' must agree with it.
    """

    host_index = 0

    def __init__(self, listener: socket.socket, token: str, mine: Ticket, clock: Clock) -> None:
        super().__init__(clock)
        listener.setblocking(False)
        self._listener = listener
        self._token = token
        self._mine = mine
        self._strangers: list[Link] = []
        self._links: dict[int, Link] = {}
        self._members = {0: replace(mine.member, address=listener.getsockname()[0])}
        self._refused: LockstepError | None = None
        self._abandoned = False
        self._turned_away: dict[str, str] = {}
        self._met: Meeting | None = None
        self._views: dict[int, View] = {}
        self._offsets: dict[int, float] = {}
        self._lost: dict[int, str] = {}
        self._decisions: dict[str, Any] = {}
        self._left: set[int] = set()
        self._renewed = clock()

    @property
    def meeting(self) -> Meeting:
        assert self._met is not None, "the hosts have not met yet"
        return self._met

    @property
    def address(self) -> str:
        """Where the others reach this host."""
        return self._members[0].address

    def gather(self, seconds: float, coordinator: str, abandoned: Callable[[], bool]) -> None:
        """Returns once all hosts have come, after telling them to start with ``coordinator``.

        Raises:
            SettingsRefused: one came whose options or settings contradict this host's.
            NeverMet:        they were not complete after ``seconds``.
            Abandoned:       ``abandoned()``, here or on another host.
        """

        def over() -> bool:
            self._abandoned = self._abandoned or abandoned()
            return self._complete() or self._refused is not None or self._abandoned

        in_time = self.wait_until(over, seconds)
        with self.lock:
            if self.broken:
                raise RuntimeError(self.broken)
            if self._refused is None and self._abandoned:
                self._tell_all({"abandoned": 1})
                raise Abandoned
            if self._refused is None and not in_time:
                self._refuse(NeverMet(self._who_is_missing(seconds)))
            if self._refused is not None:
                raise self._refused
            members = tuple(self._members[index] for index in range(self._mine.num_hosts))
            self._met = Meeting(self._mine.attempt, members, coordinator)
            self._tell_all({"start": self._met.as_json()})

    def publish(self, view: View) -> None:
        with self.lock:
            self._views[0] = view

    def views(self) -> dict[int, View]:
        with self.lock:
            return dict(self._views)

    def lost(self) -> dict[int, str]:
        with self.lock:
            if self.broken:
                return dict.fromkeys(self._links, f"the rendezvous failed here: {self.broken}")
            return dict(self._lost)

    def local_seconds(self, host_index: int, seconds: float) -> float:
        with self.lock:
            return seconds + self._offsets.get(host_index, 0.0)

    def decide(self, name: str, value: Any) -> None:
        with self.lock:
            if name not in self._decisions:
                self._decisions[name] = value
                self._tell_all({"decision": [name, value]})

    def decided(self, name: str) -> Any:
        with self.lock:
            return self._decisions.get(name)

    def leave(self, seconds: float) -> None:
        self.wait_until(lambda: self._left | self._lost.keys() >= self._links.keys(), seconds)
        with self.lock:
            self._tell_all({"bye": 1})
        self.wait_until(lambda: not any(link.wants_to_write for link in self._links.values()), RENEW_SECONDS)
        self.close()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self._listener.close()
            for link in [*self._strangers, *self._links.values()]:
                link.close("closed here")

    def turn(self) -> None:
        with self.lock:
            if self.closed:
                return
            links, listener = [*self._strangers, *self._links.values()], self._listener.fileno()
        ready = wait_for_bytes(links, listener)
        with self.lock:
            if self.closed:
                return
            now = self.clock()
            for link in links:
                if not link.closed and link.fileno() in ready:
                    link.flush()
                    self._handle(link, now)
            if listener in ready:
                self._accept(now)
            self._tend(now)

    def _handle(self, link: Link, now: float) -> None:
        for message in link.receive(now):
            if link.closed == TURNED_AWAY:
                return
            index = next((index for index, peer in self._links.items() if peer is link), None)
            if index is None:
                self._meet(link, message)
            else:
                self._hear(index, message, now)

    def _accept(self, now: float) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it is gone again, or there are too many files: the next turn tries anew
            return
        link = Link(sock, peer[0], now, MOST_BYTES_OF_A_STRANGER)
        self._strangers.append(link)
        link.send({"lockstep": 1, "nonce": link.nonce})
        for oldest in self._strangers[:-MOST_STRANGERS]:
            oldest.close("too many strangers")

    def _meet(self, link: Link, message: Message) -> None:
        """A stranger's first line: it proves that it knows the token, and becomes a member, or is turned away."""
        theirs = str(message.get("nonce"))
        if not proves(message, self._token, "agent", link.nonce, theirs):
            self._turn_away(link, {"other_token": 1}, "had another LOCKSTEP_TOKEN")
            return
        link.send({"proof": proof(self._token, "leader", theirs, link.nonce)})
        try:
            ticket = Ticket.from_json(message["ticket"])
        except (KeyError, TypeError):
            self._turn_away(link, {"wait": "it runs another version of Lockstep"}, "runs another version of Lockstep")
            return
        if ticket.attempt not in (0, self._mine.attempt):
            why = f"attempt {self._mine.attempt} is under way, and this agent is left from attempt {ticket.attempt}"
            self._turn_away(link, {"refused": why, "exit_code": 6}, f"was left from attempt {ticket.attempt}")
        elif self._met is not None:
            why = f"attempt {self._met.attempt} is under way with all its hosts"
            self._turn_away(link, {"wait": why}, "came late")
        else:
            self._admit(link, ticket)

    def _admit(self, link: Link, ticket: Ticket) -> None:
        member = replace(ticket.member, address=link.peer)
        self._drop_closed()
        if why := contradiction(self._mine, ticket, self._members.get(member.host_index)):
            self._refuse(SettingsRefused(why))
            self._turn_away(link, self._refusal(), "contradicts this host")
            return
        self._strangers.remove(link)
        link.most_bytes = MOST_BYTES
        self._links[member.host_index], self._members[member.host_index] = link, member

    def _turn_away(self, link: Link, message: Message, why: str) -> None:
        if len(self._turned_away) < MOST_REMEMBERED:
            self._turned_away[link.peer] = why
        link.send(message)
        link.close(TURNED_AWAY)

    def _refuse(self, error: LockstepError) -> None:
        """Ends the gathering for everybody who is here."""
        self._refused = self._refused or error
        self._tell_all(self._refusal())

    def _refusal(self) -> Message:
        assert self._refused is not None
        return {"refused": str(self._refused), "exit_code": int(self._refused.exit_code)}

    def _hear(self, index: int, message: Message, now: float) -> None:
        sent = message.get("now")
        if isinstance(sent, int | float):
            self._offsets[index] = min(self._offsets.get(index, float("inf")), now - sent)
        if "view" in message:
            self._views[index] = message["view"]
        if "leave" in message:
            self._left.add(index)
        if "abandon" in message:
            self._abandoned = True

    def _tend(self, now: float) -> None:
        """What time brings: strangers that say nothing, leases that run out, and ours to renew."""
        for link in self._strangers:
            if now - link.opened > HANDSHAKE_SECONDS:
                link.close("said nothing of use")
        self._strangers = [link for link in self._strangers if not link.closed]
        for link in self._links.values():
            link.lapse(now, LEASE_SECONDS)
        self._drop_closed()
        if now - self._renewed >= RENEW_SECONDS:
            self._renewed = now
            self._tell_all({"beat": 1})

    def _drop_closed(self) -> None:
        """Forgets members that have gone before all had met, for they may come again; later ones are lost."""
        for index, link in list(self._links.items()):
            if link.closed and self._met is None:
                del self._links[index], self._members[index]
            elif link.closed and index not in self._left:
                self._lost.setdefault(index, link.closed)

    def _tell_all(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)

    def _complete(self) -> bool:
        return self._members.keys() >= set(range(self._mine.num_hosts))

    def _who_is_missing(self, seconds: float) -> str:
        here = sorted(self._members)
        missing = [index for index in range(self._mine.num_hosts) if index not in here]
        away = "".join(f"; one from {address} {why}" for address, why in self._turned_away.items())
        return (
            f"after {seconds:g} s (timeouts.init_seconds) only hosts {named([self._members[i] for i in here])} of "
            f"--num-hosts {self._mine.num_hosts} have come to port {self._listener.getsockname()[1]} of "
            f"{self._members[0].address}; missing: {', '.join(map(str, missing))}{away}. Start their agents with "
            "--host-index, and see whether they reach that address"
        )
