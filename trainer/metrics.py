"""Metrics as (sum, weight), which merge exactly, and ``metrics.jsonl``: its only writer and its only reader.

One row is one line of strict JSON. A value that is not finite is written as ``null`` and its key is listed in the
row's ``non_finite``, so that every JSON reader accepts the file and nobody mistakes a missing number for a zero.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, SupportsFloat

import numpy as np

from trainer.errors import InputRefused

Row = dict[str, Any]
"""One row of metrics.jsonl: any JSON values, so the reader of a key has to know its type."""

REQUIRED_KEYS = {
    "train": (
        *("step", "num_updates", "epoch", "attempt", "loss", "learning_rate", "grad_norm", "examples"),
        *("step_seconds", "examples_per_second", "num_contributions"),
    ),
    "eval": ("step", "attempt", "examples"),
}
"""What a row of each kind holds at least. Scripts rely on these names."""

_log = logging.getLogger(__name__)


def mean(total: SupportsFloat, weight: SupportsFloat) -> float:
    """``total / weight``; 0.0 when nothing was counted (weight 0), so that an all-masked batch logs a finite number.

    >>> mean(2.0 + 90.0, 1.0 + 9.0)
    9.2
    """
    return float(total) / float(weight) if float(weight) != 0.0 else 0.0


def merge(parts: Iterable[Mapping[str, tuple[SupportsFloat, SupportsFloat]]]) -> dict[str, tuple[float, float]]:
    """Adds up metrics name by name: ``{name: (sum, weight)}``, each the exact sum rounded once to float64.

    The result does not depend on the order of ``parts``. A name that only some parts have is added up over those.
    """
    columns: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        for name, (total, weight) in part.items():
            columns.setdefault(name, []).append((float(total), float(weight)))
    return {name: (_exact_sum(t for t, _ in pairs), _exact_sum(w for _, w in pairs)) for name, pairs in columns.items()}


def _exact_sum(values: Iterable[float]) -> float:
    numbers = list(values)
    # fsum raises on inf - inf and on overflow, where IEEE's NaN or inf is the honest answer.
    return math.fsum(numbers) if all(abs(x) < 1e300 for x in numbers) else sum(numbers)


class _Converted(NamedTuple):
    value: Any
    finite: bool


def _convert(value: Any) -> _Converted:
    """``value`` as plain JSON: arrays and scalars of numpy and JAX become lists and numbers, non-finite ones None."""
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        # bfloat16 and its like are unknown to numpy itself; float64 holds each of their values exactly.
        value = array.tolist() if array.dtype.kind in "biufU" else array.astype(np.float64).tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return _Converted(None, False)
    if isinstance(value, Mapping):
        items = {str(key): _convert(item) for key, item in value.items()}
        return _Converted({key: item.value for key, item in items.items()}, all(i.finite for i in items.values()))
    if isinstance(value, list | tuple):
        parts = [_convert(item) for item in value]
        return _Converted([part.value for part in parts], all(part.finite for part in parts))
    return _Converted(value, True)


def to_line(row: Mapping[str, Any]) -> bytes:
    """``row`` as one line of metrics.jsonl, newline included. float32 values are written with all their bits.

    Raises ValueError if ``kind`` is unknown or a key that this kind must have is missing.

    >>> to_line({"kind": "eval", "step": 3, "attempt": 1, "examples": 21, "loss": float("nan")})
    b'{"kind": "eval", "step": 3, "attempt": 1, "examples": 21, "loss": null, "non_finite": ["loss"]}\\n'
    """
    kind = row.get("kind")
    if kind not in REQUIRED_KEYS:
        raise ValueError(f"a row has kind = {kind!r}; allowed: {', '.join(REQUIRED_KEYS)}")
    if missing := [key for key in REQUIRED_KEYS[kind] if key not in row]:
        raise ValueError(f"a row of kind {kind!r} lacks {', '.join(missing)}")
    return (json.dumps(to_json(row), allow_nan=False) + "\n").encode()


def to_json(row: Mapping[str, Any]) -> Row:
    """``row`` in plain JSON values: None for what is not finite, and the keys of that under ``non_finite``."""
    converted = {key: _convert(value) for key, value in row.items()}
    plain = {key: item.value for key, item in converted.items()}
    if non_finite := [key for key, item in converted.items() if not item.finite]:
        plain["non_finite"] = non_finite
    return plain


class MetricsWriter:
    """Appends rows to the file at ``path``; for one process at a time (rank 0).

    Each row is handed to the operating system at once: a killed process loses at most the line being written. A line
    that an earlier attempt left torn at the end is removed on opening, so that it never ends up in the middle.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with MetricsWriter(Path(directory, "metrics.jsonl")) as writer:
    ...         writer.write({"kind": "eval", "step": 3, "attempt": 1, "examples": 21, "loss": np.float32(0.5)})
    ...     [row["loss"] for row in read(Path(directory, "metrics.jsonl"), "eval")]
    [0.5]
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InputRefused(
                f"cannot write metrics to {path}: {error.strerror}; is the run directory yours?"
            ) from error
        self._mend_tail(Path(path))

    def _mend_tail(self, path: Path) -> None:
        content = path.read_bytes()
        tail = content[content.rfind(b"\n") + 1 :]
        if tail and _parse(tail) is not None:
            os.write(self._file, b"\n")
        elif tail:
            os.ftruncate(self._file, len(content) - len(tail))

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends ``row`` whole (see ``to_line``), or raises OSError (a full disk) and leaves the file as it was."""
        line = to_line(row)
        start = os.fstat(self._file).st_size
        try:
            if (written := os.write(self._file, line)) != len(line):
                os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, start)
            raise

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: str | Path, kind: str | None = None) -> list[Row]:
    """The rows of the metrics.jsonl at ``path``, of one ``kind`` or (None) of all, ordered by step.

    A step that was repeated after a restart is returned once, as the later attempt saw it; what an earlier attempt did
    past the point where a later one began is left out, for it was undone. So is an unfinished last line: its writer was
    killed, or is writing it now. Raises InputRefused if there is no such file, or if any other
    line is not a row; the message names the line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise InputRefused(f"cannot read metrics from {path}: {error.strerror}") from error
    latest: dict[tuple[str, int], Row] = {}
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None and number < len(lines):
            raise InputRefused(
                f"{path}, line {number}, is not a row of metrics: {line[:80].decode(errors='replace')!r}"
            )
        if row is None:
            if line:
                _log.info("%s: left out the unfinished last line", path)
            continue
        earlier = latest.get((row["kind"], row["step"]))
        if earlier is None or row["attempt"] >= earlier["attempt"]:
            latest[row["kind"], row["step"]] = row
    begun: dict[int, int] = {}
    for row in latest.values():
        if row["kind"] == "train":
            begun[row["attempt"]] = min(row["step"], begun.get(row["attempt"], row["step"]))
    rows = [row for (row_kind, _), row in latest.items() if kind in (None, row_kind) and not _is_undone(row, begun)]
    return sorted(rows, key=lambda row: row["step"])


def _is_undone(row: Row, begun: dict[int, int]) -> bool:
    """Whether an attempt later than the row's began at its step or before; ``begun``: each attempt's first step."""
    return any(attempt > row["attempt"] and first <= row["step"] for attempt, first in begun.items())


def _parse(line: bytes) -> Row | None:
    """The row that ``line`` holds, or None if it is no row."""
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except ValueError:  # also what undecodable bytes raise
        return None
    has_keys = isinstance(row, dict) and all(type(row.get(key)) is int for key in ("step", "attempt"))
    return row if has_keys and isinstance(row.get("kind"), str) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
