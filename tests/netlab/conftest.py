"""The lab as a module and as a program, and ways to look at one that do not rest on its own code."""

import importlib.util
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[2]))
SCRIPT = CHECKOUT / "scripts" / "netlab.py"


@pytest.fixture(scope="session")
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("makes network namespaces, which needs root: sudo PYTHON -m pytest tests/netlab")


@pytest.fixture(scope="session")
def netlab() -> ModuleType:
    spec = importlib.util.spec_from_file_location("netlab", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> str:
    """A text in the environment of everything that the test starts, by which ``marked`` finds it."""
    text = uuid.uuid4().hex
    monkeypatch.setenv("NETLAB_TEST", text)
    return text


@pytest.fixture
def start(marker: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts scripts/netlab.py with some arguments."""
    started = []

    def go(*arguments: object) -> subprocess.Popen[str]:
        argv = [sys.executable, str(SCRIPT), *map(str, arguments)]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield go
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def lab_run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """Runs scripts/netlab.py to its end; returns its exit code, standard output and standard error."""

    def go(*arguments: object) -> tuple[int, str, str]:
        process = start(*arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return go


@pytest.fixture
def traces(marker: str) -> Callable[[int], list[str]]:
    """traces(number): everything that exists of that lab: names, files, and processes that this test has started."""

    def look(number: int) -> list[str]:
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
        devices = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout.split()
        files = [*Path("/run/netns").glob("*"), *Path("/etc/netns").glob("*"), *Path("/run/lockstep-netlab").glob("*")]
        found = [name for name in [*spaces, *map(str, files)] if f"lockstep-lab{number}-" in name]
        found += [str(path) for path in files if path.name == str(number)]
        found += [name for name in devices if "bridge0" in name or "port0" in name]
        return found + [f"process {pid}" for pid in marked(marker)]

    return look


def marked(marker: str) -> list[int]:
    """The living processes, but this one, whose environment holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"NETLAB_TEST={marker}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Waits until a condition holds; fails after a minute."""

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, "did not come true within a minute"
            time.sleep(0.02)

    return wait
