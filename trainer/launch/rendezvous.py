"""Where the agents of a run meet: agent 0 listens on one TCP port, and all of them get a ``Group``.

    rendezvous_wire.py      JSON lines, and the proof of the token
    rendezvous_join.py      what an agent shows, and what does not fit together
    rendezvous_group.py     what an agent sees of the others
    rendezvous_pump.py      the thread that moves the bytes
    rendezvous_leader.py    agent 0's side
    rendezvous_follower.py  the others' side

No JAX here. A stranger on the port is dropped, whatever it sends, and harms nothing.
"""

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.errors import SettingsRefused
from trainer.launch.clusters import Place, parse_address
from trainer.launch.rendezvous_follower import Follower
from trainer.launch.rendezvous_group import (
    LEASE_SECONDS,
    Abandoned,
    Group,
    LeaderLost,
    LocalGroup,
    Meeting,
    Member,
    NeverMet,
    View,
)
from trainer.launch.rendezvous_join import Ticket
from trainer.launch.rendezvous_leader import Leader

__all__ = ["LEASE_SECONDS", "Abandoned", "Group", "LeaderLost", "Meeting", "Member", "NeverMet", "View", "join"]

BIND_SECONDS = 10.0
"""How long to try for the port: an agent 0 that this one follows may be just ending."""


@contextmanager
def join(
    place: Place,
    *,
    num_workers: int,
    attempt: int = 0,
    digest: str = "",
    init_seconds: float = 300.0,
    abandoned: Callable[[], bool] = lambda: False,
    loopback: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Group]:
    """The group of one attempt, from when all hosts have come until the block ends; ``leave`` in it parts together.

    num_workers: how many worker processes this host starts.
    attempt:     its number on host 0; elsewhere the one that this agent means, 0: whichever there is.
    digest:      a hash of the settings, which must be alike on all hosts.
    abandoned:   asked now and then while waiting; True gives up.
    loopback:    whether the hosts may meet on a loopback address, as in a test on one machine.

    Raises:
        SettingsRefused: options, settings or address do not fit together.
        NeverMet:        the hosts were not complete after ``init_seconds``; names those that never came.
        LeaderLost:      this agent is left from another attempt than agent 0's.
        Abandoned:       ``abandoned()``.
    """
    mine = Ticket(Member(place.host_index, socket.gethostname(), num_workers), place.num_hosts, attempt, digest)
    if place.num_hosts == 1:
        with reserved_address("127.0.0.1", num_workers) as coordinator:
            yield LocalGroup(Meeting(attempt, (mine.member,), coordinator))
        return
    host, port = parse_address(place.rendezvous)
    if not loopback:
        refuse_loopback(host, place)
    if place.host_index:
        follower = Follower((host, port), place.token, mine, clock)
        try:
            follower.start()
            follower.gather(init_seconds, abandoned)
            yield follower
        finally:
            follower.close()
        return
    leader = Leader(listen(host, port, min(BIND_SECONDS, init_seconds)), place.token, mine, clock)
    try:
        leader.start()
        with reserved_address(leader.address, 2) as coordinator:
            leader.gather(init_seconds, coordinator, abandoned)
            yield leader
    finally:
        leader.close()


@contextmanager
def reserved_address(host: str, num_processes: int) -> Iterator[str]:
    """HOST:PORT for the workers' coordinator, a port that nobody else on this host gets meanwhile; "" for one worker.

    The socket is bound and stays so, but never listens. With SO_REUSEPORT, which the coordinator sets too, the
    coordinator can bind beside it, while the kernel gives the port to nobody who asks for any free one.
    """
    if num_processes == 1:
        yield ""
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield f"[{host}]:{holder.getsockname()[1]}" if ":" in host else f"{host}:{holder.getsockname()[1]}"


def listen(host: str, port: int, seconds: float) -> socket.socket:
    """A socket that listens on that address alone.

    Raises:
        SettingsRefused: the address is none of this host's, or the port stayed taken for ``seconds``.
    """
    given = f"--rendezvous {host}:{port}"
    deadline = time.monotonic() + seconds
    while True:
        try:
            family, _, _, _, address = resolve(host, port)[0]
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            if isinstance(error, socket.gaierror):
                raise SettingsRefused(f"{given}: {host} is not known on host 0 ({error.strerror})") from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise SettingsRefused(
                    f"{given}: is no address of host 0 ({socket.gethostname()}), where agent 0 must listen"
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise SettingsRefused(f"{given}: agent 0 cannot listen there ({error.strerror})") from error
            if time.monotonic() > deadline:
                raise SettingsRefused(
                    f"{given}: port {port} is taken on this host, perhaps by another run: name another, on all hosts"
                ) from error
            time.sleep(0.1)


def refuse_loopback(host: str, place: Place) -> None:
    """Refuses an address that only this host itself could reach.

    Raises:
        SettingsRefused: it is one.
    """
    try:
        addresses = {info[4][0] for info in resolve(host, None)}
    except OSError:
        return  # a name that is not known yet is tried again, until the limit
    if all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses):
        raise SettingsRefused(
            f"--rendezvous {place.rendezvous}: {host} is {', '.join(map(str, addresses))} here, a loopback address, "
            f"which no other of the {place.num_hosts} hosts can reach: give an address of host 0 on the network, or "
            "correct /etc/hosts"
        )


def resolve(host: str, port: int | None) -> list:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
