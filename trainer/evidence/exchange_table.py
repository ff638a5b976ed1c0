"""What ``lockstep bench sync`` has found: the links that explain it, the JSON and the table."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from trainer import sync
from trainer.evidence.output import number_of_bytes, short_time
from trainer.evidence.timing import Machine

UNRELIABLE = "do not rely on these links:"
FAR = 2
"""Measured over predicted, or the reverse, from which on a prediction is of little use."""

TOLERATED = 0.1
"""The share of such exchanges that is put down to chance."""


class Way(NamedTuple):
    """An algorithm, with what "hierarchical" uses across nodes."""

    algorithm: str
    across: str = "ring"

    @property
    def name(self) -> str:
        return f"{self.algorithm} over {self.across}" if self.algorithm == "hierarchical" else self.algorithm


class Measured(NamedTuple):
    """One way at one size."""

    way: Way
    payload_bytes: int
    seconds: float
    traffic: sync.Traffic


def fitted(measured: Sequence[Measured]) -> sync.Profile:
    """The links that explain the measured times best; those of "central", which is never chosen, are left out."""
    return sync.fit([sync.Sample(m.traffic, m.seconds) for m in _usual(measured)])


def doubts(where: Machine, measured: Sequence[Measured], profile: sync.Profile) -> str:
    """Why the links should not be relied on, and what to do, in one line; empty if there is nothing to say."""
    if where.platform == "cpu" and where.processes == 1:
        return f"{UNRELIABLE} all devices are in one process, and no link between them: give --processes, on your hosts"
    levels = {name: [getattr(m.traffic, name) for m in _usual(measured)] for name in ("fast", "slow")}
    found = [
        f"no exchange waits for the {name} link alone (measure tree or hierarchical too)"
        for name, traffics in levels.items()
        if any(traffic.messages.any() for traffic in traffics) and not any(traffic.rounds for traffic in traffics)
    ]
    found += [
        f"the {name} link's {field.replace('_per_', ' a ')} came out as 0"
        for name, traffics in levels.items()
        if any(traffic.rounds for traffic in traffics)
        for field, value in getattr(profile, name)._asdict().items()
        if not value
    ]
    ratios = [(m.seconds / sync.predict(profile, m.traffic), m) for m in _usual(measured)]
    far = [(ratio, m) for ratio, m in ratios if not 1 / FAR <= ratio <= FAR]
    if len(far) > TOLERATED * len(ratios):
        ratio, worst = max(far, key=lambda pair: abs(math.log(pair[0])))
        example = f"{worst.way.name} of {number_of_bytes(worst.payload_bytes)} {ratio:.2g} times"
        found.append(
            f"{len(far)} of {len(ratios)} exchanges took over {FAR} times the predicted, or under half ({example})"
        )
    if not found:
        return ""
    return f"{UNRELIABLE} {'; '.join(found)}; measure longer (--seconds), more --sizes, and with nothing beside it"


def _usual(measured: Sequence[Measured]) -> Sequence[Measured]:
    return [m for m in measured if m.way.algorithm != "central"] or measured


def as_json(where: Machine, measured: Sequence[Measured], profile: sync.Profile) -> dict[str, Any]:
    """All that was measured, and the fitted links, for people and scripts."""
    return {
        "machine": {**where._asdict(), "shares_cores": where.shares_cores},
        "rows": [_row(m, sync.predict(profile, m.traffic)) for m in measured],
        "links": {
            "fast": profile.fast._asdict(),
            "slow": profile.slow._asdict(),
            "seconds_per_exchange": profile.seconds_per_exchange,
        },
        "warning": doubts(where, measured, profile),
    }


def _row(measured: Measured, predicted: float) -> dict[str, Any]:
    return {
        "algorithm": measured.way.algorithm,
        "across": measured.way.across if measured.way.algorithm == "hierarchical" else None,
        "name": measured.way.name,
        "payload_bytes": measured.payload_bytes,
        "seconds": measured.seconds,
        "bytes_per_second": measured.payload_bytes / measured.seconds,
        "wire_bytes_fast": measured.traffic.wire_bytes_fast,
        "wire_bytes_slow": measured.traffic.wire_bytes_slow,
        "predicted_seconds": predicted,
        "measured_over_predicted": measured.seconds / predicted,
    }


def table(result: dict[str, Any], where: Machine) -> Iterator[Any]:
    """What is shown of the result of ``as_json``."""
    yield where.describe()
    rows = Table()
    for heading in ("size", "exchange", "time", "MiB/s", "sent fast", "sent slow", "measured / predicted"):
        rows.add_column(heading, justify="left" if heading == "exchange" else "right", no_wrap=True)
    last = None
    for row in result["rows"]:
        if last not in (None, row["payload_bytes"]):
            rows.add_section()
        last = row["payload_bytes"]
        rows.add_row(
            number_of_bytes(row["payload_bytes"]),
            row["name"],
            short_time(row["seconds"]),
            f"{row['bytes_per_second'] / 2**20:,.1f}",
            number_of_bytes(row["wire_bytes_fast"]),
            number_of_bytes(row["wire_bytes_slow"]),
            f"{row['measured_over_predicted']:.2f}",
        )
    yield rows
    links = result["links"]
    yield f"each exchange {short_time(links['seconds_per_exchange'])}, and besides"
    for name in ("fast", "slow"):
        message, byte = links[name]["seconds_per_message"], links[name]["seconds_per_byte"]
        rate = f"{1 / byte / 2**20:,.1f} MiB/s" if byte else "no limit seen"
        yield f"{name} link: {short_time(message)} a message, {rate}"
    if result["warning"]:
        yield f"warning: {result['warning']}"
