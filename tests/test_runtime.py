"""Shares of devices, and where compiled programs are kept. Several processes: see test_launch.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import runtime
from trainer.config import Mesh
from trainer.errors import SettingsRefused
from trainer.placement import Placement


@pytest.mark.parametrize(
    ("nodes", "per_node", "processes", "share"),
    [(2, 4, 1, 8), (2, 4, 2, 4), (2, 3, 3, 2), (1, "auto", 1, 1), (2, "auto", 2, 1), (2, 4, 8, 1)],
)
def test_emulated_devices_are_shared_out_equally(nodes, per_node, processes, share):
    assert runtime.cpu_share(Mesh(nodes=nodes, devices_per_node=per_node), processes) == share


@pytest.mark.parametrize("processes", [4, 5, 7, 12])
def test_a_share_that_is_not_whole_is_refused_with_the_numbers(processes):
    with pytest.raises(SettingsRefused, match=rf"--processes {processes}: 2 x 3 devices.*: 1, 2, 3, 6$"):
        runtime.cpu_share(Mesh(nodes=2, devices_per_node=3), processes)


@pytest.mark.parametrize(
    ("cores", "devices", "processes", "given", "threads"),
    [
        (1, 1, 2, None, "2"),
        (2, 1, 2, None, None),
        (2, 4, 2, None, "5"),
        (8, 4, 2, None, None),
        (1, 1, 2, "1", "1"),
        (1, 4, 1, None, None),
    ],
)
def test_between_processes_xla_has_a_thread_more_than_devices(monkeypatch, cores, devices, processes, given, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(os, "environ", {} if given is None else {"NPROC": given})
    runtime.spare_a_thread(Mesh(nodes=processes, devices_per_node=devices), Placement(0, processes, ""))
    assert os.environ.get("NPROC") == threads


def test_gpus_are_shared_out_in_ranges():
    auto, explicit = Mesh(), Mesh(nodes=2, devices_per_node=2)
    first, second = (Placement(rank, 2, "", rank, 2) for rank in range(2))
    assert runtime.gpu_share(8, auto, second) == [4, 5, 6, 7]
    assert runtime.gpu_share(8, explicit, second) == [2, 3]
    with pytest.raises(SettingsRefused, match="= 4, but this host has 3 GPUs"):
        runtime.gpu_share(3, explicit, first)
    with pytest.raises(SettingsRefused, match="3 GPUs cannot be shared out equally between 2"):
        runtime.gpu_share(3, auto, first)
    with pytest.raises(SettingsRefused, match="numbers that can: none"):
        runtime.gpu_share(0, auto, first)


def test_each_host_shares_out_its_own_gpus():
    hosts = [[Placement(2 * host + local, 4, "", local, 2) for local in range(2)] for host in range(2)]
    for first, second in hosts:
        assert runtime.gpu_share(8, Mesh(nodes=2, devices_per_node=8), first) == [0, 1, 2, 3]
        assert runtime.gpu_share(8, Mesh(nodes=2, devices_per_node=8), second) == [4, 5, 6, 7]
        assert runtime.gpu_share(2, Mesh(nodes=2), second) == [1]
    with pytest.raises(SettingsRefused, match="= 16, but this host has 4 GPUs for 2 of 4 processes"):
        runtime.gpu_share(4, Mesh(nodes=2, devices_per_node=8), hosts[0][0])


def test_visible_gpus_are_those_that_the_user_left_visible():
    counts = [runtime.visible_gpus({"CUDA_VISIBLE_DEVICES": value}) for value in ("", "-1", "0", "2,5", "GPU-a,GPU-b,")]
    assert counts == [0, 0, 1, 2, 2]


def test_the_platform_is_the_settings_then_the_users():
    assert runtime.uses_cpu(Mesh(platform="cpu"), {"JAX_PLATFORMS": "cuda"})
    assert not runtime.uses_cpu(Mesh(platform="gpu"), {"JAX_PLATFORMS": "cpu"})
    assert runtime.uses_cpu(Mesh(), {"JAX_PLATFORMS": "cpu"})
    assert not runtime.uses_cpu(Mesh(), {"JAX_PLATFORMS": "cuda,cpu"})


def test_a_gpu_that_is_demanded_and_missing_is_refused():
    with pytest.raises(SettingsRefused, match=r'mesh.platform = "gpu".*only cpu devices'):
        runtime.demand_gpu()


@pytest.mark.parametrize("platforms", ["nonsense", "cuda"])
@pytest.mark.parametrize("platform", ["auto", "gpu"])
def test_a_platform_that_jax_cannot_start_is_refused(platforms, platform):
    line = refusal_of_start(platform, JAX_PLATFORMS=platforms)
    assert f"but JAX cannot start with JAX_PLATFORMS='{platforms}': " in line


def test_uncompiled_steps_are_refused():
    assert refusal_of_start("cpu", JAX_DISABLE_JIT="1").startswith("JAX_DISABLE_JIT is on")


def refusal_of_start(platform: str, **environ: str) -> str:
    """The one line with which ``start`` refuses, in a process of its own."""
    code = f"""
from trainer import runtime
from trainer.config import Mesh
from trainer.errors import SettingsRefused
from trainer.placement import Placement
try:
    runtime.start(Mesh(platform="{platform}"), Placement(), init_seconds=9, shutdown_seconds=9, cache_dir=None)
except SettingsRefused as refusal:
    print(refusal)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    return line


def test_more_emulated_devices_than_allowed_are_refused():
    assert runtime.cpu_share(Mesh(nodes=1024), 1) == 1024
    with pytest.raises(SettingsRefused, match="= 1025: at most 1024 on the CPU"):
        runtime.cpu_share(Mesh(nodes=1025), 1)


def test_the_cache_is_where_the_user_says(tmp_path):
    home = runtime.cache_directory({"HOME": "/h"})
    assert home is not None
    assert home.parent == Path("/h/.cache/lockstep/xla")
    assert runtime.cache_directory({"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/c/lockstep/xla", home.name)
    assert re.fullmatch(r"[\w-]+-[0-9a-f]{8}", home.name)
    assert runtime.cache_directory({"HOME": "/h", "LOCKSTEP_COMPILATION_CACHE": "off"}) is None
    assert runtime.cache_directory({}) is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    runtime.keep_compiled_programs(tmp_path / "file" / "cache")


def test_proxies_are_hidden_only_for_the_handshake(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://p")
    monkeypatch.setenv("no_proxy", "x")
    before = dict(os.environ)
    with runtime.without_proxies():
        assert not [name for name in os.environ if "proxy" in name.lower()]
    assert dict(os.environ) == before


def test_one_process_agrees_with_itself():
    assert (runtime.rank(), runtime.num_processes()) == (0, 1)
    assert runtime.agree("x", {"a": (1, None)}) == [{"a": [1, None]}]
    assert runtime.num_hosts() == 1
    runtime.barrier("x")
    runtime.stop()
