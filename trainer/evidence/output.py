"""How a benchmark hands over its result: a table on the console, or JSON on standard output or in a file."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.errors import InputRefused


def deliver(
    console: Console | None, json_path: str, result: dict[str, Any], shown: Callable[[dict[str, Any]], Iterable[Any]]
) -> None:
    """Writes ``result`` as JSON to the file ``json_path``, or to the console if that is "-"; else shows it there.

    Args:
        json_path: "" for no JSON.
        shown: what rich is to print of the result.

    Raises:
        InputRefused: the file cannot be written.
    """
    text = json.dumps(result, allow_nan=False, indent=2)
    if json_path == "-":
        if console is not None:
            console.print(text, soft_wrap=True, markup=False, highlight=False)
        return
    if console is not None:
        for part in shown(result):
            console.print(part, highlight=False)
    if json_path:
        try:
            Path(json_path).write_text(text + "\n")
        except OSError as error:
            raise InputRefused(f"--json {json_path} cannot be written: {error.strerror}") from error


def number_of_bytes(count: int) -> str:
    """Bytes in the unit that suits them.

    >>> number_of_bytes(12), number_of_bytes(1536), number_of_bytes(64 * 2**20)
    ('12 B', '1.5 KiB', '64 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def short_time(seconds: float) -> str:
    """Seconds in the unit that suits them, down to nanoseconds.

    >>> short_time(0), short_time(2.5e-7), short_time(1.234e-4), short_time(0.25), short_time(12.3)
    ('0 s', '250 ns', '123 µs', '250 ms', '12.3 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"
