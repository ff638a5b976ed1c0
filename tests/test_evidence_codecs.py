"""``lockstep bench codecs``: what may be asked, what is measured, and what is handed over."""

import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

from trainer import sync
from trainer.config import Config
from trainer.errors import SettingsRefused
from trainer.evidence import codec_bench, options
from trainer.evidence.codec_table import NODES
from trainer.rundir import RunDir
from trainer.sync.codecs import build
from trainer.sync.codecs.base import gathered

SETTINGS = {"task": {"target": "a:B"}, "data": {"source": "digits", "global_batch": 8}, "mesh": {"platform": "cpu"}}
MEASURED = ["int8", "topk:ratio=0.05"]


def bench(tmp_path, **changes):
    """Runs the measurement in this process; returns what the console showed."""
    console = Console(file=io.StringIO(), width=120)
    arguments = {"codecs": MEASURED, "mib": 1 / 64, "seconds": 0.01, "json_path": "", **changes}
    codec_bench.run(Config.model_validate(SETTINGS), RunDir(tmp_path), 0, console, **arguments)
    return console.file.getvalue()


def test_every_codec_is_measured_and_shown(tmp_path):
    shown = bench(tmp_path, json_path=str(tmp_path / "x.json"))
    result = json.loads((tmp_path / "x.json").read_text())
    assert [row["codec"] for row in result["rows"]] == MEASURED
    for row in result["rows"]:
        assert row["codec"] in shown
        assert row["encode_seconds_per_mib"] > 0 <= row["decode_seconds_per_mib"]
        assert set(row["relative_error"]) == {"normal", "heavy_tailed"}
        assert set(row["wire_ratio"]) == {str(nodes) for nodes in NODES}
        assert row["applies"]
        assert row["value_bytes"] == 2**14
    assert "16 KiB of float32 on one cpu device" in shown


def test_a_codec_that_would_not_be_used_is_named(tmp_path):
    shown = bench(tmp_path, codecs=["powersgd:rank=64"])
    assert "not used on values of this size, but sent exactly: powersgd:rank=64" in shown


def test_an_unknown_argument_is_refused(tmp_path):
    with pytest.raises(SettingsRefused, match=r"sync\.args\.rank"):
        bench(tmp_path, codecs=["int8:rank=3"])


def test_what_is_dropped_is_that_of_one_encoding():
    """Against the value rounded by hand, and the entries left out."""
    value = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    blocks = value.reshape(-1, 256)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    rounded = np.round(blocks / scales) * scales
    small = np.sort(value.reshape(-1) ** 2)[: 1024 - 102]
    expected = {
        "int8": np.linalg.norm(blocks - rounded) / np.linalg.norm(value),
        "topk": np.sqrt(small.sum() / np.sum(value**2)),
    }
    for codec in (build("int8", {"block_size": 256}), build("topk", {"ratio": 0.1})):
        unit = jax.numpy.asarray(value.reshape(-1) if codec.unit == "element" else value)
        got = codec_bench.dropped(unit, codec_bench.member(codec)[0](unit).sent[0])
        assert got == pytest.approx(expected[codec.name], rel=0.01), codec.name


def test_encoding_ends_with_the_first_message():
    codec = gathered("eight", lambda value, key: value[:8], lambda code, shape: code.sum() + jax.numpy.zeros(shape),
                     unit="element")  # fmt: skip
    value = jax.numpy.arange(64.0)
    whole, encode = codec_bench.member(codec)
    assert encode(value).nbytes == 32
    assert float(whole(value).totals[0][0]) == 2 * 28


@pytest.mark.parametrize(("codec", "num_nodes", "expected"), [("int8", 2, 3.9), ("int4", 2, 7.5), ("sign", 2, 30)])
def test_bytes_are_those_of_the_accounting(codec, num_nodes, expected):
    assert codec_bench.wire_ratio(build(codec), (256, 256), num_nodes) > expected


def test_the_ratio_of_codes_that_all_get_falls_with_the_nodes():
    topk = build("topk")
    two, eight = (codec_bench.wire_ratio(topk, (1024, 1024), nodes) for nodes in (2, 8))
    assert two / eight == pytest.approx(4, rel=0.01)


def test_options_are_read_and_refused_in_one_line():
    assert set(options.CODECS) == set(sync.CODECS)
    assert options.codecs(None) == list(options.CODECS)
    assert options.codecs(" sign ,powersgd:rank=2") == ["sign", "powersgd:rank=2"]
    assert options.codec("topk:ratio=0.1").args == {"ratio": 0.1}
    for text in ("", "int9", "none", "int8,int8", "int8,", "topk:0.1", "topk:ratio=", "int8:"):
        with pytest.raises(SettingsRefused, match=r"^--codecs: [^\n]*$"):
            options.codecs(text)
    for size in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(SettingsRefused, match="--mib"):
            options.mib(size)


def test_the_command_prints_json(tmp_path):
    command = [sys.executable, "-m", "trainer", "bench", "codecs", "--codecs", "sign", "--mib", "0.1"]
    command += ["--seconds", "0.01", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["codec"] for row in json.loads(done.stdout)["rows"]] == ["sign"]
