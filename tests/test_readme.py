"""README's commands run, its links lead somewhere, and its Python is that of the package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import configs

ROOT = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[1]))
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_links_lead_to_files_of_the_checkout():
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert len(targets) > 5
    for target in targets:
        assert (ROOT / target).exists(), target


def test_every_configuration_is_in_the_table():
    for path in Path(configs.__file__).parent.glob("*.toml"):
        assert f"`{path.stem}`" in README


def test_the_lockstep_commands_run_in_their_order(tmp_path):
    """All `lockstep` lines, as they stand, one after another in one directory."""
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("lockstep ")]
    assert len(commands) >= 6
    for command in commands:
        words = command.split()[1:]
        if words[0] == "train":
            words += ["--set", "observe.log_every_steps=100"]
        words = [sys.executable, "-m", "trainer", *words]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.slow
def test_the_script_commands_run(tmp_path):
    """The `scripts/train.sh` lines; the first is the default run, so this takes some minutes."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("bash scripts/train.sh")]
    assert len(commands) == 2
    for number, command in enumerate(commands):
        words = [word for word in command.split() if word not in ("--run-dir", "runs/short")]
        words += ["--run-dir", str(tmp_path / str(number))]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, (command, done.stderr)
