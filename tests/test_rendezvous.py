"""Agents that meet: over real sockets on loopback, each on a thread; on an injected clock where time counts."""

import errno
import json
import random
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from trainer.errors import ExitCode, LockstepError, SettingsRefused
from trainer.launch import rendezvous, rendezvous_follower
from trainer.launch.clusters import Place
from trainer.launch.rendezvous import Abandoned, LeaderLost, NeverMet, join
from trainer.launch.rendezvous_follower import Follower
from trainer.launch.rendezvous_group import LEASE_SECONDS, Meeting, Member
from trainer.launch.rendezvous_join import Ticket
from trainer.launch.rendezvous_leader import HANDSHAKE_SECONDS, MOST_STRANGERS, Leader
from trainer.launch.rendezvous_wire import MOST_BYTES, MOST_BYTES_OF_A_STRANGER

TOKEN = "a secret of some length"
WAIT = 60.0
"""More than anything here lasts."""


@pytest.fixture
def port():
    """A port that nobody else gets meanwhile: it is bound, but a socket that does not listen lets agent 0 have it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def agents(port):
    """start(host_index, act, **options): an agent on a thread; its future holds what ``act(group)`` returned."""
    over = threading.Event()
    with ThreadPoolExecutor(8) as pool:

        def start(index, act=lambda group: group.meeting, *, num_hosts=2, token=TOKEN, **options) -> Future:
            place = Place(num_hosts, index, f"127.0.0.1:{port}", token)
            options = {"num_workers": 2, "attempt": 0 if index else 1, "init_seconds": WAIT, "loopback": True} | options
            options.setdefault("abandoned", over.is_set)

            def run():
                with join(place, **options) as group:
                    return act(group)

            return pool.submit(run)

        yield start
        over.set()  # a test that failed leaves none waiting on a clock that nobody advances


def wait_for(condition, seconds=WAIT):
    """What ``condition`` returned once it was true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.01)
    return value


def error_of(future) -> LockstepError:
    error = future.exception(WAIT)
    assert isinstance(error, LockstepError), error
    return error


def converse(group):
    """What every group does: each host publishes, agent 0 decides from all views, all hear it and leave together."""
    group.publish({"step": 10 + group.host_index})
    num_hosts = len(group.meeting.members)
    if group.host_index == 0:
        views = wait_for(lambda: len(group.views()) == num_hosts and group.views())
        group.decide("stop", max(view["step"] for view in views.values()))
        group.decide("stop", "the first stands")
    stop = wait_for(lambda: group.decided("stop"))
    assert group.decided("nothing") is None
    assert group.lost() == {}
    group.leave(WAIT)
    return group.meeting, stop


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_all_agents_end_with_the_same_meeting_and_decision(agents, num_hosts):
    futures = [
        agents(index, converse, num_hosts=num_hosts, attempt=3 if index == 0 else 0) for index in range(num_hosts)
    ]
    results = [future.result(WAIT) for future in futures]
    assert results == [results[0]] * num_hosts
    meeting, stop = results[0]
    assert (stop, meeting.attempt, meeting.num_processes) == (10 + num_hosts - 1, 3, 2 * num_hosts)
    assert [member.host_index for member in meeting.members] == list(range(num_hosts))
    assert {member.hostname for member in meeting.members} == {socket.gethostname()}
    assert meeting.coordinator.startswith("127.0.0.1:")


def test_ranks_are_counted_in_the_order_of_the_hosts():
    meeting = Meeting(1, tuple(Member(index, "abc"[index], 3) for index in range(3)), "a:1")
    assert [list(meeting.ranks(index)) for index in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert Meeting.from_json(json.loads(json.dumps(meeting.as_json()))) == meeting


def test_a_single_worker_needs_no_coordinator():
    with join(Place(), num_workers=1) as group:
        assert group.meeting.coordinator == ""


def test_the_coordinator_has_a_port_that_is_free_and_kept(agents):
    def bind(group):
        host, port = group.meeting.coordinator.rsplit(":", 1)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind((host, int(port)))
            other.listen()
        return True

    others = agents(1, lambda group: group.leave(WAIT))
    assert agents(0, lambda group: bind(group) and group.leave(WAIT) is None).result(WAIT)
    others.result(WAIT)


def test_agents_that_come_before_agent_0_keep_trying(agents):
    early = [agents(index, converse, num_hosts=3) for index in (2, 1)]
    threading.Event().wait(1.2)  # longer than two tries
    assert not any(future.done() for future in early)
    late = agents(0, converse, num_hosts=3)
    assert {future.result(WAIT)[1] for future in [*early, late]} == {12}


def test_a_second_attempt_can_use_the_same_port_at_once(agents):
    for attempt in (1, 2):
        futures = [agents(index, converse, attempt=attempt) for index in range(2)]
        assert [future.result(WAIT)[0].attempt for future in futures] == [attempt, attempt]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_hosts": 3}, r"host 1 \(.*\) has --num-hosts 3, host 0 \(.*\) has --num-hosts 2: make them alike"),
        ({"num_workers": 1}, r"host 1 \(.*\) has --processes 1, host 0 \(.*\) has --processes 2"),
        ({"digest": "x"}, r"host 1 \(.*\) has other settings than host 0"),
    ],
)
def test_hosts_that_contradict_each_other_are_refused_together(agents, other, message):
    first, second = agents(0), agents(1, **other)
    for future in (first, second):
        with pytest.raises(SettingsRefused, match=message):
            future.result(WAIT)


def test_two_agents_with_one_index_are_refused_together(agents):
    futures = [agents(index, num_hosts=3) for index in (0, 1, 1)]
    for future in futures:
        assert "two agents were started as host 1, on" in str(error_of(future))


def test_an_agent_left_from_another_attempt_is_turned_away(agents):
    clock = Clock()
    first = agents(0, attempt=4, init_seconds=1.5, clock=clock)
    stale = error_of(agents(1, attempt=3))
    assert (stale.exit_code, "left from attempt 3" in str(stale)) == (ExitCode.DIED, True)

    def ended_by_the_clock():
        clock.now += 1.6  # again and again, for who knows when the wait begins
        return first.done()

    wait_for(ended_by_the_clock)
    assert "was left from attempt 3" in str(error_of(first))


def test_who_comes_when_all_are_there_is_told_so(agents):
    gate, met = threading.Event(), threading.Barrier(3)
    futures = [agents(i, lambda g: (met.wait(WAIT), gate.wait(WAIT), g.leave(WAIT))[-1]) for i in range(2)]
    met.wait(WAIT)
    late = agents(1, init_seconds=3)
    assert "attempt 1 is under way with all its hosts" in str(error_of(late))
    gate.set()
    assert [future.result(WAIT) for future in futures] == [None, None]


def test_the_hosts_that_never_came_are_named_on_all_that_did(agents, port):
    futures = [agents(index, num_hosts=4, init_seconds=3 + 0.2 * (index == 0)) for index in (0, 2)]
    for future in futures:
        error = error_of(future)
        assert error.exit_code == ExitCode.STUCK
        assert "after 3.2 s (timeouts.init_seconds) only hosts 0 (" in str(error)
        assert f"of --num-hosts 4 have come to port {port} of 127.0.0.1; missing: 1, 3." in str(error)


def test_an_agent_0_that_never_comes_is_named_with_the_reason(agents, port):
    error = error_of(agents(1, init_seconds=2))
    assert error.exit_code == ExitCode.STUCK
    assert f"for agent 0 at --rendezvous 127.0.0.1:{port}: Connection refused" in str(error)


def test_another_token_is_told_there_and_host_0_waits_for_the_right_one(agents, port, monkeypatch):
    monkeypatch.setattr(rendezvous_follower, "OTHER_TOKEN_SECONDS", 1.0)
    first = agents(0, converse)
    wrong = error_of(agents(1, token="another secret"))
    assert wrong.exit_code == ExitCode.SETTINGS_REFUSED
    assert f"host 1: agent 0 at --rendezvous 127.0.0.1:{port} dropped us at the proof of LOCKSTEP_TOKEN" in str(wrong)
    assert "the token here is not host 0's" in str(wrong)
    assert not any(secret in str(wrong) for secret in (TOKEN, "another secret"))
    assert not first.done()
    assert [future.result(WAIT)[1] for future in (agents(1, converse), first)] == [11, 11]


def test_another_token_is_told_at_the_limit_even_if_host_0_has_gone_meanwhile(staging):
    pair = staging(token="another secret")
    pair.turn_until(lambda: pair.follower._not_believed_since)
    with pytest.raises(NeverMet, match=r"one from 127.0.0.1 had another LOCKSTEP_TOKEN"):
        pair.gather(0)
    pair.leader.close()
    pair.turn_until(lambda: pair.follower._why == "Connection refused")
    with pytest.raises(SettingsRefused, match="the token here is not host 0's"):
        pair.gather(1)


def test_who_was_not_believed_at_first_joins_all_the_same(staging):
    """As when the agent 0 of an earlier run was still ending."""
    pair = staging(token="another secret")
    pair.turn_until(lambda: pair.follower._not_believed_since)
    pair.leader._token = "another secret"
    pair.meet()
    assert pair.follower.lost() == {}


def test_a_port_that_another_program_listens_on(agents, port, monkeypatch):
    monkeypatch.setattr(rendezvous, "BIND_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(SettingsRefused, match=f"port {port} is taken on this host, perhaps by another run"):
            agents(0).result(WAIT)
        assert "another program may have the port" in str(error_of(agents(1, init_seconds=3)))


@pytest.mark.parametrize(
    ("rendezvous_at", "message"),
    [
        ("127.0.0.1:5000", "127.0.0.1 is 127.0.0.1 here, a loopback address, which no other of the 2 hosts can reach"),
        ("localhost:5000", "localhost is .*, a loopback address"),
        ("192.0.2.77:5000", r"is no address of host 0 \(.*\), where agent 0 must listen"),
        ("no-such-host.invalid:5000", "no-such-host.invalid is not known on host 0"),
    ],
)
def test_an_address_that_cannot_do_is_refused(rendezvous_at, message):
    with pytest.raises(SettingsRefused, match=message), join(Place(2, 0, rendezvous_at, TOKEN), num_workers=1):
        pass


def test_proxies_change_nothing(agents, monkeypatch):
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")
    assert len({future.result(WAIT)[1] for future in [agents(0, converse), agents(1, converse)]}) == 1


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_is_asked_to_end_while_waiting_ends_all_that_wait(staging, who):
    pair = staging(num_hosts=3)
    pair.turn_until(pair.follower_is_in)
    with pytest.raises(Abandoned):
        pair.gather(who, abandoned=lambda: True)
    other = pair.follower if who == 0 else pair.leader
    pair.turn_until(lambda: other._abandoned)
    with pytest.raises(Abandoned):
        pair.gather(1 - who)


@contextmanager
def stranger(port):
    with wait_for(lambda: connected(port)) as sock:
        sock.settimeout(WAIT)
        yield sock


def connected(port):
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    except ConnectionRefusedError:
        return None


def say(sock, noise) -> None:
    """Sends ``noise`` and no more after it; whoever hears it may hang up at any moment meanwhile."""
    try:
        sock.sendall(noise)
        sock.shutdown(socket.SHUT_WR)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
            raise


def is_dropped(sock) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


RANDOM = random.Random(0)
NOISE = {
    "random bytes": RANDOM.randbytes(3000) + b"\n" + RANDOM.randbytes(3000),
    "a web request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an oversized line": b"x" * (MOST_BYTES_OF_A_STRANGER + 70_000),
    "a list": b"[1, 2]\n",
    "deep nesting": b"[" * 4000 + b"\n",
    "half a character": b'{"nonce": "\\ud800", "proof": "\\udc00"}\n',
    "no proof": b'{"nonce": "1", "ticket": {}}\n',
    "a wrong proof": json.dumps({"nonce": "1", "proof": "0" * 64, "ticket": {}}).encode() + b"\n",
    "a view": b'{"view": {"step": 1}}\n{"leave": 1}\n',
    "nothing, and closed": b"",
}


@pytest.mark.parametrize("moment", ["while gathering", "while training"])
def test_strangers_are_dropped_and_harm_nothing(agents, port, moment):
    gate = threading.Event()

    def act(group):
        gate.wait(WAIT)
        return converse(group)

    futures = [agents(0, act)]
    if moment == "while training":
        futures.append(agents(1, act))
    for name, noise in NOISE.items():
        with stranger(port) as sock:
            say(sock, noise)
            assert is_dropped(sock), name
    if moment == "while gathering":
        futures.append(agents(1, act))
    gate.set()
    assert [future.result(WAIT)[1] for future in futures] == [11, 11]


def test_many_silent_strangers_keep_nobody_out(agents, port):
    first = agents(0, converse)
    with ExitStack() as stack:
        silent = [stack.enter_context(stranger(port)) for _ in range(MOST_STRANGERS + 5)]
        assert is_dropped(silent[0]), "the oldest goes first"
        second = agents(1, converse)
        assert first.result(WAIT)[1] == second.result(WAIT)[1] == 11


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Staged:
    """A leader and a follower that move when told to, on one injected clock."""

    def __init__(self, num_hosts=2, token=TOKEN):
        self.clock = Clock()
        self.num_hosts = num_hosts
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()[:2]
        self.leader = Leader(listener, TOKEN, self.ticket(0), self.clock)
        self.follower = Follower(self.address, token, self.ticket(1), self.clock)

    def ticket(self, index):
        return Ticket(Member(index, "ab"[index], 1), self.num_hosts, 1, "")

    def turn(self, *pumps, times=8):
        for _ in range(times):
            for pump in pumps or (self.leader, self.follower):
                pump.turn()

    def turn_until(self, condition):
        wait_for(lambda: self.turn(times=1) or condition())

    def follower_is_in(self):
        return self.follower._trusted and 1 in self.leader._members

    def gather(self, who, abandoned=lambda: False):
        if who == 0:
            self.leader.gather(0, "a:1", abandoned)
        else:
            self.follower.gather(0, abandoned)

    def meet(self):
        self.turn_until(self.follower_is_in)
        self.gather(0)
        self.turn_until(lambda: self.follower._met)
        self.gather(1)

    def close(self):
        self.leader.close()
        self.follower.close()


@pytest.fixture
def staging(monkeypatch):
    """staging(**options): what ``Staged`` makes, closed in the end."""
    monkeypatch.setattr("trainer.launch.rendezvous_pump.TURN_SECONDS", 0.01)
    monkeypatch.setattr("trainer.launch.rendezvous_pump.wait_for_bytes.__defaults__", (-1, 0.01))
    monkeypatch.setattr("trainer.launch.rendezvous_follower.RETRY_SECONDS", 0.01)
    with ExitStack() as stack:

        def make(**options):
            pair = Staged(**options)
            stack.callback(pair.close)
            return pair

        yield make


@pytest.fixture
def staged(staging):
    return staging()


def test_leases_are_renewed_for_as_long_as_both_live(staged):
    staged.meet()
    for _ in range(60):
        staged.clock.now += 0.5
        staged.turn(times=2)
    assert (staged.leader.lost(), staged.follower.lost()) == ({}, {})


def test_a_cut_link_is_noticed_on_both_sides_when_the_lease_runs_out(staged):
    """The sockets stay open, and hear nothing: each side moves alone."""
    staged.meet()
    begin = staged.clock.now
    while staged.clock.now < begin + LEASE_SECONDS - 0.5:
        staged.clock.now += 0.5
        staged.leader.turn()
    assert staged.leader.lost() == {}
    staged.clock.now += 1
    staged.leader.turn()
    assert staged.leader.lost() == {1: f"nothing was heard of it for {LEASE_SECONDS:g} s"}


def test_a_silent_leader_is_lost_when_the_lease_runs_out(staged):
    staged.meet()
    staged.clock.now += LEASE_SECONDS - 0.1
    staged.follower.turn()
    assert staged.follower.lost() == {}
    staged.clock.now += 0.2
    staged.follower.turn()
    with pytest.raises(
        LeaderLost, match=r"host 0 \(a\), agent 0 at 127.0.0.1:.* is lost: nothing was heard of it for 5 s"
    ):
        staged.follower.decided("verdict")


def test_a_decision_that_came_before_the_leader_went_still_stands(staged):
    staged.meet()
    staged.leader.decide("verdict", {"exit_code": 4})
    staged.turn(staged.follower)
    staged.leader.close()
    staged.turn(staged.follower)
    assert staged.follower.decided("verdict") == {"exit_code": 4}
    with pytest.raises(LeaderLost, match="closed the connection"):
        staged.follower.decided("another")


def test_a_follower_that_dies_is_lost_at_once(staged):
    staged.meet()
    staged.follower.close()
    staged.turn(staged.leader)
    assert staged.leader.lost() == {1: "the other side closed the connection"}


def test_a_stranger_that_says_nothing_is_dropped_after_a_while(staged):
    with socket.create_connection(staged.address) as slow:
        slow.setblocking(False)
        for _ in range(int(HANDSHAKE_SECONDS)):
            slow.send(b"x")  # one byte a second
            staged.turn(staged.leader, times=2)
            staged.clock.now += 1
        assert slow.recv(65536), "the greeting"
        with pytest.raises(BlockingIOError):
            slow.recv(1)
        staged.clock.now += 1
        staged.turn(staged.leader, times=2)
        slow.settimeout(WAIT)
        assert is_dropped(slow)


def test_times_of_another_host_are_told_on_this_ones_clock(staged):
    staged.follower.clock = clock = Clock()
    clock.now = 5.0
    staged.follower._renewed = 0.0
    staged.meet()
    staged.follower.publish({"failed": 4.0})
    staged.turn()
    assert staged.leader.views()[1] == {"failed": 4.0}
    assert staged.leader.local_seconds(1, 4.0) == pytest.approx(99.0)
    assert staged.leader.local_seconds(0, 99.0) == 99.0


def test_leaving_waits_for_the_others_but_not_for_ever(agents):
    wanted = []

    def slow(group):
        threading.Event().wait(1.0)
        wanted.append("to leave")
        group.leave(WAIT)

    futures = [agents(0, lambda group: (group.leave(WAIT), list(wanted))[1]), agents(1, slow)]
    assert [future.result(WAIT) for future in futures] == [["to leave"], None], "host 0 waited for host 1"

    stay = threading.Event()
    deaf = agents(1, lambda group: stay.wait(WAIT))
    begin = time.monotonic()
    agents(0, lambda group: group.leave(0.5)).result(WAIT)
    assert time.monotonic() - begin < WAIT / 2
    stay.set()
    deaf.result(WAIT)


def test_a_long_view_gets_through(agents):
    text = "x" * (MOST_BYTES // 4)
    tell = agents(1, lambda group: (group.publish({"text": text}), group.decided("x"), group.leave(WAIT)))
    heard = agents(0, lambda group: (wait_for(lambda: group.views().get(1)), group.leave(WAIT))[0])
    assert heard.result(WAIT) == {"text": text}
    tell.result(WAIT)
