#!/usr/bin/env python3
"""A network laboratory on one machine: emulated hosts with real, slow links between them (Linux, as root).

    sudo scripts/netlab.py run --hosts 2 --rate 200mbit -- COMMAND ...     runs COMMAND on every host
    sudo scripts/netlab.py clean                                           removes what a killed lab left behind

Every host has its own network namespace, address and hostname, and one link to a common switch, shaped to the rate in
both directions. The switch is a bridge in a namespace of its own: nothing of a lab, neither a device nor a packet, is
seen by the machine's own network, and a host reaches nothing but loopback and the other hosts. Disk and processors are
shared by all. Several labs can run at once. TCP is cubic, which Linux comes with, whatever this machine is set to; a
kernel without it keeps its own.

In COMMAND these are replaced, and the program finds the same in its environment:

    {host}      LAB_HOST_INDEX   which host this is, from 0
    {hosts}     LAB_NUM_HOSTS    how many there are
    {address}   LAB_ADDRESS      this host's address
    {address0}  LAB_ADDRESS_0    the address of host 0

The exit code is that of the first command to fail, in time (128 + N if signal N killed it); 124 after --timeout,
128 + N if signal N ended the lab, 2 if the lab cannot be made. Bytes are the kernel's counters of each host's device.
When a command fails, when the time is over, or on Ctrl-C, the others get SIGTERM, and SIGKILL after --grace.

A test or a benchmark imports this file and uses its class Lab. It is one long file because it has to run by itself, on
any machine's python3 (3.10 or newer) and without a package.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

STATE = Path("/run/lockstep-netlab")
"""The lock, and one file for each lab that names its owner. Gone after a reboot, as namespaces are."""
NAMESPACES, ETC = Path("/run/netns"), Path("/etc/netns")
NAME = re.compile(r"lockstep-lab(\d+)-(?:switch|host\d+)")
MOST_LABS, MOST_HOSTS = 250, 250
QUEUE = "100ms"
"""A link drops what it would have to hold back for longer."""
TCP, TCP_KNOWN = "cubic", Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
"""A namespace may be kept from choosing it for all its sockets; its routes can."""
BURST_MS, BURST_BYTES = 2.0, 2**17
"""What a link that was idle lets pass at once: a real one nothing, but here the timer that releases packets is late now
and then, and this makes up for it. By default it holds two of the largest segments."""
SMALLEST_BURST, MOST_BURST_MS = 2**14, 1000
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.01
SET_HOSTNAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
SILENCE = "file=/proc/sys/net/ipv6/conf/default/disable_ipv6; [ ! -e $file ] || echo 1 > $file"
"""No IPv6 but on loopback: its announcements would be counted as bytes of the command."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")


class LabError(Exception):
    """The lab cannot be made or changed as asked; one line for the user."""


class _Shaper(NamedTuple):
    """What holds a device to a rate: its queue, as tc is told of it, and the most that TCP may hand to it at once."""

    queue: Sequence[str]
    segment_bytes: int


class Lab:
    """Hosts with links of ``rate`` (such as 200mbit; None: not shaped), made by ``with`` and removed at its end.

        with Lab(hosts=2, rate="1gbit") as lab:
            workers = [lab.popen(host, ["python3", "worker.py", lab.addresses[0]]) for host in range(2)]

    burst_ms: what a link that was idle lets pass at once, in ms of its rate, but at least 16 KiB; None: 2 ms, but at
        least 128 KiB.

    Removing kills every process of every host. If this process dies without it, the next lab or ``clean`` does it.
    Every method raises LabError for what cannot be done.
    """

    def __init__(self, hosts: int = 2, rate: str | None = None, burst_ms: float | None = None):
        if not 1 <= hosts <= MOST_HOSTS:
            raise LabError(f"hosts: must be 1 to {MOST_HOSTS}, not {hosts}")
        self.hosts = hosts
        self._burst_ms = burst_ms
        self._shaper = None if rate is None else _shaping(rate, burst_ms)
        self._number, self._owner = 0, os.getpid()
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> Lab:
        check_machine()
        with _lock():
            _sweep()
            free = set(range(1, MOST_LABS + 1)) - _labs()
            if not free:
                raise LabError(f"{MOST_LABS} labs are running already")
            self._number, self._owner = min(free), os.getpid()
            try:
                (STATE / str(self._number)).write_text(_identity(self._owner))
                self._build()
            except BaseException:
                _remove(self._number)
                self._number = 0
                raise
        atexit.register(self.close)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills and removes everything. Does nothing the second time, or in a fork of the lab's owner."""
        if not self._number or os.getpid() != self._owner:
            return
        for process in self._started:
            process.kill()  # one that has not entered its host yet would be found by nobody
        with _lock():
            _remove(self._number)
        for process in self._started:
            process.wait()
        self._number = 0
        atexit.unregister(self.close)

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen:
        """Starts ``argv`` on ``host``, in a session of its own; the pid of the Popen is that of ``argv`` itself.

        env:     added to this process's environment, which is passed on without its proxies: no host could reach them.
        options: for subprocess.Popen; standard input is empty unless they say otherwise.
        """
        enter = [_program("ip"), "netns", "exec", self._name(host), "unshare", "--uts", "sh", "-c", SET_HOSTNAME]
        inherited = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES}
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        variables = {**inherited, **self._variables(host), **(env or {})}
        process = subprocess.Popen([*enter, self.hostname(host), *argv], env=variables, **options)
        self._started.append(process)
        return process

    def fill(self, argv: Sequence[str], host: int) -> list[str]:
        """``argv`` with {host}, {hosts}, {address} and {address0} replaced; any other brace stays as it is."""
        names = ("host", "hosts", "address", "address0")
        words: dict[str, str] = dict(zip(names, self._variables(host).values(), strict=True))
        return [re.sub(r"\{(hosts?|address0?)\}", lambda match: words[match[1]], word) for word in argv]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"10.199.{self._number}.{host + 1}" for host in range(self.hosts))

    def hostname(self, host: int) -> str:
        """Another one in each lab, because labs share the disk. Within a lab, host0, host1, … are known as well."""
        return f"lab{self._number}-host{host}"

    def bytes_sent(self, host: int) -> int:
        """Bytes, headers included, that have left ``host`` since the lab was made; loopback does not count."""
        return self._counters(host)["tx"]["bytes"]

    def bytes_received(self, host: int) -> int:
        """Bytes, headers included, that have reached ``host`` since the lab was made."""
        return self._counters(host)["rx"]["bytes"]

    def set_rate(self, host: int, rate: str) -> None:
        """Gives ``host``'s link another rate, in both directions, from now on."""
        self._shape(host, _shaping(rate, self._burst_ms))

    def cut(self, host: int) -> None:
        """Takes ``host``'s link down, at the switch: packets are lost, sockets stay open and hear nothing of it."""
        _call("ip", "-n", self._name(None), "link", "set", self._port(host), "down")

    def heal(self, host: int) -> None:
        """Takes the link up again; TCP resumes at its next retransmission, within about as long as the cut lasted."""
        _call("ip", "-n", self._name(None), "link", "set", self._port(host), "up")

    def pids(self, host: int) -> list[int]:
        """The living processes of ``host``, whoever started them."""
        return _pids_in([self._name(host)])

    def commands(self, host: int) -> dict[int, str]:
        """The same with their command lines, words joined by spaces; one that ends meanwhile may be left out."""
        found = {}
        for pid in self.pids(host):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
        return found

    def kill_host(self, host: int) -> None:
        """SIGKILLs every process of ``host``. Its peers see the connections close, unless the link was cut before."""
        _kill_all_in([self._name(host)])

    def _name(self, host: int | None) -> str:
        """The namespace of a host, or with None of the switch."""
        return f"lockstep-lab{self._number}-" + ("switch" if host is None else f"host{self._checked(host)}")

    def _port(self, host: int) -> str:
        """The switch's end of a host's link."""
        return f"port{self._checked(host)}"

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise LabError(f"host: must be 0 to {self.hosts - 1}, not {host}")
        return host

    def _variables(self, host: int) -> dict[str, str]:
        here, first = self.addresses[host], self.addresses[0]
        values = {"HOST_INDEX": str(host), "NUM_HOSTS": str(self.hosts), "ADDRESS": here, "ADDRESS_0": first}
        return {f"LAB_{name}": value for name, value in values.items()}

    def _counters(self, host: int) -> dict[str, dict[str, int]]:
        shown = _call("ip", "-n", self._name(host), "-json", "-statistics", "link", "show", "dev", "eth0")
        return json.loads(shown)[0]["stats64"]

    def _build(self) -> None:
        switch = self._name(None)
        _add_namespace(switch)
        options = ("forward_delay", "0", "mcast_snooping", "0")  # forward at once, ask no host for its groups
        _call("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge", *options)
        _call("ip", "-n", switch, "link", "set", "bridge0", "up")
        lines = [f"{address} {self.hostname(host)} host{host}\n" for host, address in enumerate(self.addresses)]
        for host, address in enumerate(self.addresses):
            self._build_host(host, address, "".join(["127.0.0.1 localhost\n", *lines]))

    def _build_host(self, host: int, address: str, hosts_file: str) -> None:
        name, switch, port = self._name(host), self._name(None), self._port(host)
        (ETC / name).mkdir(parents=True)
        (ETC / name / "hosts").write_text(hosts_file)
        _add_namespace(name)
        _call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _call("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
        _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", name, "link", "set", "eth0", "up")
        _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        self._choose_tcp(host)
        if self._shaper:
            self._shape(host, self._shaper)

    def _choose_tcp(self, host: int) -> None:
        """For what goes over the link, and for what the host sends to itself by its own address."""
        name, here = self._name(host), self.addresses[host]
        if TCP not in TCP_KNOWN.read_text().split():
            return
        network = f"{here.rpartition('.')[0]}.0/24"
        for route, scope in (((network,), "link"), (("local", here, "table", "local"), "host")):
            ends = ("dev", "eth0", "proto", "kernel", "scope", scope, "src", here, "congctl", TCP)
            _call("ip", "-n", name, "route", "replace", *route, *ends)

    def _shape(self, host: int, shaper: _Shaper) -> None:
        for space, device in ((self._name(host), "eth0"), (self._name(None), self._port(host))):
            _call("ip", "-n", space, "link", "set", "dev", device, "gso_max_size", str(shaper.segment_bytes))
            _call("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shaper.queue)


def _shaping(rate: str, burst_ms: float | None) -> _Shaper:
    """How tc and TCP hold a device to ``rate``. One segment has half a burst at most: longer ones would be cut up."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = round(float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2]]) if match else 0
    if not bits:
        raise LabError(f"rate: must be a number above 0 with kbit, mbit or gbit, such as 200mbit, not {rate!r}")
    if burst_ms is not None and not 0 < burst_ms <= MOST_BURST_MS:
        raise LabError(f"burst-ms: must be a number above 0 and up to {MOST_BURST_MS}, not {burst_ms}")
    milliseconds, least = (BURST_MS, BURST_BYTES) if burst_ms is None else (burst_ms, SMALLEST_BURST)
    burst = max(least, round(bits / 8 * milliseconds / 1000))
    return _Shaper(["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", QUEUE], min(2**16, burst // 2))


def check_machine() -> None:
    """Raises LabError unless a lab can be made here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise LabError("a lab needs Linux and root, because it makes network namespaces; run it with sudo")
    for program in ("ip", "tc"):
        _program(program)


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if not found:
        raise LabError(f"the program {name!r} is missing; on Debian or Ubuntu: apt-get install iproute2")
    return found


def _call(name: str, *arguments: str) -> str:
    """Runs ip or tc, out of reach of the terminal's Ctrl-C, which must not leave it half done."""
    done = subprocess.run([_program(name), *arguments], capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise LabError(f"{' '.join([name, *arguments])}: {done.stderr.strip()}")
    return done.stdout


def _add_namespace(name: str) -> None:
    _call("ip", "netns", "add", name)
    _call("ip", "netns", "exec", name, "sh", "-c", SILENCE)


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Labs are made and removed one at a time."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    with (STATE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _identity(pid: str | int) -> str:
    """The process and when it started, because pids come again; '' if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]}"


def _labs() -> set[int]:
    """The numbers of all labs of which anything exists."""
    names = [path.name for folder in (NAMESPACES, ETC) if folder.is_dir() for path in folder.iterdir()]
    matches = [match for name in names if (match := NAME.fullmatch(name))]
    return {int(match[1]) for match in matches} | {int(path.name) for path in STATE.iterdir() if path.name.isdigit()}


def _sweep() -> list[int]:
    """Removes the labs whose owner is dead, and returns their numbers. Call it with the lock held."""
    stale = []
    for number in sorted(_labs()):
        file = STATE / str(number)
        owner = file.read_text() if file.exists() else ""
        if not owner or _identity(owner.split()[0]) != owner:
            _remove(number)
            stale.append(number)
    return stale


def _remove(number: int) -> None:
    """Kills the processes of a lab and removes all of it, however little was built. Call it with the lock held."""

    def ours(folder: Path) -> list[Path]:
        paths = folder.iterdir() if folder.is_dir() else ()
        return [path for path in paths if (match := NAME.fullmatch(path.name)) and int(match[1]) == number]

    _kill_all_in([path.name for path in ours(NAMESPACES)])
    for path in ours(NAMESPACES):
        _call("ip", "netns", "delete", path.name)
    for path in ours(ETC):
        shutil.rmtree(path)
    with contextlib.suppress(OSError):  # other namespaces have files there
        ETC.rmdir()
    (STATE / str(number)).unlink(missing_ok=True)


def _inode(path: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _pids_in(names: Iterable[str]) -> list[int]:
    """The living processes of these namespaces; a zombie has left its own."""
    spaces = {_inode(NAMESPACES / name) for name in names} - {None, _inode("/proc/self/ns/net")}
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _inode(f"/proc/{pid}/ns/net") in spaces]


def _kill_all_in(names: Sequence[str]) -> None:
    """SIGKILLs until nobody is left, for at most ten seconds: who still forks is caught in the next round."""
    until = time.monotonic() + 10
    while (pids := _pids_in(names)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _relay(stream: BinaryIO, prefix: bytes, sink: BinaryIO, lock: threading.Lock) -> None:
    """Copies whole lines, each behind ``prefix``; drains the stream even when nobody reads the sink any more."""
    for line in stream:
        with lock, contextlib.suppress(OSError, ValueError):
            sink.write(prefix + line.rstrip(b"\n") + b"\n")
            sink.flush()


class _Commands:
    """The same command on every host of a lab: started, relayed, waited for and ended."""

    def __init__(self, lab: Lab, command: Sequence[str], quiet_others: bool):
        self.lab, self.readers, self.start, lock = lab, [], time.monotonic(), threading.Lock()
        self.processes = [self._start(host, command, quiet_others, lock) for host in range(lab.hosts)]
        self.seconds: dict[int, float] = {}

    def _start(self, host: int, command: Sequence[str], quiet: bool, lock: threading.Lock) -> subprocess.Popen:
        target = (None if host == 0 else subprocess.DEVNULL) if quiet else subprocess.PIPE
        process = self.lab.popen(host, self.lab.fill(command, host), stdout=target, stderr=target)
        for stream, sink in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            if stream:
                arguments = (stream, f"[host {host}] ".encode(), sink, lock)
                self.readers.append(threading.Thread(target=_relay, args=arguments, daemon=True))
                self.readers[-1].start()
        return process

    def running(self) -> list[int]:
        """The hosts whose command has not ended; notes when the others did."""
        running = [host for host, process in enumerate(self.processes) if process.poll() is None]
        for host in set(range(self.lab.hosts)) - set(running):
            self.seconds.setdefault(host, time.monotonic() - self.start)
        return running

    def code(self, host: int) -> int | None:
        """As a shell would say it."""
        code = self.processes[host].returncode
        return code if code is None or code >= 0 else 128 - code

    def wait(self, signals: list[int], seconds: float | None, keep_going: bool) -> int:
        """Returns the lab's exit code as soon as it is known; with ``keep_going`` when the last command has ended."""
        first, seen = 0, set[int]()
        while True:
            running = self.running()
            for host in sorted(set(range(self.lab.hosts)) - set(running) - seen):
                first = first or self.code(host) or 0
                seen.add(host)
            if signals:
                return 128 + signals[0]
            if not running or (first and not keep_going):
                return first
            if seconds is not None and time.monotonic() - self.start > seconds:
                return first or 124
            time.sleep(POLL_SECONDS)

    def end(self, signals: list[int], grace: float) -> None:
        """TERM for every command, then, after ``grace`` seconds or one more signal to us, KILL for all that is left."""
        for host in self.running():
            self.processes[host].terminate()
        until, heard = time.monotonic() + grace, len(signals)
        while self.running() and time.monotonic() < until and len(signals) == heard:
            time.sleep(POLL_SECONDS)
        for host in range(self.lab.hosts):
            self.lab.kill_host(host)
        for process in self.processes:
            process.wait()
        for reader in self.readers:
            reader.join(timeout=5)
        self.running()


def _report(commands: _Commands, rate: str | None, code: int) -> dict[str, Any]:
    lab = commands.lab
    per_host = [
        {
            "host": host,
            "hostname": lab.hostname(host),
            "address": lab.addresses[host],
            "exit_code": commands.code(host),
            "seconds": round(commands.seconds[host], 3),
            "bytes_sent": lab.bytes_sent(host),
            "bytes_received": lab.bytes_received(host),
        }
        for host in range(lab.hosts)
    ]
    return {"hosts": lab.hosts, "rate": rate, "exit_code": code, "per_host": per_host}


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'host':>4}  {'address':<15}  {'exit':>4}  {'seconds':>9}  {'bytes sent':>16}  {'bytes received':>16}"]
    lines += [
        f"{row['host']:>4}  {row['address']:<15}  {row['exit_code']:>4}  {row['seconds']:>9.2f}"
        f"  {row['bytes_sent']:>16,}  {row['bytes_received']:>16,}"
        for row in report["per_host"]
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The signals that ask for an end, as they come. Noted, not raised: building and removing are never cut short."""
    signals: list[int] = []
    wanted = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]  # as nohup ignores SIGHUP
    before = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in wanted}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs the command in a new lab, prints the table on standard error, and returns the exit code."""
    if options.rate is None and options.burst_ms is not None:
        raise LabError("burst-ms: a link without a rate lets everything pass at once: give --rate too")
    lab = Lab(options.hosts, options.rate, options.burst_ms)
    check_machine()
    try:
        if options.json:
            options.json.touch()
    except OSError as error:
        raise LabError(f"--json {options.json}: {error.strerror}") from None
    with _noted_signals() as signals, lab:
        commands = _Commands(lab, command, options.quiet_others)
        code = commands.wait(signals, options.timeout, options.keep_going)
        if code and commands.running():
            reason = {124: "out of time"}.get(code, f"exit code {code}")
            print(f"netlab: {reason}; ending the other hosts", file=sys.stderr)
        commands.end(signals, options.grace)
        report = _report(commands, options.rate, code)
    print(_table(report), file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return code


def clean() -> int:
    """Removes the labs whose owner is dead; one that is in use is left alone."""
    check_machine()
    with _lock():
        stale = _sweep()
    print(f"netlab: removed {len(stale)} stale labs" + "".join(f", lab{number}" for number in stale))
    return 0


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", text):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return float(text)


def _arguments() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    actions = parser.add_subparsers(dest="action", required=True, metavar="{run,clean}")
    actions.add_parser("clean", help="remove what a killed lab left behind; a lab in use is left alone")
    usage = "netlab.py run [options] -- COMMAND ..."
    add = actions.add_parser("run", help="run a command on every host of a new lab", usage=usage).add_argument
    add("--hosts", type=int, metavar="N", default=2, help="how many (default: 2)")
    add("--rate", help="of every link, in each direction, such as 200mbit or 1gbit (default: not shaped)")
    burst_help = (
        "what an idle link lets pass at once, in ms of its rate, at least 16 KiB (default: 2, at least 128 KiB)"
    )
    add("--burst-ms", type=float, metavar="MS", help=burst_help)
    add("--json", type=Path, metavar="FILE", help="write bytes, seconds and exit codes to FILE")
    add("--timeout", type=_seconds, metavar="SECONDS", help="end all hosts then, with exit code 124")
    add("--grace", type=_seconds, metavar="SECONDS", default=5.0, help="between SIGTERM and SIGKILL (default: 5)")
    add("--keep-going", action="store_true", help="let the other hosts run on when one fails")
    add("--quiet-others", action="store_true", help="show only host 0's output, as it is, without '[host 0] '")
    return parser


def main(argv: Sequence[str]) -> int:
    before, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = _arguments()
    options = parser.parse_args(before)
    if (options.action == "run") != bool(command):
        parser.error("run needs '-- COMMAND ...' at its end, and clean takes none")
    try:
        return run(options, command) if options.action == "run" else clean()
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
