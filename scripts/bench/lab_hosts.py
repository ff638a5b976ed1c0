"""Runs one measuring process on each host of a net lab, bounded in time, and collects what they report as JSON.

The scripts lab_*.py beside it have two sides in one file: without arguments of its own the script makes the lab and
prints the result; started with ``--worker JOB RESULT`` it is the process on one host. This module is the first side's,
and knows no JAX, so that the worker may be of another framework and another Python.
"""

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "scripts"))

import netlab  # noqa: E402

POLL_SECONDS = 0.05
_ports = itertools.count(9100)


class LabFailed(Exception):
    """A worker failed, or the time was over; with the end of what it said."""


def main(script: str, parser: argparse.ArgumentParser, measure: Callable, worker: Callable, show: Callable) -> int:
    """The entry of both sides of a script.

    measure: options -> a report that JSON holds, on the side that makes the lab.
    worker:  job (the dict that ``measure`` gave to ``run``) -> a report, on each host.
    show:    report -> the text that is printed, unless ``--json`` asks for the report itself.

    Returns the exit code: 0, 1 if a worker failed, 2 if no lab can be made here.
    """
    if sys.argv[1:2] == ["--worker"]:
        job, result = map(Path, sys.argv[2:4])
        result.write_text(json.dumps(worker(json.loads(job.read_text()))))
        return 0
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which the workers are ended")
    options = parser.parse_args()
    options.script = script
    # Without this SIGTERM would leave the lab for the next one to remove.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        report = measure(options)
    except (netlab.LabError, LabFailed) as error:
        print(f"{Path(script).name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, netlab.LabError) else 1
    print(json.dumps(report, indent=2) if options.json else show(report))
    return 0


def run(
    lab: netlab.Lab,
    script: str,
    job: Mapping[str, Any],
    *,
    limit_seconds: float,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    cores: Sequence[int] | None = None,
) -> list[Any]:
    """Starts ``script --worker`` on every host of ``lab``, and returns their reports, by host.

    job:   what each worker is given, together with ``rank``, ``num_processes`` and ``coordinator``.
    cores: the only core that each host's worker may use, by host.

    Raises:
        LabFailed: a worker ended with another code than 0, or not within ``limit_seconds``. All are ended then.
    """
    coordinator = f"{lab.addresses[0]}:{next(_ports)}"
    with tempfile.TemporaryDirectory(prefix="lockstep-lab-") as folder:
        files = [_Files(Path(folder), host) for host in range(lab.hosts)]
        workers = []
        for host, file in enumerate(files):
            place = {"rank": host, "num_processes": lab.hosts, "coordinator": coordinator}
            file.job.write_text(json.dumps({**job, **place}))
            argv = ["taskset", "-c", str(cores[host % len(cores)])] if cores else []
            argv += [python, script, "--worker", str(file.job), str(file.result)]
            with file.log.open("wb") as log:
                variables = {"PYTHONPATH": str(CHECKOUT), **(environment or {})}
                workers.append(lab.popen(host, argv, env=variables, stdout=log, stderr=subprocess.STDOUT))
        try:
            _wait(workers, files, time.monotonic() + limit_seconds)
        finally:
            for process in workers:
                process.kill()
                process.wait()
            for host in range(lab.hosts):
                lab.kill_host(host)
        return [json.loads(file.result.read_text()) for file in files]


class _Files:
    def __init__(self, folder: Path, host: int):
        self.job, self.result, self.log = (folder / f"{name}-{host}" for name in ("job", "result", "log"))


def _wait(workers: Sequence[subprocess.Popen], files: Sequence[_Files], until: float) -> None:
    while any(process.poll() is None for process in workers):
        failed = [host for host, process in enumerate(workers) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > until:
            break
        time.sleep(POLL_SECONDS)
    for host, process in enumerate(workers):
        if process.poll() not in (None, 0):
            said = files[host].log.read_text(errors="replace")[-3000:]
            raise LabFailed(f"the worker on host {host} ended with code {process.returncode}:\n{said}")
    if running := [host for host, process in enumerate(workers) if process.poll() is None]:
        raise LabFailed(f"out of time (--limit); still running on hosts {running}")


@contextlib.contextmanager
def laboratory(hosts: int, rate: str, burst_ms: float | None = None) -> Iterator[netlab.Lab]:
    """A lab, removed at the end in any case."""
    with netlab.Lab(hosts=hosts, rate=rate, burst_ms=burst_ms) as lab:
        yield lab


def bytes_per_second(rate: str) -> float:
    """Of a rate as tc writes it.

    >>> bytes_per_second("200mbit")
    25000000.0
    """
    for unit, bits in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * bits / 8
    raise netlab.LabError(f"rate: must be a number with kbit, mbit or gbit, such as 200mbit, not {rate!r}")


def slowest(rows: Sequence[Sequence[float]]) -> list[float]:
    """Repetition by repetition the time of the slowest host; ``rows``: one list a host."""
    return [max(times) for times in zip(*rows, strict=True)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def bytes_sent() -> int:
    """Bytes that have left this host over its link, by the kernel's counter: called by the worker, on its host."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "eth0":
            return int(fields.split()[8])
    raise LabFailed("there is no eth0 here: this runs on a host of a lab")
