"""What the settings may ask of a codec."""

from typing import Any

from trainer.errors import SettingsRefused

BLOCK_SIZES = (8, 1 << 20)
"""The smallest and the largest block: below it the scales cost more than the codes save."""


def block_size_of(given: int) -> int:
    """The block size, if it is allowed; refused otherwise."""
    low, high = BLOCK_SIZES
    return _checked("block_size", given, low <= given <= high, f"from {low} to {high}")


def ratio_of(given: float) -> float:
    """The fraction of a value's elements to send, if it is allowed; refused otherwise."""
    return _checked("ratio", given, 0 < given <= 1, "above 0 and at most 1")


def rank_of(given: int) -> int:
    """The rank, if it is allowed; refused otherwise."""
    return _checked("rank", given, given >= 1, "1 or more")


def rounding_of(given: str) -> str:
    """The way to round, if it is known; refused otherwise."""
    return _checked("rounding", given, given in ("nearest", "stochastic"), "'nearest' or 'stochastic'")


def _checked(name: str, given: Any, is_allowed: bool, allowed: str) -> Any:
    if not is_allowed:
        raise SettingsRefused(f"sync.args.{name} = {given!r}: must be {allowed}")
    return given
