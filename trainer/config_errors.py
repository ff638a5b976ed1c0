"""What is wrong with some settings, in plain words: one line for each key, with the nearest key that exists.

pydantic says where a value fails; what *would* be allowed there is read from the JSON schema, so that every
message has the same form: ``key = given: what is allowed (where it was set)``.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from trainer.config import Config

KeyPath = tuple[str | int, ...]
"""Where a value stands: names of tables and keys, and positions in arrays."""

_FORMATS = {
    "import-path": "an import path 'package.module:Name'",
    "run-name": "a name of at most 200 letters, digits, '.', '_' and '-' that does not begin with '.'",
}
_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "batch": "data.global_batch",
    "batch_size": "data.global_batch",
    "wd": "optimizer.weight_decay",
    "grad_clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "epochs": "run.num_steps",
}
"""What other trainers call a setting, where the names have too little in common for the nearest to be found."""


def explain(error: ValidationError, tree: Mapping[str, Any], origin: Callable[[KeyPath], str]) -> list[str]:
    """One line for each problem in ``error``.

    tree:   the settings that were refused.
    origin: says in words where the value at a path was set.
    """
    lines: dict[str, None] = {}
    for item in error.errors(include_url=False):
        path, kind = item["loc"], item["type"]
        if kind == "extra_forbidden":
            found = list(_unknown(path, tree, origin))
        elif kind == "missing":
            found = [(key, f"missing; needed is {describe(_node(key)[0])}") for key in _required(path)]
        elif kind == "value_error":
            found = list(_own_words(path, str(item.get("ctx", {})["error"])))
        else:
            found = [_not_allowed(path, tree, finite=kind == "finite_number")]
        lines.update(dict.fromkeys(f"{_assignment(key, tree)}: {words} ({origin(key)})" for key, words in found))
    return list(lines)


def dotted(path: KeyPath) -> str:
    """
    >>> dotted(("debug", "faults", 0, "rank"))
    'debug.faults[0].rank'
    """
    parts = [f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in path]
    return "".join(parts).removeprefix(".")


def shown(value: Any) -> str:
    """A value as TOML writes it, on one line and cut short; None is 'nothing'.

    >>> shown({"rate": 0.1, "names": ("a", "b"), "on": True})
    '{ rate = 0.1, names = ["a", "b"], on = true }'
    """
    text = _toml(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def leaves(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is no table, or an empty table, with its path."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def describe(node: Mapping[str, Any]) -> str:
    """What a node of the JSON schema allows, in words.

    >>> describe({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]})
    'a whole number >= 1, or "auto"'
    """
    node = _resolve(node)
    if "anyOf" in node:
        return ", or ".join(describe(choice) for choice in node["anyOf"])
    if options := _options(node):
        return ("one of " if len(options) > 1 else "") + ", ".join(shown(option) for option in options)
    match node.get("type"):
        case "integer":
            return "a whole number" + _bounds(node)
        case "number":
            return "a number" + _bounds(node)
        case "string":
            return _FORMATS.get(node.get("format", ""), "a text")
        case "boolean":
            return "true or false"
        case "array":
            return f"a list, each entry {describe(node['items'])}"
    return "a table"


def not_a_value(key: str, value: str) -> str:
    """What to tell someone whose ``--set key=value`` is no TOML: how to write what was probably meant."""
    bare = value.strip()
    if bare.lower() in ("true", "false"):
        return f"TOML writes {bare.lower()}"
    try:
        return f"TOML writes this number as {float(bare)!r}"
    except ValueError:
        pass
    if re.fullmatch(r"[^\"'\n\\\[\]{}]*", bare):
        return f"{bare!r} is not a TOML value; a text needs quotes that survive the shell: --set {key}='\"{bare}\"'"
    return f'{bare!r} is not a TOML value; allowed are "texts", numbers, true, false, [lists] and {{ tables = 1 }}'


@cache
def known_keys() -> tuple[KeyPath, ...]:
    """Every table and key there is to set; position 0 stands for any entry of an array."""

    def below(node: Mapping[str, Any], above: KeyPath) -> Iterator[KeyPath]:
        node = _resolve(node)
        for key, child in node.get("properties", {}).items():
            yield (*above, key)
            yield from below(child, (*above, key))
        if "items" in node:
            yield from below(node["items"], (*above, 0))

    return tuple(below(_schema(), ()))


def nearest(path: KeyPath) -> str:
    """Advice for an unknown key: the known ones most like it, wherever they stand, or else what its table has."""
    unknown = tuple(0 if isinstance(part, int) else part for part in path)
    scores = {key: _likeness(unknown, key) for key in known_keys() if isinstance(key[-1], str)}
    best = max(scores.values())
    # A sibling is named with the position at which the unknown key stands, not with 0.
    names = [
        dotted((*path[:-1], key[-1]) if key[:-1] == unknown[:-1] else key)
        for key, score in scores.items()
        if score == best
    ]
    if best == 0:
        other = _OTHER_NAMES.get(str(path[-1]))
        names = [other] if other else []
    if names:
        return f"did you mean {' or '.join(names)}?"
    node, depth = _node(path)
    table = f"[{dotted(path[:depth])}] has" if depth else "the tables are"
    return f"{table} {', '.join(node.get('properties', {}))}"


def _likeness(unknown: KeyPath, known: KeyPath) -> float:
    """0 for keys that have little in common; a like name counts for more than a like table."""
    name = _ratio(str(unknown[-1]), str(known[-1]))
    return 2 * name + _ratio(dotted(unknown[:-1]), dotted(known[:-1])) if name >= 0.6 else 0.0


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _unknown(path: KeyPath, tree: Mapping[str, Any], origin: Callable[[KeyPath], str]) -> Iterator[tuple[KeyPath, str]]:
    """An unknown key; an unknown table is one problem for each place that sets it, or names the one key set there."""
    value = _value(path, tree)
    inside = [key for key, _ in leaves(value, path)] if isinstance(value, Mapping) and value else [path]
    places: dict[str, list[KeyPath]] = {}
    for key in inside:
        places.setdefault(origin(key), []).append(key)
    for keys in places.values():
        key = keys[0] if len(keys) == 1 else path
        yield key, f"unknown {'key' if len(keys) == 1 else 'table'}; {nearest(key)}"


def _required(path: KeyPath) -> list[KeyPath]:
    """The keys that are needed where the key or table at ``path`` is missing."""
    return [(*path, key) for key in _node(path)[0].get("required", [])] or [path]


def _own_words(path: KeyPath, words: str) -> Iterator[tuple[KeyPath, str]]:
    """The lines 'key: message' of a check in config.py, each for a key of the table at ``path``."""
    for line in words.splitlines():
        key, _, message = line.partition(": ")
        below = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key)]
        yield (*path, *below), message


def _not_allowed(path: KeyPath, tree: Mapping[str, Any], finite: bool) -> tuple[KeyPath, str]:
    """A value of the wrong type or out of range. pydantic's path may go on into the choices of a union: that is cut."""
    node, depth = _node(path)
    words = f"allowed is {describe(node)}" + (", and finite" if finite else "")
    given = _value(path[:depth], tree)
    close = difflib.get_close_matches(given, _options(node), n=1) if isinstance(given, str) else []
    return path[:depth], words + (f"; did you mean {shown(close[0])}?" if close else "")


def _node(path: KeyPath) -> tuple[Mapping[str, Any], int]:
    """The schema's node for the longest known beginning of ``path``, and how long that is."""
    node = _schema()
    for depth, part in enumerate(path):
        inner = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        if inner is None:
            return node, depth
        node = _resolve(inner)
    return node, len(path)


@cache
def _schema() -> Mapping[str, Any]:
    return Config.model_json_schema()


def _resolve(node: Mapping[str, Any]) -> Mapping[str, Any]:
    return _schema()["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _options(node: Mapping[str, Any]) -> list[str]:
    inner = [option for choice in node.get("anyOf", []) for option in _options(choice)]
    return [*node.get("enum", []), *([node["const"]] if "const" in node else []), *inner]


def _bounds(node: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {node[name]}" for name, sign in signs.items() if name in node]
    return " " + " and ".join(limits) if limits else ""


def _value(path: KeyPath, tree: Any) -> Any:
    """The value at ``path``; raises LookupError if nothing was given there."""
    for part in path:
        if isinstance(tree, Mapping) or (isinstance(tree, list | tuple) and isinstance(part, int)):
            tree = tree[part]  # pyright: ignore[reportArgumentType, reportCallIssue]
        else:
            raise LookupError(part)
    return tree


def _assignment(path: KeyPath, tree: Mapping[str, Any]) -> str:
    try:
        return f"{dotted(path)} = {shown(_value(path, tree))}"
    except LookupError:
        return dotted(path)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _toml(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return str(value)
