"""What ``lockstep bench codecs`` has found: the JSON and the table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from trainer.evidence.output import number_of_bytes, short_time
from trainer.evidence.timing import Machine

NODES = (2, 8)
"""For so many nodes the bytes are counted. Those of codes that everybody gets grow with their number."""


class Measured(NamedTuple):
    """One codec.

    encode_seconds: until the first message; whole_seconds: all that a member computes in an exchange.
    ratios:  nodes -> how many times fewer bytes than float32.
    errors:  kind of values -> norm of what was dropped, relative.
    applies: whether the codec is used on these values at all; otherwise an exchange sends them exactly.
    """

    label: str
    value_bytes: int
    encode_seconds: float
    whole_seconds: float
    ratios: Mapping[int, float]
    errors: Mapping[str, float]
    applies: bool


def as_json(where: Machine, measured: Sequence[Measured]) -> dict[str, Any]:
    """All that was measured, for people and scripts."""
    return {"machine": where._asdict(), "rows": [_row(m) for m in measured]}


def _row(measured: Measured) -> dict[str, Any]:
    mib = measured.value_bytes / 2**20
    return {
        "codec": measured.label,
        "value_bytes": measured.value_bytes,
        "encode_seconds_per_mib": measured.encode_seconds / mib,
        "decode_seconds_per_mib": max(measured.whole_seconds - measured.encode_seconds, 0.0) / mib,
        "wire_ratio": {str(nodes): ratio for nodes, ratio in measured.ratios.items()},
        "relative_error": dict(measured.errors),
        "applies": measured.applies,
    }


def table(result: dict[str, Any], where: str) -> Iterator[Any]:
    """What is shown of the result of ``as_json``, measured ``where``."""
    rows = result["rows"]
    yield f"{number_of_bytes(rows[0]['value_bytes'])} of float32 on {where}"
    headings = ["encode / MiB", "decode / MiB", *(f"fewer bytes, {nodes} nodes" for nodes in NODES)]
    shown = Table()
    for heading in ("codec", *headings, "error, normal", "heavy-tailed"):
        shown.add_column(heading, justify="left" if heading == "codec" else "right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row["codec"],
            short_time(row["encode_seconds_per_mib"]),
            short_time(row["decode_seconds_per_mib"]),
            *(f"{row['wire_ratio'][str(nodes)]:.2f} x" for nodes in NODES),
            *(f"{error:.2g}" for error in row["relative_error"].values()),
        )
    yield shown
    if idle := [row["codec"] for row in rows if not row["applies"]]:
        yield f"not used on values of this size, but sent exactly: {', '.join(idle)}"
