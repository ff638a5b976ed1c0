"""Checks of constructor keywords: one-line ``ValueError``s that name the setting, its value and what is allowed."""

from collections.abc import Collection

import jax.numpy as jnp

COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
"""What ``compute_dtype`` may be. Parameters, logits and losses are float32 in either."""


def positive_int(name: str, value: object) -> None:
    """Refuses anything but a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r}: must be a whole number, 1 or more")


def non_negative_int(name: str, value: object) -> None:
    """Refuses anything but a whole number from 0 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} = {value!r}: must be a whole number, 0 or more")


def positive_number(name: str, value: object) -> None:
    """Refuses anything but a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} = {value!r}: must be a finite number above 0")


def fraction(name: str, value: object) -> None:
    """Refuses anything but a number in [0, 1)."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{name} = {value!r}: must be a number from 0 up to, but not including, 1")


def flag(name: str, value: object) -> None:
    """Refuses anything but true and false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: must be true or false")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Refuses what ``allowed`` does not hold."""
    if isinstance(value, bool | list) or value not in allowed:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(map(repr, allowed))}")


def divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Refuses a ``part`` of which ``whole`` is no multiple."""
    if whole % part:
        raise ValueError(f"{whole_name} = {whole} is not a multiple of {part_name} = {part}: change one of them")
