"""What may be asked of a benchmark, checked before a worker is started. It does not load JAX."""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple, get_args

from trainer.config import AlgorithmName, CodecName
from trainer.errors import SettingsRefused

ALGORITHMS = get_args(AlgorithmName)
"""Those of the exchange, the one that is only there to be measured against last."""

DEFAULT_SIZES = tuple(4**power * 2**10 for power in range(9))
"""1 KiB to 64 MiB."""

LARGEST_SIZE = 2**30
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

LONGEST_SECONDS = 3600.0

CODECS = tuple(name for name in get_args(CodecName) if name != "none")
LARGEST_MIB = 1024


class CodecChoice(NamedTuple):
    """A codec as a benchmark is asked for it: ``label`` is the text, ``name`` and ``args`` are those of [sync]."""

    label: str
    name: str
    args: dict[str, Any]


def sizes(text: str | None) -> list[int]:
    """The sizes in bytes that ``text`` lists, in ascending order; 1 KiB to 64 MiB if it is None.

    Raises:
        SettingsRefused: something is no size, is no multiple of four bytes, or is too large.

    >>> sizes("4KiB, 1MiB,1024")
    [1024, 4096, 1048576]
    """
    return sorted({_size(word.strip()) for word in text.split(",")}) if text is not None else list(DEFAULT_SIZES)


def _size(word: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*([a-zA-Z]*)", word)
    unit = UNITS.get(match[2].upper()) if match else None
    num_bytes = int(match[1]) * unit if match and unit else 0
    if not 0 < num_bytes <= LARGEST_SIZE or num_bytes % 4:
        raise SettingsRefused(
            f"--sizes: {word!r} is no size of a float32 vector: give multiples of 4 bytes up to 1GiB, such as "
            "1KiB,64KiB,4MiB"
        )
    return num_bytes


def algorithms(text: str | None) -> list[str]:
    """The algorithms that ``text`` lists, in our order; all if it is None.

    Raises:
        SettingsRefused: one is none of ours.

    >>> algorithms("ring,xla")
    ['xla', 'ring']
    """
    wanted = {word.strip() for word in text.split(",")} if text is not None else set(ALGORITHMS)
    if unknown := sorted(wanted - set(ALGORITHMS)):
        raise SettingsRefused(f"--algorithms: {unknown[0]!r} is none of {', '.join(ALGORITHMS)}")
    return [name for name in ALGORITHMS if name in wanted]


def codecs(text: str | None) -> list[str]:
    """The codecs that ``text`` lists, as ``codec`` reads them; all with their defaults if it is None.

    Raises:
        SettingsRefused: one is none of ours, or stands there twice.

    >>> codecs("int8, topk:ratio=0.05")
    ['int8', 'topk:ratio=0.05']
    """
    labels = [codec(word.strip()).label for word in text.split(",")] if text is not None else list(CODECS)
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise SettingsRefused(f"--codecs: {twice!r} stands there twice")
    return labels


def codec(word: str) -> CodecChoice:
    """Reads a codec, and behind colons arguments of it in TOML; whether it takes them is left to it.

    Raises:
        SettingsRefused: it is none of ours, or an argument is none.

    >>> codec("int4:block_size=64:rounding='stochastic'").args
    {'block_size': 64, 'rounding': 'stochastic'}
    """
    name, *given = word.split(":")
    if name not in CODECS:
        raise SettingsRefused(f"--codecs: {name!r} is none of {', '.join(CODECS)}")
    args: dict[str, Any] = {}
    for pair in given:
        if not (argument := _toml(pair)):
            raise SettingsRefused(
                f"--codecs: {pair!r} in {word!r} is no argument in TOML: write it as in topk:ratio=0.05"
            )
        args |= argument
    return CodecChoice(word, name, args)


def _toml(text: str) -> dict[str, Any]:
    """What ``text`` says in TOML; nothing if it is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def mib(value: float) -> float:
    """``value``, if that is a size in MiB to measure with.

    Raises:
        SettingsRefused: it is not.
    """
    return _above_zero("--mib", "size", value, LARGEST_MIB)


def seconds(value: float) -> float:
    """``value``, if that is a time to measure for.

    Raises:
        SettingsRefused: it is not.
    """
    return _above_zero("--seconds", "time", value, LONGEST_SECONDS)


def _above_zero(option: str, what: str, value: float, most: float) -> float:
    if not 0 < value <= most:
        raise SettingsRefused(f"{option} {value:g}: give a {what} above 0, and at most {most:g}")
    return value


def output(option: str, path: str, *, or_stdout: bool = False) -> str:
    """An absolute path for a file that will be written; '' stays, and so does '-' where that may mean standard output.

    Raises:
        SettingsRefused: there is no directory for it.
    """
    if path == "" or (path == "-" and or_stdout):
        return path
    if path == "-":
        raise SettingsRefused(f"{option} -: standard output is for --json; name a file")
    target = Path(path).absolute()
    if not target.parent.is_dir() or target.is_dir():
        problem = "is a directory" if target.is_dir() else f"there is no directory {target.parent}"
        raise SettingsRefused(f"{option} {path}: {problem}; name a file in a directory that exists")
    return str(target)
