"""Import paths: the object, or one line that says what is wrong."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import models
import trainer
from trainer.errors import ExitCode, SettingsRefused
from trainer.import_path import call, load

OURS = Path(models.__path__[0])


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory; modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = dict(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(path: str) -> str:
    with pytest.raises(SettingsRefused) as refused:
        load(path, "task.target")
    assert refused.value.exit_code == ExitCode.SETTINGS_REFUSED
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"task.target = {path!r}: ")
    return str(refused.value)


def test_a_module_in_the_current_directory_is_found(project: Path) -> None:
    write(project / "mine_a" / "__init__.py")
    write(project / "mine_a" / "deep.py", "value = 7")
    assert load("mine_a.deep:value", "task.target") == 7
    assert load("trainer.errors:ExitCode", "task.target") is ExitCode


@pytest.mark.parametrize("path", ["", "a", "a.b", "a:", ":a", "a:b:c", "a/b:c", "a:b.c", ".a:b", "a..b:c", "a b:c"])
def test_what_is_no_import_path_is_refused(path: str) -> None:
    assert "an import path looks like 'package.module:Name'" in refusal(path)


def test_a_missing_module_is_named_with_the_nearest(project: Path) -> None:
    write(project / "mine_b" / "vision.py")
    write(project / "mine_b" / "__init__.py")
    told = refusal("mine_c:Net")
    assert f"no module 'mine_c' in the current directory {project}" in told
    assert "did you mean 'mine_b'?" in told
    told = refusal("mine_b.visoin:Net")
    assert f"'mine_b' ({project}/mine_b) has no module 'visoin'; did you mean 'vision'?" in told
    assert "'json.decoder' (" in refusal("json.decoder.deep:Net")


def test_a_missing_name_is_named_with_the_nearest(project: Path) -> None:
    write(project / "mine_d.py", "class Network: ...")
    assert f"'mine_d' ({project}/mine_d.py) has no 'Netwrk'; did you mean 'Network'?" in refusal("mine_d:Netwrk")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise ValueError('two\\nlines')", "raised ValueError: two lines ({file}, line 2)"),
        (
            "\n\nimport no_such_module_at_all",
            "raised ModuleNotFoundError: No module named 'no_such_module_at_all' ({file}, line 3)",
        ),
        ("from math import no_such_name", "raised ImportError: cannot import name 'no_such_name'"),
        ("x = (\n", "raised SyntaxError: '(' was never closed ({file}, line 1)"),
        ("def f():\n    return 1 / 0\nf()", "raised ZeroDivisionError: division by zero ({file}, line 2)"),
    ],
)
def test_errors_inside_the_module_are_told_with_their_line(project: Path, text: str, message: str) -> None:
    file = write(project / "mine_e.py", text)
    assert f"importing 'mine_e' {message.format(file=file)}" in refusal("mine_e:Net")


def forget(root: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == root]:
        del sys.modules[name]


def test_a_package_that_shadows_ours_is_named(project: Path) -> None:
    forget("models")
    write(project / "models" / "__init__.py")
    write(project / "models" / "mine.py", "Net = 1")
    told = refusal("models.none:Net")  # Not 'models.vit': an editable install of ours finds that in spite of it.
    assert "'models' (" in told
    assert f"{project}/models) shadows Lockstep's own {OURS}" in told
    assert load("models.mine:Net", "task.target") == 1
    assert f"shadows Lockstep's own {OURS}" in refusal("models.mine:Ned")


def test_a_module_that_shadows_ours_is_named(project: Path) -> None:
    forget("models")
    write(project / "models.py", "Net = 1")
    told = refusal("models.none:Net")
    assert f"'models' ({project}/models.py) shadows Lockstep's own {OURS}" in told


def test_a_package_that_ours_shadows_is_named(project: Path) -> None:
    write(project / "models" / "mine.py", "Net = 1")
    assert models.__name__ in sys.modules  # ours is there already
    told = refusal("models.mine:Net")
    assert f"Lockstep's own package {OURS}, which shadows your {project}/models" in told


def test_other_packages_are_not_called_ours() -> None:
    assert "Lockstep" not in refusal("json.decodr:x")
    assert "shadow" not in refusal(f"{trainer.__name__}.errors:ExitCod")


# Calling with keywords from the settings.


@dataclass(frozen=True)
class Layer:
    width: int
    activation: Literal["relu", "gelu"] = "relu"
    scale: float = 1.0
    sizes: tuple[int, ...] = ()
    start: "np.ndarray | None" = None


def free(**more: Any) -> dict[str, Any]:
    return more


def broken(width: int) -> None:
    raise TypeError(f"{width} is not what I meant")


def unknown_names(width: "NoSuchType") -> object:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    return width


def test_arguments_become_what_the_annotations_say() -> None:
    assert call(Layer, "task.args", {"width": 3, "sizes": [1, 2], "scale": 2}) == Layer(3, sizes=(1, 2), scale=2.0)
    assert call(Layer, "task.args", {"width": 3, "scale": float("inf")}).scale == float("inf")
    assert call(Layer, "task.args", {"activation": "gelu"}, width=5) == Layer(5, "gelu")
    assert call(free, "task.args", {"a": [1]}, b=2) == {"a": [1], "b": 2}
    assert call(unknown_names, "task.args", {"width": "any"}) == "any"


def test_types_that_cannot_be_judged_are_left_alone() -> None:
    assert call(Layer, "task.args", {"width": 3, "start": [1.0]}).start == [1.0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "task.args: Layer needs width"),
        ({"widht": 3}, "task.args.widht: Layer accepts no such keyword; did you mean 'width'?; it accepts width, act"),
        ({"width": 3.0}, "task.args.width = 3.0: Input should be a valid integer"),
        ({"width": True}, "task.args.width = True: Input should be a valid integer"),
        ({"width": "3"}, "task.args.width = '3': Input should be a valid integer"),
        ({"width": 3, "activation": "tanh"}, "task.args.activation = 'tanh': Input should be 'relu' or 'gelu'"),
        ({"width": 3, "sizes": [1, "2"]}, "task.args.sizes = [1, '2']: Input should be a valid integer"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsRefused) as refused:
        call(Layer, "task.args", args)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_keywords_of_ours_cannot_be_given_and_must_be_accepted() -> None:
    with pytest.raises(SettingsRefused, match=r"task\.args\.width: Layer accepts no such keyword"):
        call(Layer, "task.args", {"width": 3}, width=4)
    with pytest.raises(SettingsRefused, match="Layer must accept the keyword 'split'"):
        call(Layer, "task.args", {"width": 3}, split="train")


def test_what_goes_wrong_inside_is_not_touched() -> None:
    with pytest.raises(TypeError, match="3 is not what I meant"):
        call(broken, "task.args", {"width": 3})
