"""Which XLA flags are set, how they join the user's own, and that the installed XLA knows every one of them."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from trainer import xla_flags

HERE = version("jaxlib")
PASSES = xla_flags.LIST_FLAG


@pytest.mark.parametrize(
    ("user", "merged"),
    [
        ("", "--xla_a=1 --xla_b=2"),
        ("--xla_c=3", "--xla_c=3 --xla_a=1 --xla_b=2"),
        ("--xla_a=9", "--xla_a=9 --xla_b=2"),
        ("  --xla_a   --xla_b=9", "  --xla_a   --xla_b=9"),
        ("--xla_ab=9", "--xla_ab=9 --xla_a=1 --xla_b=2"),
        ("/a/file/of/flags", "/a/file/of/flags"),
    ],
)
def test_the_users_flags_are_kept_and_win(user, merged):
    assert xla_flags.merge(user, {"xla_a": "1", "xla_b": "2"}) == merged


@pytest.mark.parametrize(
    ("user", "merged"),
    [
        ("", f"--{PASSES}=x"),
        ("--xla_c=3", f"--xla_c=3 --{PASSES}=x"),
        (f"--{PASSES}=dce --xla_c=3", f"--{PASSES}=dce,x --xla_c=3"),
        (f"--{PASSES}=dce,x", f"--{PASSES}=dce,x"),
        (f"--{PASSES}=xx", f"--{PASSES}=xx,x"),
        (f"--{PASSES}=", f"--{PASSES}="),
        (f"--{PASSES}_only=y", f"--{PASSES}_only=y --{PASSES}=x"),
    ],
)
def test_the_list_of_passes_gets_ours_added_unless_it_is_empty(user, merged):
    assert xla_flags.merge(user, {PASSES: "x"}) == merged


def test_exchanges_are_kept_apart_where_there_is_a_link_to_keep_busy():
    def chosen(jaxlib=HERE, **where):
        return set(xla_flags.chosen(jaxlib, **where))

    patient, cpu, gpu = set(xla_flags.PATIENT), set(xla_flags.APART_ON_CPU), set(xla_flags.APART_ON_GPU)
    depth_first = set(xla_flags.DEPTH_FIRST_ON_CPU)
    assert chosen(emulated=True, num_processes=1) == patient
    assert chosen(emulated=True, num_processes=2) == patient | cpu
    assert chosen(emulated=True, num_processes=1, num_devices=2) == patient | depth_first
    assert chosen(emulated=True, num_processes=2, num_devices=2) == patient | cpu | depth_first
    assert chosen(emulated=False, num_processes=1, num_gpus=1) == set()
    assert chosen(emulated=False, num_processes=1, num_gpus=8) == gpu
    assert chosen(emulated=False, num_processes=2, num_gpus=1) == gpu
    assert chosen(emulated=False, num_processes=2, num_gpus=0) == set()
    for unknown in ("0.10.1", "0.13.0", "1.0"):
        assert chosen(unknown, emulated=True, num_processes=2) == set()


@pytest.mark.parametrize("user", ["", f"--{PASSES}=dce", f"--{PASSES}="])
def test_the_installed_xla_knows_every_flag(user):
    ours = {**xla_flags.PATIENT, **xla_flags.APART_ON_CPU, **xla_flags.DEPTH_FIRST_ON_CPU, **xla_flags.APART_ON_GPU}
    flags = xla_flags.merge(user, ours)
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr[-2000:]
