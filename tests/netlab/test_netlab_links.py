"""What the hosts and links of a lab are: as slow as asked, counted right, apart from each other and the machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("root")

MOVE = """
import socket, sys, time
role, address, size, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if role == "receive":
    peer = socket.create_server((address, 5000)).accept()[0]
    for _ in range(rounds):
        left = size
        while left:
            left -= len(peer.recv(min(left, 2**20)))
        peer.send(b"!")
else:
    for attempt in range(200):
        try:
            peer = socket.create_connection((address, 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    for _ in range(rounds):
        begin = time.perf_counter()
        peer.sendall(bytes(size))
        assert peer.recv(1) == b"!"
        print(time.perf_counter() - begin, flush=True)
"""


def begin_move(lab, source, target, size, rounds=3):
    """Starts to send ``size`` bytes from host to host, ``rounds`` times over one connection."""
    argv = [sys.executable, "-c", MOVE]
    tail = [lab.addresses[target], str(size), str(rounds)]
    receiver = lab.popen(target, [*argv, "receive", *tail])
    sender = lab.popen(source, [*argv, "send", *tail], stdout=subprocess.PIPE, text=True)
    return sender, receiver


def end_move(sender, receiver):
    """The seconds of each round."""
    out, _ = sender.communicate(timeout=60)
    assert (sender.returncode, receiver.wait(timeout=10)) == (0, 0)
    return [float(line) for line in out.split()]


def move(lab, source, target, size, rounds=3):
    return end_move(*begin_move(lab, source, target, size, rounds))


def assert_took(seconds, size, megabits):
    """Never faster than the link by more than 15 %, and at best within 15 % of it: a busy machine can only add time."""
    ideal = size * 8 / megabits / 1e6
    assert min(seconds) == pytest.approx(ideal, rel=0.15)


@pytest.mark.parametrize(("megabits", "size"), [(100, 4_000_000), (400, 16_000_000)])
def test_a_link_is_as_slow_as_asked_in_both_directions_and_its_bytes_are_counted(netlab, megabits, size):
    with netlab.Lab(hosts=2, rate=f"{megabits}mbit") as lab:
        assert lab.bytes_sent(0) == lab.bytes_received(1) == 0
        for source, target in ((1, 0), (0, 1)):
            sent, received = lab.bytes_sent(source), lab.bytes_received(target)
            assert_took(move(lab, source, target, size), size, megabits)
            assert lab.bytes_sent(source) - sent == pytest.approx(3 * size, rel=0.05)
            assert lab.bytes_received(target) - received == pytest.approx(3 * size, rel=0.05)


@pytest.mark.parametrize(("burst_ms", "at_once"), [(None, 2**17), (1.0, 2**14), (50.0, 62_500)])
def test_a_link_that_was_idle_lets_no_more_pass_at_once_than_it_says(netlab, burst_ms, at_once):
    size = 300_000
    with netlab.Lab(hosts=2, rate="10mbit", burst_ms=burst_ms) as lab:
        assert min(move(lab, 0, 1, size)) > 0.9 * (size - at_once) * 8 / 10e6


def test_one_host_can_be_given_another_rate_and_the_others_keep_theirs(netlab):
    with netlab.Lab(hosts=3, rate="400mbit") as lab:
        lab.set_rate(1, "0.1gbit")
        for source, target, size, megabits in ((0, 1, 4_000_000, 100), (1, 0, 4_000_000, 100), (2, 0, 16_000_000, 400)):
            assert_took(move(lab, source, target, size, rounds=2), size, megabits)


def test_two_labs_at_once_do_not_disturb_each_other(netlab):
    with netlab.Lab(rate="100mbit") as one, netlab.Lab(rate="100mbit") as two:
        assert not set(one.addresses) & set(two.addresses)
        assert one.hostname(0) != two.hostname(0)
        both = [begin_move(lab, 0, 1, 4_000_000) for lab in (one, two)]
        for started in both:
            assert_took(end_move(*started), 4_000_000, 100)
        for lab in (one, two):
            assert lab.bytes_sent(0) == pytest.approx(3 * 4_000_000, rel=0.05)
        two.close()
        assert_took(move(one, 1, 0, 4_000_000), 4_000_000, 100)


def test_a_host_has_only_loopback_and_the_lab(netlab):
    def routes(*where):
        return subprocess.run(["ip", *where, "route"], capture_output=True, text=True, check=True).stdout

    def links(*where):
        shown = subprocess.run(["ip", *where, "-brief", "link"], capture_output=True, text=True, check=True).stdout
        return {re.split(r"[@ ]", line)[0] for line in shown.splitlines()}

    before = links(), routes()
    with netlab.Lab(hosts=2) as lab:
        assert (links(), routes()) == before, "the machine's own network knows of the lab"
        space = f"lockstep-{lab.hostname(0)}"
        assert {"lo", "eth0"} == {name for name in links("-n", space) if not re.match("tunl|sit|gre|ip", name)}
        net = lab.addresses[0].rpartition(".")[0]
        assert routes("-n", space).split()[:3] == [f"{net}.0/24", "dev", "eth0"]
        assert len(routes("-n", space).splitlines()) == 1


@pytest.mark.parametrize("host", [0, 1])
def test_both_ends_of_a_connection_are_cubic(netlab, host):
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    expected = "cubic" if "cubic" in known else Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    with netlab.Lab(hosts=2) as lab:
        ask = "print(there.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())"
        serve = f"""
import socket
with socket.create_server(("{lab.addresses[0]}", 7000)) as server:
    print(flush=True)
    there = server.accept()[0]
    {ask}
"""
        server = lab.popen(0, [sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
        server.stdout.readline()
        connect = f"import socket; there = socket.create_connection(('{lab.addresses[0]}', 7000)); {ask}"
        client = lab.popen(host, [sys.executable, "-c", connect], stdout=subprocess.PIPE, text=True)
        assert [client.communicate(timeout=30)[0].strip(), server.communicate(timeout=30)[0].strip()] == [expected] * 2


def test_every_host_has_its_own_name_that_means_its_own_address(netlab):
    ask = "import socket; print(*map(socket.gethostbyname, (socket.gethostname(), 'host0', 'host1', 'localhost')))"
    ask += "; print(socket.gethostname())"
    machine = Path("/proc/sys/kernel/hostname").read_text()
    with netlab.Lab(hosts=2) as lab:
        for host in range(2):
            process = lab.popen(host, [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True)
            known, name = process.communicate(timeout=30)[0].splitlines()
            assert known.split() == [lab.addresses[host], *lab.addresses, "127.0.0.1"]
            assert name == lab.hostname(host)
    assert Path("/proc/sys/kernel/hostname").read_text() == machine


def test_environment_adds_to_this_one_but_for_its_proxies(netlab, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    monkeypatch.setenv("KEPT", "kept")
    with netlab.Lab(hosts=2) as lab:
        own = {"ADDED": "added", "LAB_ADDRESS": "mine"}
        process = lab.popen(1, ["env"], env=own, stdout=subprocess.PIPE, text=True)
        given = dict(line.split("=", 1) for line in process.communicate(timeout=30)[0].splitlines())
        expected = {"KEPT": "kept", "ADDED": "added", "LAB_ADDRESS": "mine", "LAB_HOST_INDEX": "1"}
        assert given.items() >= {**expected, "LAB_NUM_HOSTS": "2", "LAB_ADDRESS_0": lab.addresses[0]}.items()
        assert not {"http_proxy", "HTTPS_PROXY"} & set(given)


def test_a_cut_link_loses_everything_and_the_same_socket_goes_on_when_it_is_healed(netlab, eventually):
    with netlab.Lab(hosts=2, rate="100mbit") as lab:
        sender, receiver = begin_move(lab, 0, 1, 10_000_000, rounds=1)
        eventually(lambda: lab.bytes_received(1) > 1_000_000)
        lab.cut(1)
        stopped = lab.bytes_received(1)
        with pytest.raises(subprocess.TimeoutExpired):
            sender.wait(timeout=1)
        assert lab.bytes_received(1) == stopped < 9_000_000
        lab.heal(1)
        assert len(end_move(sender, receiver)) == 1
        assert_took(move(lab, 0, 1, 4_000_000), 4_000_000, 100)


def test_kill_host_kills_all_of_one_host_and_nobody_else(netlab, eventually):
    with netlab.Lab(hosts=2) as lab:
        deep = ["sh", "-c", "trap '' TERM HUP; setsid sleep 300 & sleep 300 & wait; sleep 300"]
        first, second = (lab.popen(host, deep) for host in range(2))
        eventually(lambda: len(lab.pids(0)) == len(lab.pids(1)) == 3)
        others = lab.pids(1)
        lab.kill_host(0)
        assert first.wait(timeout=5) == -9
        assert (lab.pids(0), lab.pids(1), second.poll()) == ([], others, None)


def test_what_does_not_exist_is_refused(netlab):
    with netlab.Lab(hosts=2) as lab:
        for wrong in (lambda: lab.cut(2), lambda: lab.heal(-1), lambda: lab.popen(2, ["true"]), lambda: lab.pids(2)):
            with pytest.raises(netlab.LabError, match="host: must be 0 to 1, not"):
                wrong()
        with pytest.raises(netlab.LabError, match="rate: must be a number above 0 with kbit, mbit or gbit"):
            lab.set_rate(0, "fast")


PSUM = """
import os
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

host = int(os.environ["LAB_HOST_INDEX"])
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(os.environ["LAB_ADDRESS_0"] + ":5001", 2, host)
mesh = jax.make_mesh((2,), ("host",), axis_types=(AxisType.Auto,))
add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "host"), mesh=mesh, in_specs=P("host"), out_specs=P()))
mine = np.full((1, 1_000_000), 10.0 ** host, np.float32)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("host")), mine)
print(set(np.asarray(add(x))[0].tolist()))
"""


def test_a_psum_over_gloo_crosses_the_link(netlab):
    with netlab.Lab(hosts=2, rate="1gbit") as lab:
        argv = [sys.executable, "-c", PSUM]
        workers = [lab.popen(host, argv, stdout=subprocess.PIPE, text=True) for host in range(2)]
        said = [worker.communicate(timeout=60)[0] for worker in workers]
        assert [out.splitlines()[-1] for out in said] == ["{11.0}"] * 2
        for host in range(2):
            assert lab.bytes_sent(host) == pytest.approx(4e6, rel=0.05)
