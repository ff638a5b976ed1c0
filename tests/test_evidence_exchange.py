"""``lockstep bench sync``: what may be asked, what is measured, and what is handed over."""

import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console
from toy import mesh_of

from trainer import sync
from trainer.config import Config
from trainer.errors import SettingsRefused
from trainer.evidence import exchange_bench, options, timing
from trainer.evidence.exchange_table import Measured, Way, as_json, doubts, fitted, table
from trainer.rundir import RunDir

SETTINGS = {"task": {"target": "a:B"}, "data": {"source": "digits", "global_batch": 8}}
LINKS = sync.Profile(sync.CostModel(2e-5, 1e-10), sync.CostModel(5e-4, 4e-8), 1e-3)


def bench(tmp_path, nodes=2, local=4, **changes):
    """Runs the measurement in this process; returns what the console showed."""
    config = Config.model_validate({**SETTINGS, "mesh": {"nodes": nodes, "devices_per_node": local, "platform": "cpu"}})
    console = Console(file=io.StringIO(), width=200)
    arguments = {"sizes": [1024, 65536], "algorithms": options.algorithms(None), "seconds": 0.01}
    arguments |= {"json_path": "", "profile_path": "", **changes}
    exchange_bench.run(config, RunDir(tmp_path), 0, console, **arguments)
    return console.file.getvalue()


def test_every_way_is_measured_at_every_size_and_the_links_are_written(tmp_path):
    shown = bench(tmp_path, json_path=str(tmp_path / "x.json"), profile_path=str(tmp_path / "links.json"))
    result = json.loads((tmp_path / "x.json").read_text())
    names = ["xla", "ring", "tree", *(f"hierarchical over {way}" for way in sync.ACROSS), "central"]
    assert [row["name"] for row in result["rows"]] == 2 * names
    for row in result["rows"]:
        assert row["seconds"] > 0
        assert row["bytes_per_second"] == pytest.approx(row["payload_bytes"] / row["seconds"])
        assert row["measured_over_predicted"] == pytest.approx(row["seconds"] / row["predicted_seconds"])
        assert row["name"] in shown
    ring = next(row for row in result["rows"] if (row["name"], row["payload_bytes"]) == ("ring", 65536))
    assert ring["wire_bytes_slow"] == 65536 * 2 * 7 / 8
    assert result["machine"]["shares_cores"]
    assert "cores shared: the devices are emulated" in shown
    assert "warning: do not rely on these links: all devices are in one process" in shown
    assert result["warning"] in shown
    links = sync.read_profile(tmp_path / "links.json")
    assert result["links"]["fast"] == links.fast._asdict()


def test_json_takes_the_place_of_the_table(tmp_path):
    rows = json.loads(bench(tmp_path, 1, 8, sizes=[4096], json_path="-"))["rows"]
    assert [row["name"] for row in rows if row["algorithm"] == "hierarchical"] == ["hierarchical over ring"]
    assert all(row["wire_bytes_slow"] == 0 for row in rows)


def test_an_exchange_in_the_loop_is_the_mean():
    mesh = mesh_of(2, 4)
    rows = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    for way in exchange_bench.ways(mesh, options.ALGORITHMS):
        got = exchange_bench.exchange_program(mesh, way, loop=3)(jax.device_put(rows))
        np.testing.assert_allclose(got, np.broadcast_to(rows.mean(axis=0), rows.shape), rtol=1e-6)


def test_the_links_are_found_again_whatever_central_took():
    mesh = mesh_of(2, 4)
    found = [
        Measured(
            way,
            size,
            sync.predict(LINKS, exchange_bench.counted(mesh, way, size)),
            exchange_bench.counted(mesh, way, size),
        )
        for way in exchange_bench.ways(mesh, options.ALGORITHMS)
        for size in options.DEFAULT_SIZES
    ]
    found = [m._replace(seconds=9 * m.seconds) if m.way.algorithm == "central" else m for m in found]
    np.testing.assert_allclose(np.hstack(fitted(found)), np.hstack(LINKS), rtol=1e-6)
    where = timing.Machine(2, 4, 8, 2, "gpu", "kind", 4)
    result = as_json(where, found, fitted(found))
    for row in result["rows"]:
        assert row["measured_over_predicted"] == pytest.approx(9 if row["algorithm"] == "central" else 1)
    *_, fast, slow = table(result, where)
    assert fast == "fast link: 20 µs a message, 9,536.7 MiB/s"
    assert slow == "slow link: 500 µs a message, 23.8 MiB/s"
    assert where.describe() == "2 nodes x 4 kind devices, 8 processes on 2 hosts"
    only_central = [Measured(Way("central"), m.payload_bytes, m.seconds, m.traffic) for m in found[:3]]
    assert min(np.hstack(fitted(only_central))) >= 0


def exact_rows(mesh, profile=LINKS):
    """What is measured where the links are those of ``profile``."""
    ways = exchange_bench.ways(mesh, ("xla", "ring", "tree"))
    pairs = [(way, size, exchange_bench.counted(mesh, way, size)) for way in ways for size in options.DEFAULT_SIZES]
    return [Measured(way, size, sync.predict(profile, traffic), traffic) for way, size, traffic in pairs]


def test_links_that_explain_little_are_warned_of_in_a_line():
    where, mesh = timing.Machine(2, 4, 2, 2, "cpu", "cpu", 4), mesh_of(2, 4)
    rows = exact_rows(mesh)
    assert doubts(where, rows, LINKS) == ""
    some = [m._replace(seconds=3 * m.seconds) if i < 2 else m for i, m in enumerate(rows)]
    assert doubts(where, some, LINKS) == ""
    many = [m._replace(seconds=(5 if i == 3 else 3) * m.seconds) if i < 4 else m for i, m in enumerate(rows)]
    message = "4 of 27 exchanges took over 2 times the predicted, or under half (xla of 64 KiB 5 times); measure longer"
    assert message in doubts(where, many, LINKS)
    free = LINKS._replace(slow=sync.CostModel(1e-5, 0.0), fast=sync.CostModel(0.0, 1e-10))
    told = doubts(where, exact_rows(mesh, free), free)
    assert "the fast link's seconds a message came out as 0; the slow link's seconds a byte came out as 0" in told
    assert "\n" not in told
    assert doubts(where, exact_rows(mesh_of(1, 8)), LINKS._replace(slow=sync.CostModel(0, 0))) == ""
    assert "give --processes" in doubts(where._replace(processes=1), rows, LINKS)
    flat = [m for m in rows if m.way.name in ("xla", "ring")]
    assert "no exchange waits for the fast link alone (measure tree" in doubts(where, flat, fitted(flat))


def test_one_replica_has_nothing_to_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange_bench.meshes, "make", lambda settings: mesh_of(1, 1))
    with pytest.raises(SettingsRefused, match="one replica exchanges nothing"):
        bench(tmp_path, 1, 1)


def test_several_processes_measure_together(tmp_path):
    command = [sys.executable, "-m", "trainer", "bench", "sync", "--processes", "2", "--set", "mesh.devices_per_node=1"]
    command += ["--sizes", "1KiB,16KiB", "--algorithms", "xla,tree", "--seconds", "0.05", "--json", "-"]
    command += ["--profile", str(tmp_path / "links.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["machine"]["processes"], result["machine"]["hosts"], len(result["rows"])) == (2, 1, 4)
    sync.read_profile(tmp_path / "links.json")


def test_options_are_read_and_refused_in_one_line(tmp_path):
    assert options.sizes(None)[0] == 2**10
    assert options.sizes(None)[-1] == 64 * 2**20
    assert options.sizes("1 mib,4,4") == [4, 2**20]
    for text in ("0", "6", "1TiB", "-4", "x", "2GiB", "1KiB,,", "4.5KiB", "9" * 5000, "", " ", ",", "0KiB"):
        with pytest.raises(SettingsRefused, match=r"^--sizes: .*[^\n]$"):
            options.sizes(text)
    assert options.algorithms("central, xla") == ["xla", "central"]
    for text, word in (("xla,auto", "auto"), ("", "")):
        with pytest.raises(SettingsRefused, match=f"--algorithms: '{word}' is none of xla, ring"):
            options.algorithms(text)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SettingsRefused, match="--seconds"):
            options.seconds(value)
    assert options.output("--json", "-", or_stdout=True) == "-"
    with pytest.raises(SettingsRefused, match=r"--profile -: .*name a file"):
        options.output("--profile", "-")
    assert options.output("--json", str(tmp_path / "x")) == str(tmp_path / "x")
    for path in (tmp_path, tmp_path / "nowhere" / "x"):
        with pytest.raises(SettingsRefused, match=r"--json .*name a file in a directory that exists"):
            options.output("--json", str(path))
