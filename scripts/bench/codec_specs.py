"""Codecs as the benchmarks of them are asked for, and the settings that each means. It does not load JAX."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from trainer.errors import SettingsRefused
from trainer.evidence.options import CODECS, codec

EXACT = "exact"
"""The label of what every codec is compared with: float32, hierarchical."""

DEFAULT = CODECS


def checked(text: str) -> str:
    """A type for argparse: a codec, and behind colons its arguments in TOML, such as topk:ratio=0.05."""
    try:
        return codec(text).label
    except SettingsRefused as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sync_settings(label: str, *, error_feedback: bool = True) -> dict[str, Any]:
    """What ``label`` is in [sync]."""
    if label == EXACT:
        return {"algorithm": "hierarchical"}
    choice = codec(label)
    return {"codec": choice.name, "compress": "slow", "error_feedback": error_feedback, "args": choice.args}


def overrides(label: str, *, error_feedback: bool = True) -> Sequence[str]:
    """The same as values for ``--set``."""
    settings = sync_settings(label, error_feedback=error_feedback)
    args = settings.pop("args", {})
    pairs = {**settings, **{f"args.{name}": value for name, value in args.items()}}
    return [f"sync.{name}={json.dumps(value)}" for name, value in pairs.items()]
