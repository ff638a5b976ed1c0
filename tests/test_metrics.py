"""metrics.jsonl is strict JSON, survives a killed writer, and is read back without repeated steps."""

import functools
import json
import operator
import os
import random
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from trainer import metrics
from trainer.errors import ExitCode, InputRefused

TRAIN = dict.fromkeys(metrics.REQUIRED_KEYS["train"], 1) | {"kind": "train"}
EVAL = {"kind": "eval", "step": 1, "attempt": 1, "examples": 21}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def _write(path, *rows):
    with metrics.MetricsWriter(path) as writer:
        for row in rows:
            writer.write(row)


def _strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is not strict JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    ("total", "weight", "expected"),
    [
        (2.0 + 90.0, 10.0, 9.2),
        (0.0, 0.0, 0.0),
        (5.0, 0.0, 0.0),
        (float("nan"), 0, 0.0),
        (np.float32(3), jnp.float32(2), 1.5),
    ],
)
def test_mean(total, weight, expected):
    result = metrics.mean(total, weight)
    assert type(result) is float
    assert result == expected


def test_mean_of_non_finite_sum_shows():
    assert np.isnan(metrics.mean(float("nan"), 2.0))


def test_merge_is_exact_in_any_order():
    rng = random.Random(0)
    values = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-12, 12) for _ in range(99)]
    parts = [{"loss": (value, 1.0)} for value in values] + [{"accuracy": (1.0, 2.0)}]
    exact = float(sum(Fraction(value) for value in values))
    assert functools.reduce(operator.add, values) != exact  # or this test could not tell a naive sum from ours
    for _ in range(5):
        rng.shuffle(parts)
        assert metrics.merge(parts) == {"loss": (exact, 99.0), "accuracy": (1.0, 2.0)}


@pytest.mark.parametrize("values", [(float("inf"), float("-inf")), (float("nan"), 1.0)])
def test_merge_keeps_nan(values):
    total, weight = metrics.merge([{"loss": (value, 1.0)} for value in values])["loss"]
    assert np.isnan(total)
    assert weight == 2.0


def test_values_of_numpy_and_jax_round_trip(path):
    values = {
        "loss": jnp.float32(0.1),
        "half": jnp.asarray(64.5, jnp.bfloat16),
        "small": np.float16(0.5),
        "count": np.int64(2**40),
        "flag": np.bool_(True),
        "example_ids": np.arange(3),
        "more_ids": jnp.arange(3),
        "phases": {"exchange": np.float32(0.25)},
        "param_digest": "ab:c",
        "nothing": None,
    }
    _write(path, EVAL | values)
    (row,) = metrics.read(path)
    assert row == EVAL | {
        "loss": float(np.float32(0.1)),
        "half": 64.5,
        "small": 0.5,
        "count": 2**40,
        "flag": True,
        "example_ids": [0, 1, 2],
        "more_ids": [0, 1, 2],
        "phases": {"exchange": 0.25},
        "param_digest": "ab:c",
        "nothing": None,
    }


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        (np.float32("inf"), None),
        (jnp.float32("-inf"), None),
        (jnp.asarray(float("nan"), jnp.bfloat16), None),
        (np.array([1.0, np.nan]), [1.0, None]),
        ({"a": float("inf"), "b": 1.0}, {"a": None, "b": 1.0}),
    ],
)
def test_non_finite_values_are_null_and_listed(value, written):
    row = _strict(metrics.to_line(EVAL | {"loss": value, "accuracy": 0.5}))
    assert row == EVAL | {"loss": written, "accuracy": 0.5, "non_finite": ["loss"]}


def test_finite_row_has_no_non_finite_key():
    assert "non_finite" not in _strict(metrics.to_line(TRAIN))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({key: 1 for key in TRAIN if key != "grad_norm"} | {"kind": "train"}, "lacks grad_norm"),
        ({"kind": "eval", "step": 1}, "lacks attempt, examples"),
        ({"kind": "test", "step": 1}, "allowed: train, eval"),
        ({"step": 1}, "kind = None"),
    ],
)
def test_incomplete_rows_are_our_mistake(row, message):
    with pytest.raises(ValueError, match=message):
        metrics.to_line(row)


def test_a_row_is_one_line_whatever_it_holds(path):
    _write(path, EVAL | {"note": "two\nlines \u2028 and ünïcode"})
    assert path.read_bytes().count(b"\n") == 1
    assert metrics.read(path)[0]["note"] == "two\nlines \u2028 and ünïcode"


def test_a_row_is_in_the_file_before_write_returns(path):
    writer = metrics.MetricsWriter(path)
    writer.write(TRAIN)
    assert metrics.read(path) == [TRAIN]
    writer.close()
    writer.close()


def test_read_orders_by_step_and_takes_the_later_attempt(path):
    def row(kind, step, attempt, loss):
        return (TRAIN if kind == "train" else EVAL) | {"step": step, "attempt": attempt, "loss": loss}

    first = [row("train", step, 1, 1.0) for step in (1, 2, 3)] + [row("eval", 3, 1, 1.0)]
    second = [row("train", step, 2, 2.0) for step in (3, 2, 4)]
    _write(path, *first)
    _write(path, *second)
    assert [(r["step"], r["loss"]) for r in metrics.read(path, "train")] == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert metrics.read(path, "eval") == [], "undone, and not repeated yet"
    assert len(metrics.read(path)) == 4


def test_what_a_later_attempt_went_back_behind_is_left_out(path):
    first = [TRAIN | {"step": step, "attempt": 1} for step in (1, 2, 3, 4)] + [EVAL | {"step": 4, "attempt": 1}]
    _write(path, *first, EVAL | {"step": 2, "attempt": 1}, TRAIN | {"step": 3, "attempt": 2})
    assert [(r["step"], r["attempt"]) for r in metrics.read(path, "train")] == [(1, 1), (2, 1), (3, 2)]
    assert [r["step"] for r in metrics.read(path, "eval")] == [2]


def test_the_later_attempt_wins_whatever_the_order_of_lines(path):
    _write(path, TRAIN | {"attempt": 2, "loss": 2.0}, TRAIN | {"attempt": 1, "loss": 1.0})
    assert [row["loss"] for row in metrics.read(path)] == [2.0]


def test_a_line_torn_anywhere_loses_only_itself(path):
    lines = [metrics.to_line(TRAIN | {"step": step}) for step in (1, 2)]
    for length in range(len(lines[1]) + 1):
        path.write_bytes(lines[0] + lines[1][:length])
        whole = length >= len(lines[1]) - 1  # only the newline is missing
        expected = [1, 2] if whole else [1]
        assert [row["step"] for row in metrics.read(path)] == expected
        _write(path, TRAIN | {"step": 3})
        assert [row["step"] for row in metrics.read(path)] == [*expected, 3]


def test_a_line_torn_within_a_character(path):
    path.write_bytes(metrics.to_line(TRAIN) + '{"kind": "ü'.encode()[:-1])
    assert metrics.read(path) == [TRAIN]


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "tra',
        b"",
        b"[1]",
        b'{"kind": "train", "step": 1}',
        b'{"kind": "train", "step": NaN, "attempt": 1}',
        b"\xff",
    ],
)
def test_a_bad_line_in_the_middle_is_refused_by_number(path, line):
    good = metrics.to_line(TRAIN)
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(InputRefused, match="line 2") as caught:
        metrics.read(path)
    assert caught.value.exit_code is ExitCode.INPUT_REFUSED


def test_no_file_and_no_rows(path):
    with pytest.raises(InputRefused, match="No such file"):
        metrics.read(path)
    path.touch()
    assert metrics.read(path) == []


def test_unwritable_directory_is_refused(tmp_path):
    with pytest.raises(InputRefused, match="No such file"):
        metrics.MetricsWriter(tmp_path / "missing" / "metrics.jsonl")


def test_a_full_disk_leaves_no_torn_line(path, monkeypatch):
    _write(path, TRAIN)
    writer = metrics.MetricsWriter(path)
    write = os.write

    def short_then_full(file, data):
        if len(data) < len(metrics.to_line(TRAIN)):
            raise OSError(28, "No space left on device")
        return write(file, data[:-5])

    monkeypatch.setattr(os, "write", short_then_full)
    with pytest.raises(OSError, match="No space"):
        writer.write(TRAIN | {"step": 2})
    monkeypatch.undo()
    writer.write(TRAIN | {"step": 3})
    assert [row["step"] for row in metrics.read(path)] == [1, 3]
