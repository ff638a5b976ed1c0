"""Imports point down: one list says in which order the package may be read, and the source is held to it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import models
import trainer

LAYERS = (
    "errors",
    "import_path",
    "task",
    "task_check",
    "config",
    "config_errors",
    "config_file",
    "placement",
    "xla_flags",
    "resilience",
    "runtime",
    "mesh",
    "mapping",
    "data",
    "optimizer",
    "metrics",
    "display",
    "sync",
    "rundir",
    "state",
    "report",
    "step",
    "assembly",
    "checkpoint",
    "digest",
    "evaluation",
    "recorder",
    "story",
    "hooks",
    "loop",
    "launch",
    "observe",
    "evidence",
    "asynchronous",
    "status",
    "resume",
    "offline",
    "__init__",
    "__main__",
)
"""A module of trainer/ imports only what stands before it here, or its own subpackage."""

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec"}


class Reference(NamedTuple):
    """A dotted name that a file imports or uses, and where."""

    name: str
    line: int


def imports(tree: ast.AST, package: str) -> Iterator[Reference]:
    """Every import in ``tree``, also inside functions; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Reference(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Reference(f"{source}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from (Reference(name, node.lineno) for name in names)


def attributes(tree: ast.AST) -> Iterator[Reference]:
    """Every dotted name in ``tree``, such as ``jax.distributed.initialize``."""
    return (Reference(ast.unparse(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def strings(tree: ast.AST) -> Iterator[Reference]:
    """Every string in ``tree`` that is used for something, which a docstring is not."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield Reference(node.value, node.lineno)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def trainer_violations(tree: ast.AST, layer: str, package: str) -> Iterator[str]:
    """What a file of ``trainer/`` in ``layer`` may not import or use."""
    for name, line in imports(tree, package):
        if is_within(name, "models") or is_within(name, "configs"):
            yield f"{line}: imports {name}"
        elif is_within(name, "trainer"):
            target = [*name.split("."), "__init__"][1]
            target = target if target in LAYERS else "__init__"
            if target != layer and LAYERS.index(target) > LAYERS.index(layer):
                yield f"{line}: imports {name}, which stands above {layer}"
    if layer != "runtime":
        used = {*imports(tree, package), *attributes(tree)}
        yield from (f"{r.line}: uses {r.name}" for r in sorted(used) if is_within(r.name, "jax.distributed"))
        # Explaining a flag to the user is anybody's right; reading or setting one is not.
        yield from (f"{r.line}: uses XLA_FLAGS" for r in strings(tree) if re.match(r"XLA_FLAGS(=|$)|--xla_", r.name))


def general_violations(tree: ast.AST, source: str, package: str) -> Iterator[str]:
    """What no file may do: private JAX without saying why, and running code that was data."""
    lines = source.splitlines()
    used = {*imports(tree, package), *attributes(tree)}
    for name, line in sorted(used):
        if is_within(name, "jax._src") and "#" not in lines[line - 1]:
            yield f"{line}: private {name} without a comment that says why"
    for name, line in imports(tree, package):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{line}: imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            yield f"{node.lineno}: calls {node.func.id}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield f"{node.value.lineno}: allows pickle"


def violations(trainer_root: Path, models_root: Path) -> list[str]:
    """All that is wrong in the two packages, each as 'file:line: what'."""
    found: list[str] = []
    for root, package in ((trainer_root, "trainer"), (models_root, "models")):
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            source = path.read_text()
            tree = ast.parse(source)
            dotted = ".".join((package, *relative.parent.parts))
            wrong = list(general_violations(tree, source, dotted))
            layer = relative.parts[0].removesuffix(".py")
            if package == "models":
                wrong += [
                    f"{line}: imports {name}" for name, line in imports(tree, dotted) if is_within(name, "trainer")
                ]
            elif layer in LAYERS:
                wrong += trainer_violations(tree, layer, dotted)
            else:
                wrong.append(f"1: {layer} has no place in LAYERS")
            found += [f"{package}/{relative}:{text}" for text in wrong]
    return found


def test_imports_point_down():
    found = violations(Path(trainer.__file__).parent, Path(models.__file__).parent)
    assert not found, "\n".join(["", *found])


CLEAN = {
    "trainer/__init__.py": "from trainer.loop import train\n",
    "trainer/errors.py": '"""Says nothing about jax.distributed or XLA_FLAGS."""\nimport jax\n',
    "trainer/runtime.py": 'import jax\njax.distributed.initialize()\nFLAGS = "XLA_FLAGS"\n',
    "trainer/loop.py": "from trainer import errors, metrics\nfrom trainer.sync.codecs import base\n",
    "trainer/sync/__init__.py": "from . import codecs\nfrom trainer.sync.transform import all_reduce\n",
    "trainer/sync/transform.py": "from trainer.sync import buckets\nfrom .. import errors\n",
    "trainer/hooks.py": "message = 'XLA_FLAGS: there is no flag --xla_cpu'\n",
    "trainer/step.py": "from jax._src import core  # there is no public way\n",
    "models/mlp.py": "from models import losses\nimport numpy as np\nnp.load('x', allow_pickle=False)\nmodel.eval()\n",
}


def _tree(root, **changed):
    for name, source in (CLEAN | changed).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return violations(root / "trainer", root / "models")


def test_a_clean_tree_passes(tmp_path):
    assert _tree(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("trainer/errors.py", "import trainer.loop", "1: imports trainer.loop, which stands above errors"),
        ("trainer/errors.py", "from trainer import loop", "1: imports trainer.loop, which stands above errors"),
        ("trainer/errors.py", "def f():\n    from trainer.loop import train", "2: imports trainer.loop.train, which"),
        ("trainer/errors.py", "from . import loop", "1: imports trainer.loop, which stands above errors"),
        ("trainer/errors.py", "from .loop import train", "1: imports trainer.loop.train, which stands above errors"),
        ("trainer/errors.py", "import trainer", "1: imports trainer, which stands above errors"),
        ("trainer/loop.py", "from trainer import train", "1: imports trainer.train, which stands above loop"),
        ("trainer/loop.py", "import importlib\nimportlib.import_module('trainer.launch')", "2: imports trainer.launch"),
        ("trainer/sync/transform.py", "from trainer.state import TrainState", "1: imports trainer.state.TrainState"),
        ("trainer/sync/transform.py", "from ..state import TrainState", "1: imports trainer.state.TrainState"),
        ("trainer/loop.py", "from models.vit import ViT", "1: imports models.vit.ViT"),
        ("trainer/loop.py", "import configs", "1: imports configs"),
        ("trainer/loop.py", "import jax\njax.distributed.shutdown()", "2: uses jax.distributed"),
        ("trainer/loop.py", "from jax import distributed", "1: uses jax.distributed"),
        ("trainer/loop.py", "import os\nos.environ['XLA_FLAGS'] = ''", "2: uses XLA_FLAGS"),
        ("trainer/loop.py", "flags = f'XLA_FLAGS={1}'", "1: uses XLA_FLAGS"),
        ("trainer/loop.py", "flag = '--xla_cpu'", "1: uses XLA_FLAGS"),
        ("trainer/loop.py", "from jax._src import core", "1: private jax._src.core without a comment"),
        ("trainer/loop.py", "import jax\nx = jax._src.core", "2: private jax._src without a comment"),
        ("trainer/loop.py", "import pickle", "1: imports pickle"),
        ("trainer/loop.py", "eval('1')", "1: calls eval"),
        ("trainer/loop.py", "import numpy as np\nnp.load('x', allow_pickle=True)", "2: allows pickle"),
        ("trainer/utils.py", "", "1: utils has no place in LAYERS"),
        ("models/mlp.py", "from trainer.task import Task", "1: imports trainer.task.Task"),
        ("models/mlp.py", "from pickle import loads", "1: imports pickle.loads"),
    ],
)
def test_each_kind_of_violation_is_found(tmp_path, file, source, expected):
    found = _tree(tmp_path, **{file: source})
    assert found, "nothing found"
    assert found[0].startswith(f"{file}:{expected}")
