"""Things named in the settings by import path, and called with keywords from the settings.

``load`` turns ``"package.module:Name"`` into the object; ``call`` calls it with a table such as ``[data.args]``.
Whatever the user got wrong becomes one line that names the setting. What goes wrong *inside* the called code is not
touched: that traceback is what its author needs.
"""

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_json

from trainer.errors import SettingsRefused

T = TypeVar("T")

_OURS = Path(__file__).resolve().parents[1]
"""The directory that holds Lockstep's own packages."""

_OUR_PACKAGES = ("trainer", "models", "configs")


def load(path: str, what: str) -> Any:
    """Returns the object named by ``path``, ``"package.module:Name"``.

    The current directory is searched first, as ``python -m`` does it and the console command by itself does not.

    what: the setting that gave the path, for the messages, such as ``task.target``.

    Raises SettingsRefused: not of that form; no such module; no such name in it; or importing it raised an exception.

    >>> load("math:sqrt", "task.target")(9.0)
    3.0
    """
    given = f"{what} = {path!r}"
    module_name, colon, name = path.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise SettingsRefused(f"{given}: an import path looks like 'package.module:Name'")
    module = _import(module_name, given)
    try:
        return getattr(module, name)
    except AttributeError as error:
        names = [known for known in vars(module) if not known.startswith("_")]
        raise SettingsRefused(
            f"{given}: {_where(module)} has no {name!r}{nearest(name, names)}{_shadowing(module_name)}"
        ) from error


def call(function: Callable[..., T], what: str, args: Mapping[str, Any], **own: Any) -> T:
    """Returns ``function(**own, **args)``, after a check of ``args`` against its signature.

    what: the table that gave the arguments, for the messages, such as ``data.args``.
    args: read from TOML. Where a parameter is annotated with a type that pydantic knows, the value must be of that type
          as strictly as the settings themselves are; an array is accepted for a tuple, and a string for a path.
    own:  keywords that the caller adds; they can't be given in ``args``.

    Raises SettingsRefused: an unknown, missing or ill-typed keyword, or a function that does not accept ``own``.

    >>> call(dict, "task.args", {"a": 1}, b=2)
    {'b': 2, 'a': 1}
    """
    title = getattr(function, "__name__", repr(function))
    try:
        parameters = _parameters(function)
    except ValueError:  # Some functions written in C don't tell.
        return function(**own, **args)
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if missing := [name for name in own if name not in named and not is_open]:
        raise SettingsRefused(f"{title} must accept the keyword {missing[0]!r}, which Lockstep gives it beside {what}")
    allowed = [name for name in named if name not in own]
    for name in args:
        if name in own or not (is_open or name in named):
            known = f"it accepts {', '.join(allowed) or 'none'}"
            raise SettingsRefused(f"{what}.{name}: {title} accepts no such keyword{nearest(name, allowed)}; {known}")
    if missing := sorted(required - set(own) - set(args)):
        raise SettingsRefused(f"{what}: {title} needs {', '.join(missing)}")
    return function(**own, **_typed(function, what, args))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the known name most like ``name``, or ``""`` if none is.

    >>> nearest("digit", ["digits", "text"])
    "; did you mean 'digits'?"
    """
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a call takes. A class is asked through its ``__init__``, for a metaclass may hide it behind **kwargs."""
    if isinstance(function, type) and inspect.isfunction(function.__init__):
        return list(inspect.signature(function.__init__).parameters.values())[1:]
    return list(inspect.signature(function).parameters.values())


def _typed(function: Callable[..., Any], what: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as their annotations want them; those that pydantic can't judge are passed on as they are."""
    try:
        hints = get_type_hints(function.__init__ if isinstance(function, type) else function, include_extras=True)
    except (NameError, TypeError):  # Annotations that can't be evaluated here say nothing.
        hints = {}
    typed = dict(args)
    for name in args.keys() & hints.keys():
        try:
            text = to_json(args[name], inf_nan_mode="constants")
            typed[name] = TypeAdapter(hints[name]).validate_json(text, strict=True)
        except ValidationError as error:
            problems = "; ".join(dict.fromkeys(problem["msg"] for problem in error.errors()))
            raise SettingsRefused(f"{what}.{name} = {args[name]!r}: {problems}") from error
        except (PydanticUserError, PydanticSerializationError):
            continue
    return typed


def _import(module_name: str, given: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise SettingsRefused(f"{given}: {_raised(module_name, error)}") from error
        raise SettingsRefused(f"{given}: {_not_found(error.name)}{_shadowing(module_name)}") from error
    except Exception as error:
        raise SettingsRefused(f"{given}: {_raised(module_name, error)}{_shadowing(module_name)}") from error


def _not_found(module_name: str) -> str:
    """Says that a module is missing, and where it was looked for."""
    parent_name, _, name = module_name.rpartition(".")
    if not parent_name:
        known = [found.name for found in pkgutil.iter_modules([os.getcwd()])]
        there = f"the current directory {os.getcwd()} or among the installed packages"
        return f"there is no module {name!r} in {there}{nearest(name, [*known, *_OUR_PACKAGES])}"
    parent = sys.modules.get(parent_name)
    if parent is None:
        return f"there is no module {module_name!r}"
    known = [found.name for found in pkgutil.iter_modules(getattr(parent, "__path__", []))]
    return f"{_where(parent)} has no module {name!r}{nearest(name, known)}"


def _raised(module_name: str, error: Exception) -> str:
    """Says what importing a module raised, and at which line."""
    if isinstance(error, SyntaxError):
        file, line, text = error.filename, error.lineno, error.msg
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        file, line, text = frames[-1].filename, frames[-1].lineno, str(error)
    summary = " ".join(text.split())
    return f"importing {module_name!r} raised {type(error).__name__}: {summary} ({file}, line {line})"


def _places(module: ModuleType) -> list[Path]:
    """Where a module lies: its file, or its directory; several for a namespace package; none if it is built in."""
    places = [*getattr(module, "__path__", [])] or [getattr(module, "__file__", None)]
    return [Path(place).resolve() for place in places if place]


def _where(module: ModuleType) -> str:
    places = _places(module)
    return f"{module.__name__!r} ({places[0] if places else 'built in'})"


def _shadowing(module_name: str) -> str:
    """Explains which package was found where the user's and Lockstep's own have the same name; else ``""``."""
    root = module_name.partition(".")[0]
    module = sys.modules.get(root)
    if module is None or root not in _OUR_PACKAGES:
        return ""
    ours, yours = _OURS / root, Path.cwd() / root
    if ours not in _places(module):
        return f"; {_where(module)} shadows Lockstep's own {ours}: rename it, or start in another directory"
    yours = yours if yours.is_dir() else yours.with_suffix(".py")
    if yours.exists() and yours.resolve() != ours:
        return f"; {root!r} is Lockstep's own package {ours}, which shadows your {yours}: rename yours"
    return ""
