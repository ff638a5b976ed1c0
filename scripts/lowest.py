"""Prints constraints that hold every dependency in pyproject.toml at its lower bound: lowest.py PYPROJECT."""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path


def lowest(requirements: Iterable[str]) -> list[str]:
    """Each ``name>=version`` as ``name==version``, extras left out.

    >>> lowest(["jax[cuda13]>=0.10.2", "tomli-w >= 1.2"])
    ['jax==0.10.2', 'tomli-w==1.2']
    """
    parts = [re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*>=\s*([\d.]+)", requirement) for requirement in requirements]
    if None in parts:
        raise ValueError(f"every dependency is written as 'name>=version': {list(requirements)}")
    return [f"{part[1]}=={part[2]}" for part in parts if part]


if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    print("\n".join(lowest([*project["dependencies"], *project["optional-dependencies"]["dev"]])))
