"""The wheel holds what it should, and everything that states a version or a dependency states the same."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import configs
import models
import trainer

CHECKOUT = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[1]))
"""Where the files are that no wheel holds; scripts/test.sh --wheel sets the variable, as its tests are a copy."""

PYPROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
SHELL_SCRIPTS = [*sorted((CHECKOUT / "scripts").rglob("*.sh")), CHECKOUT / ".ci/run", CHECKOUT / ".ci/nightly"]
SOURCED = ("environment.sh", "outcome.sh")
"""Read by other scripts, never run."""
PART_OF = {"pydantic-core": "pydantic"}  # which requires exactly one version of it
LOCKS = sorted((CHECKOUT / "scripts/locks").glob("*.txt"))


def _name(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def _version(text):
    return tuple(int(part) for part in text.split("."))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that leftovers of earlier builds cannot slip in, and without the network."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    for name in ("trainer", "models", "configs", "tests"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(source)]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (path,) = work.glob("*.whl")
    return zipfile.ZipFile(path)


def _files(root, *patterns):
    return {path.relative_to(CHECKOUT).as_posix() for pattern in patterns for path in (CHECKOUT / root).rglob(pattern)}


def test_the_wheel_holds_the_packages_and_the_configs_and_nothing_else(wheel):
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = _files("trainer", "*.py", "py.typed") | _files("models", "*.py") | _files("configs", "*.py", "*.toml")
    assert held == expected
    assert "trainer/py.typed" in held
    assert "configs/digits_vit.toml" in held


def test_the_wheel_states_license_and_command(wheel):
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert info == f"lockstep_trainer-{PROJECT['version']}.dist-info"
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "lockstep = trainer.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_one_version():
    assert importlib.metadata.version(PROJECT["name"]) == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (CHECKOUT / "CHANGELOG.md").read_text()


def test_one_lowest_python():
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert PYPROJECT["tool"]["basedpyright"]["pythonVersion"] == lowest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")


def test_every_import_is_a_declared_dependency():
    declared = {_name(requirement) for requirement in PROJECT["dependencies"]}
    providers = importlib.metadata.packages_distributions()
    missing = {}
    for package in (trainer, models, configs):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module]
                for top in {name.split(".")[0] for name in names} - {"trainer", "models", "configs"}:
                    owners = {PART_OF.get(_name(owner), _name(owner)) for owner in providers.get(top, ())}
                    if top not in sys.stdlib_module_names and not owners & declared:
                        missing[f"{path}: {top}"] = owners
    assert not missing


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_the_lock_holds_every_dependency_at_or_above_its_bound(lock):
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "names and versions only"
    held = {_name(line): line.split("==")[1] for line in lines}
    for requirement in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        assert _version(held[_name(requirement)]) >= _version(requirement.split(">=")[1]), requirement


def test_both_locks_are_there():
    assert [path.name for path in LOCKS] == ["py311.txt", "py313.txt"]


def _lowest():
    spec = importlib.util.spec_from_file_location("lowest", CHECKOUT / "scripts/lowest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.lowest


def test_lowest_turns_bounds_into_pins():
    assert _lowest()(["jax[cuda13]>=0.10.2", "tomli-w >= 1.2"]) == ["jax==0.10.2", "tomli-w==1.2"]
    assert len(_lowest()(PROJECT["dependencies"])) == len(PROJECT["dependencies"])


@pytest.mark.parametrize("requirement", ["jax", "jax==1.0", "jax>=1.0,<2", "jax>1"])
def test_lowest_refuses_what_is_no_lower_bound(requirement):
    with pytest.raises(ValueError, match="name>=version"):
        _lowest()([requirement])


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True, capture_output=True)
    if script.name not in SOURCED:
        assert os.access(script, os.X_OK), "not executable"
        assert script.read_text().startswith("#!/usr/bin/env bash\n")


@pytest.fixture
def checkout(tmp_path):
    """A checkout of the scripts alone, at a path with a space, whose environment is ready and shows its arguments."""
    root = tmp_path / "a checkout"
    shutil.copytree(CHECKOUT / "scripts", root / "scripts")
    shutil.copy(CHECKOUT / "pyproject.toml", root)
    binaries = root / ".venv/bin"
    binaries.mkdir(parents=True)
    for name, body in {"python": "exit 0", "lockstep": 'printf "[%s]\\n" "$@"'}.items():
        (binaries / name).write_text(f"#!/bin/sh\n{body}\n")
        (binaries / name).chmod(0o755)
    stamp = _bash(root, f'source "{root}/scripts/environment.sh"; wanted | sha256sum')
    (root / ".venv/ready-run").write_text(stamp)
    return root


def _bash(cwd, script, *arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_") and k != "PYTHON"} | variables
    command = ["bash", "-c", script, "bash", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout


def _train(root, cwd, *arguments):
    return _bash(cwd, f'exec bash "{root}/scripts/train.sh" "$@"', *arguments).splitlines()


def test_train_passes_its_arguments_on(checkout, tmp_path):
    assert _train(checkout, tmp_path, "my config.toml", "--set", "run.seed=1") == [
        *("[train]", "[my config.toml]", "[--set]", "[run.seed=1]")
    ]


def test_train_has_a_default_that_can_be_repeated(checkout, tmp_path):
    default = f"[{checkout}/configs/digits_vit.toml]"
    assert _train(checkout, tmp_path) == ["[train]", default, "[--run-dir]", "[runs/digits_vit]"]
    (tmp_path / "runs/digits_vit").mkdir(parents=True)
    (tmp_path / "runs/digits_vit-2").mkdir()
    repeated = ["[train]", default, "[--run-dir]", "[runs/digits_vit-3]", "[--set]", "[run.seed=1]"]
    assert _train(checkout, tmp_path, "--set", "run.seed=1") == repeated
    assert _train(checkout, tmp_path, "--resume") == ["[train]", default, "[--resume]"]
    assert _train(checkout, tmp_path, "--run-dir", "x") == ["[train]", default, "[--run-dir]", "[x]"]


def test_train_leaves_a_run_that_goes_on_its_own_settings(checkout, tmp_path):
    (tmp_path / "a run").mkdir()
    fresh = _train(checkout, tmp_path, "--resume", "--run-dir", "a run")
    assert fresh == ["[train]", f"[{checkout}/configs/digits_vit.toml]", "[--resume]", "[--run-dir]", "[a run]"]
    (tmp_path / "a run/config.toml").touch()
    for arguments in (["--resume", "--run-dir", "a run"], ["--run-dir=a run", "--resume", "--set", "run.num_steps=9"]):
        assert _train(checkout, tmp_path, *arguments) == ["[train]", *(f"[{word}]" for word in arguments)]


@pytest.mark.parametrize("change", ["pyproject.toml", "scripts/locks/py311.txt"])
def test_a_changed_dependency_renews_the_environment(checkout, change):
    ready = (
        f'source "{checkout}/scripts/environment.sh"; is_ready run "$(wanted | sha256sum)" && echo ready || echo stale'
    )
    assert _bash(checkout, ready) == "ready\n"
    with (checkout / change).open("a") as file:
        file.write("# changed\n")
    assert _bash(checkout, ready) == "stale\n"


@pytest.mark.parametrize("fit", [True, False])
def test_an_unfit_python_is_refused_with_a_message(checkout, tmp_path, fit):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nexit {0 if fit else 1}\n")
    fake.chmod(0o755)
    shown = _bash(
        tmp_path, f'source "{checkout}/scripts/environment.sh"; find_python 2>&1 || echo $?', PYTHON=str(fake)
    )
    if fit:
        assert shown == f"{fake}\n"
    else:
        assert "older than 3.11" in shown
        assert shown.endswith("\n2\n")
