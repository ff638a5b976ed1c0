"""The alpha-beta cost model: what an exchange takes, from messages and bytes; fitted to measurements, kept as JSON.

Hockney, "The communication challenge for MPP" (1994): a message takes alpha seconds, and beta seconds for each byte.
Here each level has its own pair, rounds follow one another, and each exchange has a fixed cost besides.
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import InputRefused
from trainer.sync.accounting import LevelTraffic, Traffic

FORMAT_VERSION = 1
LONGEST_SECONDS = 3600.0
"""More than this for a message, a byte or an exchange is no measurement."""


class CostModel(NamedTuple):
    """One level's link."""

    seconds_per_message: float
    seconds_per_byte: float

    def seconds(self, level: LevelTraffic) -> float:
        """How long the level is waited for: its rounds one after another, and the bytes of its busiest link."""
        return self.seconds_per_message * level.rounds + self.seconds_per_byte * level.critical_bytes


class Profile(NamedTuple):
    """Both levels' links as they were measured, and the seconds that an exchange takes however small it is."""

    fast: CostModel
    slow: CostModel
    seconds_per_exchange: float = 0.0


class Sample(NamedTuple):
    """One measured exchange."""

    traffic: Traffic
    seconds: float


def predict(profile: Profile, traffic: Traffic) -> float:
    """The seconds that an exchange takes if nothing else goes on.

    >>> from trainer.sync.accounting import traffic
    >>> link = CostModel(seconds_per_message=1e-3, seconds_per_byte=1e-9)
    >>> counted = traffic(np.zeros(250_000, np.float32), 4, 1, algorithm="ring")
    >>> round(predict(Profile(fast=link, slow=link), counted), 6)  # 6 messages, 1.5 MB
    0.0075
    """
    return profile.seconds_per_exchange + profile.fast.seconds(traffic.fast) + profile.slow.seconds(traffic.slow)


def fit(samples: Sequence[Sample]) -> Profile:
    """The profile, with no negative number in it, whose *relative* errors on ``samples`` have the least squares.

    A level that no sample waits for gets zeros.

    Raises:
        InputRefused: a time that is not positive and finite, or no samples.
    """
    if not samples:
        raise InputRefused("a cost model cannot be fitted to no samples: measure some exchanges first")
    if bad := [sample.seconds for sample in samples if not 0 < sample.seconds < math.inf]:
        raise InputRefused(f"a cost model cannot be fitted to a sample of {bad[0]} seconds: times are positive")
    rows = np.array([_features(sample.traffic) for sample in samples])
    relative = rows / np.array([sample.seconds for sample in samples])[:, None]
    values = _non_negative_least_squares(relative)
    return Profile(CostModel(values[0], values[1]), CostModel(values[2], values[3]), values[4])


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile as JSON.

    Raises:
        InputRefused: the file cannot be written.
    """
    text = {
        "format_version": FORMAT_VERSION,
        "fast": profile.fast._asdict(),
        "slow": profile.slow._asdict(),
        "seconds_per_exchange": profile.seconds_per_exchange,
    }
    try:
        path.write_text(json.dumps(text, indent=2) + "\n")
    except OSError as error:
        raise InputRefused(f"the profile {path} cannot be written: {error.strerror}") from error


def read_profile(path: Path) -> Profile:
    """Reads what ``write_profile`` wrote. A file without ``format_version`` is taken for one of this version.

    Raises:
        InputRefused: there is no such file, or it holds something else; names the key at fault.
    """
    try:
        held = _read_json(path)
        fast, slow = (
            CostModel(_seconds(held, level, "seconds_per_message"), _seconds(held, level, "seconds_per_byte"))
            for level in ("fast", "slow")
        )
        profile = Profile(fast, slow, _seconds(held, "seconds_per_exchange"))
        if (version := held.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
            raise ValueError(f"format_version is {version!r:.40}, and this version of Lockstep reads {FORMAT_VERSION}")
    except ValueError as error:
        raise InputRefused(
            f"{path} is no profile of links: {error}; measure one by 'lockstep bench sync --profile FILE'"
        ) from error
    return profile


def _read_json(path: Path) -> Any:
    """What ``path`` holds. Only a regular file is read, since a pipe may never end."""
    if not path.is_file():
        raise ValueError("it is no regular file" if path.exists() else "there is no such file")
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("it holds no JSON") from error


def _seconds(held: Any, *keys: str) -> float:
    """The number at ``keys``, each below the one before."""
    for depth, key in enumerate(keys):
        if not isinstance(held, dict):
            raise ValueError(f"{'.'.join(keys[:depth]) or 'it'} is {held!r:.40}, not an object")
        if key not in held:
            raise ValueError(f"{'.'.join(keys[: depth + 1])} is missing")
        held = held[key]
    if isinstance(held, bool) or not isinstance(held, int | float) or not 0 <= held <= LONGEST_SECONDS:
        raise ValueError(f"{'.'.join(keys)} is {held!r:.40}, not a number from 0 to {LONGEST_SECONDS:g}")
    return float(held)


def _features(traffic: Traffic) -> list[float]:
    fast, slow = traffic.fast, traffic.slow
    return [fast.rounds, fast.critical_bytes, slow.rounds, slow.critical_bytes, 1.0]


def _non_negative_least_squares(rows: np.ndarray) -> list[float]:
    """The x >= 0 for which rows @ x is nearest to ones. With so few columns every subset of them can be tried."""
    scale = np.abs(rows).max(axis=0)
    columns = [column for column in range(rows.shape[1]) if scale[column] > 0]
    best, best_error = np.zeros(rows.shape[1]), math.inf
    for count in range(1, len(columns) + 1):
        for chosen in map(list, itertools.combinations(columns, count)):
            values = np.linalg.lstsq(rows[:, chosen] / scale[chosen], np.ones(len(rows)), rcond=None)[0]
            error = float(np.sum((rows[:, chosen] / scale[chosen] @ values - 1) ** 2))
            if values.min() >= 0 and error < best_error - 1e-12:
                best, best_error = np.zeros(rows.shape[1]), error
                best[chosen] = values / scale[chosen]
    return best.tolist()
