"""Codecs: how contributions are written on the wire, by the name that the settings give them.

Read base.py first: what a codec is. Then one file a family: cast.py, quantize.py, sign.py, sparsify.py, powersgd.py
(with matrices.py). A new codec is a function in such a file, and a row in ``CODECS``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trainer.errors import SettingsRefused
from trainer.import_path import call, nearest
from trainer.sync.codecs.base import Codec
from trainer.sync.codecs.cast import bf16, fp16
from trainer.sync.codecs.powersgd import powersgd
from trainer.sync.codecs.quantize import int4, int8
from trainer.sync.codecs.sign import sign
from trainer.sync.codecs.sparsify import randomk, topk

CODECS: Mapping[str, Callable[..., Codec]] = MappingProxyType(
    {
        "bf16": bf16,
        "fp16": fp16,
        "int8": int8,
        "int4": int4,
        "sign": sign,
        "topk": topk,
        "randomk": randomk,
        "powersgd": powersgd,
    }
)
"""Name in the settings -> factory; its keyword arguments are those of ``[sync.args]``."""


def build(name: str, args: Mapping[str, Any] | None = None) -> Codec:
    """Returns the codec of that name, made with these arguments.

    Raises SettingsRefused, naming ``sync.codec`` or ``sync.args.X``: an unknown codec or argument, or a value of
    another type or out of range.

    >>> build("topk", {"ratio": 0.05}).unit
    'part'
    """
    if name not in CODECS:
        known = ", ".join(CODECS)
        raise SettingsRefused(
            f"sync.codec = {name!r}: there is no such codec{nearest(name, CODECS)}; known are {known}"
        )
    return call(CODECS[name], "sync.args", args or {})
