"""Settings from TOML files and ``--set``, checked all at once; and back to TOML.

A file may start from another with ``extends = "base.toml"``: tables are merged key by key, everything else, arrays
too, is replaced. ``--set key=value`` comes last. Nothing here starts JAX.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import ValidationError

from trainer.config import Config
from trainer.config_errors import KeyPath, dotted, explain, leaves, not_a_value, shown
from trainer.errors import InputRefused, SettingsRefused

MAY_DIFFER_ON_RESUME = (
    "run.name",
    "run.num_steps",
    "run.eval_every_steps",
    "data.num_threads",
    "data.prefetch_batches",
    "optimizer.accumulate_steps",
    "optimizer.max_consecutive_skips",
    "mesh.nodes",
    "mesh.devices_per_node",
    "mesh.platform",
    "sync.profile",
    "sync.mapping",
    "timeouts.*",
    "checkpoint.*",
    "observe.*",
    "debug.*",
)
"""The settings that a resumed run may change; see ``check_resume``."""

MOST_REFUSED = 10
"""Settings that the refusal of a resume lists."""

REDACTED = "***"
"""What stands in a run directory for a password or the like."""

_SECRET = re.compile(
    r"(password|secret)$"
    r"|^(?!(.*_)?(bos|class|cls|data|eos|feature|image|input|label|mask|pad|sep|sort|source|target|text|unk|weight)_)"
    r"(.*_)?(token|key)$"
)
"""Keys, in snake case, whose texts are secrets: what ends in password or secret, and a token or key of any kind but the
ordinary ones listed, such as pad_token and label_key, which the run directory must keep."""

DEEPEST = 32
"""Most names in a key, tables and lists within each other, and files that extend one another."""


class _Layer(NamedTuple):
    """Settings from one place. ``source`` names it in messages."""

    source: str
    tree: dict[str, Any]


def load(path: str | Path, overrides: Sequence[str] = (), search: Sequence[Path] = ()) -> Config:
    """Reads, merges and checks settings.

    path:      a TOML file; '.toml' may be left out.
    overrides: 'a.b=v', with v a TOML value; applied in order.
    search:    directories of shipped configurations: where ``path`` (or an ``extends``) names no file and is a bare
               name, or one in 'configs/', it is looked for there.

    Raises SettingsRefused with one line for each problem, from every file and override.
    """
    layers: list[_Layer] = []
    problems: list[str] = []
    try:
        layers += _file_layers(_find(path, Path(), search), search, ())
    except SettingsRefused as refusal:
        problems.append(str(refusal))
    files_are_read = bool(layers)
    for text in overrides:
        try:
            layers.append(_override_layer(text))
        except SettingsRefused as refusal:
            problems.append(str(refusal))
    if files_are_read:
        try:
            config = _validated(layers)
        except SettingsRefused as refusal:
            problems.append(str(refusal))
        else:
            if not problems:
                return config
    raise SettingsRefused("\n".join(problems))


def load_saved(path: Path) -> Config:
    """The settings that a run wrote to ``path``.

    Raises:
        InputRefused: they cannot be read.
    """
    try:
        return load(path)
    except SettingsRefused as refusal:
        raise InputRefused(f"{path.parent} holds damaged settings: {str(refusal).splitlines()[0]}") from None


def dump(config: Config, redact: bool = False) -> str:
    """The whole tree as TOML, every default written out; ``load`` of it gives an equal tree.

    redact: replaces by '***' each non-empty text, at any depth, whose key is that of a secret (see _SECRET). For
            whatever is written to disk or shown to others.
    """
    return tomli_w.dumps(_plain(config, redact))


def schema() -> dict[str, Any]:
    """The JSON schema of a settings file, for editors. A file that extends another need not be complete."""
    whole = Config.model_json_schema()
    whole["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    whole["title"] = "Lockstep settings"
    whole["properties"]["extends"] = {
        "type": "string",
        "title": "Extends",
        "description": "The file to start from, relative to this one: tables are merged, all else is replaced.",
    }
    del whole["$defs"]["Optimizer"]["properties"]["clip_norm"]["default"]  # inf, which JSON cannot write
    needed: dict[str, Any] = {"required": whole.pop("required"), "properties": {}}
    for name, node in whole["properties"].items():
        node.pop("default", None)  # a table's default is nothing but those of its keys
        table = whole["$defs"].get(node.get("$ref", "").rpartition("/")[2], {})
        if "required" in table:
            needed["properties"][name] = {"required": table.pop("required")}
    return whole | {"if": {"not": {"required": ["extends"]}}, "then": needed}


def differences(saved: Config, now: Config) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ, as (key, saved, now), with None where one tree lacks the key.

    Secrets are compared redacted: a run directory does not hold them, and a new password makes no other run.
    """
    before, after = (dict(leaves(_plain(tree, redact=True))) for tree in (saved, now))
    paths = list(dict.fromkeys((*before, *after)))
    # An empty table is a value of its own, unless the other tree has keys in it: then those are the difference.
    outer = {path[:length] for path in paths for length in range(1, len(path))}
    return [
        (dotted(path), before.get(path), after.get(path))
        for path in paths
        if path not in outer and not _same(before.get(path), after.get(path))
    ]


def check_resume(saved: Config, now: Config) -> None:
    """Raises InputRefused, with a line for each of the first, if ``now`` changes what a resumed run must keep.

    Free to differ is what MAY_DIFFER_ON_RESUME lists. With another run.num_steps a decaying schedule follows the new
    length from the resumed step on. ``saved`` holds the number of virtual replicas that the run started with:
    "auto" means that number, any other is refused, and accumulate_steps follows from it.
    """
    refused = [
        f"  {key} = {shown(new)}: the run was started with {shown(old)}"
        for key, old, new in differences(saved, now)
        if not any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER_ON_RESUME)
        and not (key == "mesh.virtual_replicas" and new == "auto")
    ]
    if refused:
        raise InputRefused(
            "\n".join(
                (
                    f"a resumed run must keep the settings it was started with, and {_count_of(refused)}:",
                    *refused[:MOST_REFUSED],
                    *([f"  and {len(refused) - MOST_REFUSED} more"] if len(refused) > MOST_REFUSED else []),
                    "to go on with its own settings: --resume --run-dir RUN_DIR, without CONFIG and without these",
                    "to start a new run from its parameters alone: --init-from RUN_DIR, with another --run-dir",
                )
            )
        )


def _count_of(refused: Sequence[str]) -> str:
    return "1 differs" if len(refused) == 1 else f"{len(refused)} differ"


def continued(saved: Config, now: Config) -> Config:
    """``now``, checked by ``check_resume``, with the number of virtual replicas that the run was started with.

    Raises SettingsRefused if they cannot be shared out equally between the devices that ``now`` asks for.
    """
    check_resume(saved, now)
    virtual, devices = saved.mesh.virtual_replicas, now.mesh.num_devices
    if virtual != "auto" and devices and virtual % devices:
        fitting = {n for low in range(1, math.isqrt(virtual) + 1) if virtual % low == 0 for n in (low, virtual // low)}
        raise SettingsRefused(
            f"mesh: the run was started with virtual_replicas = {virtual}, which {devices} replicas (nodes * "
            f"devices_per_node) cannot share equally; numbers that can: {shown(sorted(fitting)).strip('[]')}"
        )
    mesh = now.mesh.model_copy(update={"virtual_replicas": virtual})
    # A run that is cut off before its first checkpoint starts again, and from the same parameters.
    init_from = now.checkpoint.init_from or saved.checkpoint.init_from
    checkpoint = now.checkpoint.model_copy(update={"init_from": init_from})
    return now.model_copy(update={"mesh": mesh, "checkpoint": checkpoint})


def _same(one: Any, other: Any) -> bool:
    """Equal, and of one type at any depth: to a task, 1, 1.0 and true may be three things."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return all(_same(one[key], other[key]) for key in one) if isinstance(one, Mapping) else True


def _validated(layers: Iterable[_Layer]) -> Config:
    tree: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    main_file = ""
    for source, layer in layers:
        tree = _merged(tree, layer)
        new = {path: source for path, _ in leaves(layer)}
        # A value that became a table is set no longer, least of all where it was before.
        outer = {path[:length] for path in new for length in range(1, len(path))}
        origins = {path: place for path, place in origins.items() if path not in outer} | new
        main_file = main_file if source.startswith("--set") else source

    def origin(path: KeyPath) -> str:
        """Where the value at ``path``, or what holds it, or the first thing it holds, was set last."""
        around = [path[:length] for length in range(len(path), 0, -1)]
        inside = [key for key in origins if key[: len(path)] == path]
        return next((origins[key] for key in (*around, *inside) if key in origins), main_file)

    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise SettingsRefused("\n".join(explain(error, tree, origin))) from None


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], top[key]) for key in top if _is_table(base.get(key)) and _is_table(top[key])}
    return {**base, **top, **both}


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _file_layers(path: Path, search: Sequence[Path], above: tuple[Path, ...]) -> list[_Layer]:
    """The file and all that it extends, the base first. ``above``: the files that led here."""
    chain = (*above, path)
    if any(os.path.realpath(path) == os.path.realpath(other) for other in above):
        raise SettingsRefused(f"{chain[0]}: files extend each other in a circle: {' -> '.join(map(str, chain))}")
    if len(chain) > DEEPEST:
        raise SettingsRefused(f"{chain[0]}: more than {DEEPEST} files extend one another")
    tree = _parsed(path)
    if _too_deep(tree):
        raise SettingsRefused(f"{path}: {_TOO_DEEP}")
    base = tree.pop("extends", None)
    if base is None:
        return [_Layer(str(path), tree)]
    if not isinstance(base, str):
        raise SettingsRefused(f"extends = {shown(base)}: allowed is the name of one file, as a text ({path})")
    return [*_file_layers(_find(base, path.parent, search, path), search, chain), _Layer(str(path), tree)]


def _find(name: str | Path, near: Path, search: Sequence[Path], wanted_by: Path | None = None) -> Path:
    """The file called ``name``, with or without '.toml', seen from the directory ``near`` or shipped in ``search``."""
    path = Path(name)
    is_bare = path.parent == Path() or path.parent == Path("configs")
    places = [near / path, *(directory / path.name for directory in search if is_bare)]
    for candidate in (Path(f"{place}{suffix}") for place in places for suffix in ("", ".toml")):
        if os.path.exists(candidate) and not os.path.isdir(candidate):
            return candidate
    asked_by = f" (extends in {wanted_by})" if wanted_by else ""
    if os.path.isdir(places[0]):
        raise SettingsRefused(f"{places[0]}: is a directory; give a TOML file{asked_by}")
    shipped = sorted({file.stem for directory in search for file in directory.glob("*.toml")})
    close = difflib.get_close_matches(path.name.removesuffix(".toml"), shipped, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    listed = f"; shipped are {', '.join(shipped)}" if shipped else ""
    raise SettingsRefused(f"{places[0]}: no such file{hint}{listed}{asked_by}")


def _parsed(path: Path) -> dict[str, Any]:
    """The file's tables; any fault of the file is one line that names it."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SettingsRefused(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsRefused(f"{path}: is not UTF-8, which TOML must be (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        words, place = re.fullmatch(r"(.*?)(?: \(at (.*)\))?", str(error), re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
        raise SettingsRefused(f"{path}{f', {place}' if place else ''}: not valid TOML: {words}") from None


def _override_layer(text: str) -> _Layer:
    """``--set a.b=v`` as a tree of its own."""
    key, equals, value = text.partition("=")
    line = " ".join(text.split()).encode(errors="backslashreplace").decode()
    source = f"--set {line}" if len(line) <= 100 else f"--set {line[:97]}..."
    if not equals:
        raise SettingsRefused(f"{source}: allowed is --set KEY=VALUE, as in --set run.num_steps=100")
    path = _key_path(key)
    if not path:
        shown_key = repr(key if len(key) <= 80 else f"{key[:77]}...")
        raise SettingsRefused(
            f"{source}: {shown_key} is not a key; allowed are names joined by dots, as in run.num_steps"
        )
    if path == ("extends",):
        raise SettingsRefused(f"{source}: only a file can extend another")
    try:
        value.encode()
        # The unpacking fails if the text holds more than one value, such as a line break and a second assignment.
        [(_, parsed)] = tomllib.loads(f"value={value}").items()
    except RecursionError:
        raise SettingsRefused(f"{source}: {_TOO_DEEP}") from None
    except ValueError:
        raise SettingsRefused(f"{source}: {not_a_value(key, value)}") from None
    for name in reversed(path):
        parsed = {name: parsed}
    if _too_deep(parsed):
        raise SettingsRefused(f"{source}: {_TOO_DEEP}")
    return _Layer(source, parsed)


_TOO_DEEP = f"allowed are at most {DEEPEST} tables and lists within each other"


def _too_deep(tree: Any) -> bool:
    level = [tree]
    for _ in range(DEEPEST + 1):
        inner = (value.values() if isinstance(value, Mapping) else value for value in level)
        level = [item for items in inner for item in items if isinstance(item, Mapping | list)]
    return bool(level)


def _key_path(key: str) -> tuple[str, ...]:
    """The names in a dotted key, or () if it is none."""
    try:
        key.encode()
        [(path, _)] = leaves(tomllib.loads(f"{key}=0"))
    except (ValueError, RecursionError):
        return ()
    return () if "\n" in key else tuple(map(str, path))


def _plain(config: Config, redact: bool) -> dict[str, Any]:
    tree = config.model_dump()
    return _redacted(tree) if redact else tree


def _redacted(tree: Mapping[str, Any]) -> dict[str, Any]:
    def clean(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _redacted(value)
        if isinstance(value, list | tuple):
            return tuple(clean(key, item) for item in value)
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|-", "_", key).lower()
        return REDACTED if isinstance(value, str) and value and _SECRET.search(snake) else value

    return {key: clean(key, value) for key, value in tree.items()}
