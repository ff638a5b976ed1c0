"""The other agents' side of the rendezvous: find agent 0, tell it how this host fares, and hear what it decides."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from trainer.errors import ExitCode, LockstepError, SettingsRefused
from trainer.launch.rendezvous_group import LEASE_SECONDS, RENEW_SECONDS, Abandoned, LeaderLost, Meeting, NeverMet, View
from trainer.launch.rendezvous_join import Ticket
from trainer.launch.rendezvous_pump import Clock, Pump, wait_for_bytes
from trainer.launch.rendezvous_wire import Link, Message, proof, proves

CONNECT_SECONDS = 2.0
RETRY_SECONDS = 0.5
OTHER_TOKEN_SECONDS = 15.0
"""For how long to try again while our proof is not accepted. An agent 0 of another run may be just ending there; ours
would wait for its port no longer than that."""
REFUSALS: dict[int, type[LockstepError]] = {
    ExitCode.SETTINGS_REFUSED: SettingsRefused,
    ExitCode.STUCK: NeverMet,
    ExitCode.DIED: LeaderLost,
}


class Follower(Pump):
    """A ``rendezvous_group.Group`` on every host but host 0. ``address`` is where agent 0 listens."""

    def __init__(self, address: tuple[str, int], token: str, mine: Ticket, clock: Clock) -> None:
        super().__init__(clock)
        self.host_index = mine.member.host_index
        self._address = address
        self._token = token
        self._mine = mine
        self._link: Link | None = None
        self._trusted = False
        self._their_nonce = ""
        self._why = "it was not tried yet"
        self._refused: LockstepError | None = None
        self._not_believed_since: float | None = None
        self._abandoned = False
        self._met: Meeting | None = None
        self._gone = ""
        self._view: View | None = None
        self._sent: View | None = None
        self._renewed = clock()
        self._decisions: dict[str, Any] = {}
        self._released = False
        self._sleep = threading.Event()

    @property
    def meeting(self) -> Meeting:
        assert self._met is not None, "the hosts have not met yet"
        return self._met

    def gather(self, seconds: float, abandoned: Callable[[], bool]) -> None:
        """Returns once agent 0 says that all hosts have come.

        Raises:
            LockstepError: agent 0 refuses, or did not say so within ``seconds``.
            Abandoned:     ``abandoned()``, here or on another host.
        """

        def over() -> bool:
            return self._met is not None or self._refused is not None or self._abandoned or abandoned()

        if not self.wait_until(over, seconds) and self._trusted:
            self.wait_until(over, LEASE_SECONDS)  # agent 0 is about to say who is missing
        with self.lock:
            if self.broken:
                raise RuntimeError(self.broken)
            if self._refused is not None:
                raise self._refused
            if self._abandoned or (self._met is None and abandoned()):
                if self._link is not None and self._trusted:
                    self._link.send({"abandon": 1})
                raise Abandoned
            if self._met is None and self._not_believed_since is not None:
                raise SettingsRefused(self._other_token())
            if self._met is None:
                raise NeverMet(self._never_met(seconds))

    def publish(self, view: View) -> None:
        with self.lock:
            if view != self._view:
                self._view = dict(view)

    def views(self) -> dict[int, View]:
        with self.lock:
            return {} if self._view is None else {self.host_index: self._view}

    def lost(self) -> dict[int, str]:
        with self.lock:
            if why := self.broken or self._gone:
                host, port = self._address
                raise LeaderLost(
                    f"host 0 ({self.meeting.members[0].hostname}), agent 0 at {host}:{port}, is lost: {why}"
                )
            return {}

    def local_seconds(self, host_index: int, seconds: float) -> float:
        return seconds

    def decide(self, name: str, value: Any) -> None:
        raise AssertionError("only agent 0 decides")

    def decided(self, name: str) -> Any:
        with self.lock:
            if name not in self._decisions:
                self.lost()
            return self._decisions.get(name)

    def leave(self, seconds: float) -> None:
        with self.lock:
            if self._link is not None:
                self._link.send({"leave": 1})
        self.wait_until(lambda: self._released or bool(self._gone), seconds)
        self.close()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self._sleep.set()
            if self._link is not None:
                self._link.close("closed here")

    def turn(self) -> None:
        if self._link is None:
            self._connect()
            return
        link = self._link
        ready = wait_for_bytes([link])
        with self.lock:
            now = self.clock()
            if ready and not link.closed:
                link.flush()
                for message in link.receive(now):
                    self._hear(link, message)
            self._tend(link, now)
        if link.closed:
            self._sleep.wait(RETRY_SECONDS)

    def _connect(self) -> None:
        """One try to reach agent 0. It may last seconds, so it is made without the lock."""
        try:
            sock = socket.create_connection(self._address, timeout=CONNECT_SECONDS)
        except OSError as error:
            with self.lock:
                self._why = error.strerror or str(error) or type(error).__name__
            self._sleep.wait(RETRY_SECONDS)
            return
        with self.lock:
            self._link, self._trusted = Link(sock, self._address[0], self.clock()), False
            if not self._their_nonce:
                self._why = "it answers, but not as an agent does: another program may have the port"
            if self.closed:
                self._link.close("closed here")

    def _hear(self, link: Link, message: Message) -> None:
        if "nonce" in message and not self._trusted:
            theirs = str(message["nonce"])
            shown = {"nonce": link.nonce, "proof": proof(self._token, "agent", theirs, link.nonce)}
            link.send({**shown, "ticket": self._mine.as_json()})
            self._their_nonce = theirs
        elif "proof" in message and not self._trusted:
            self._trusted = proves(message, self._token, "leader", link.nonce, self._their_nonce)
            if self._trusted:
                self._why, self._not_believed_since = "it waits for the other hosts", None
            else:
                self._not_believed(link)
        elif "other_token" in message and not self._trusted and self._met is None:
            self._not_believed(link)
        elif "wait" in message and self._met is None:
            self._why = str(message["wait"])[:200]
            link.close(self._why)
        elif self._trusted:
            self._obey(message)

    def _not_believed(self, link: Link) -> None:
        """The token here is not agent 0's, or another run's agent 0 is still there: worth some more tries."""
        now = self.clock()
        if self._not_believed_since is None:
            self._not_believed_since = now
        elif now - self._not_believed_since >= OTHER_TOKEN_SECONDS:
            self._refused = SettingsRefused(self._other_token())
        link.close("it knows another LOCKSTEP_TOKEN")

    def _obey(self, message: Message) -> None:
        if "start" in message:
            self._met = Meeting.from_json(message["start"])
        elif "refused" in message:
            self._refused = REFUSALS.get(message["exit_code"], LeaderLost)(str(message["refused"]))
        elif "decision" in message:
            name, value = message["decision"]
            self._decisions.setdefault(name, value)
        elif "abandoned" in message:
            self._abandoned = True
        elif "bye" in message:
            self._released = True

    def _tend(self, link: Link, now: float) -> None:
        """What time brings: agent 0's lease, and ours to renew; a lost link is made anew until all have met."""
        link.lapse(now, LEASE_SECONDS)
        if link.closed and self._met is None:
            self._link = None
        elif link.closed:
            self._gone = self._gone or link.closed
        elif self._trusted and (self._view is not self._sent or now - self._renewed >= RENEW_SECONDS):
            changed = {} if self._view is self._sent else {"view": self._view}
            self._renewed, self._sent = now, self._view
            link.send({**changed, "now": now})

    def _other_token(self) -> str:
        host, port = self._address
        return (
            f"host {self.host_index}: agent 0 at --rendezvous {host}:{port} dropped us at the proof of LOCKSTEP_TOKEN: "
            "the token here is not host 0's. Give all hosts the same LOCKSTEP_TOKEN; if another run has that "
            "port on host 0, name another port on all hosts"
        )

    def _never_met(self, seconds: float) -> str:
        host, port = self._address
        return (
            f"host {self.host_index} waited {seconds:g} s (timeouts.init_seconds) for agent 0 at --rendezvous "
            f"{host}:{port}: {self._why}. Start the agent with --host-index 0 there, and see whether this host "
            "reaches that address"
        )
