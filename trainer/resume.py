"""What a resumed run goes on with: its own settings or others, and from where. Needs no JAX.

Without CONFIG, ``lockstep train --resume`` takes the settings that the run has written, and ``--set`` on top of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer import config_file
from trainer.checkpoint import catalog
from trainer.config import Config
from trainer.config_errors import dotted, leaves, shown
from trainer.errors import SettingsRefused
from trainer.rundir import RunDir

MOST_TOLD = 10
"""Settings that one line names."""


def own_settings(run_dir: RunDir, overrides: Sequence[str] = ()) -> Config:
    """What the run in ``run_dir`` has written, with ``overrides`` on top.

    Raises:
        SettingsRefused: it has not written any, or they lack a secret, or the overrides are refused.
        InputRefused: they cannot be read.
    """
    path = run_dir.last_config
    if not path.is_file():
        raise SettingsRefused(f"--resume: {run_dir.path} holds no run yet; give the CONFIG that is to start it")
    config_file.load_saved(path)  # a damaged file is not the fault of an override
    config = config_file.load(path, overrides)
    if lacking := [dotted(key) for key, value in leaves(config.model_dump()) if _holds(value, config_file.REDACTED)]:
        raise SettingsRefused(
            f"{path} holds no secrets, and this run needs {', '.join(lacking)}: give the CONFIG that has it"
        )
    return config


def told_changes(saved: Config, now: Config) -> str:
    """A line that names the settings that are not as the run last had them, with both values; "" if there are none."""
    changes = [f"{key} = {shown(new)} (was {shown(old)})" for key, old, new in config_file.differences(saved, now)]
    more = f", and {len(changes) - MOST_TOLD} more" if len(changes) > MOST_TOLD else ""
    return f"settings changed since the last attempt: {', '.join(changes[:MOST_TOLD])}{more}" if changes else ""


def go_back(config: Config, run_dir: RunDir, step: int) -> None:
    """Abandons the checkpoints of ``run_dir`` that are later than ``step``, and says which."""
    checkpoints = catalog.location(catalog.directory_of(config, run_dir))
    later = catalog.go_back(checkpoints, step, run_dir.id)
    print(f"going back to step {step}; abandoned: {', '.join(map(str, later)) or 'none'}", flush=True)


def starting_from(config: Config, source: str) -> Config:
    """``config`` with ``checkpoint.init_from`` as --init-from gives it, its path absolute."""
    source = source or config.checkpoint.init_from
    absolute = str(catalog.location(source)) if source else ""
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"init_from": absolute})})


def _holds(value: Any, text: str) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(item, text) for item in value.values())
    return any(_holds(item, text) for item in value) if isinstance(value, list | tuple) else value == text
