"""The settings that a resumed run goes on with, and what is said of those that are new."""

import pytest

from trainer import config_file
from trainer.config import Config
from trainer.errors import InputRefused, SettingsRefused
from trainer.resume import own_settings, told_changes
from trainer.rundir import REPLACED, RunDir


def settings(**tables) -> Config:
    return Config.model_validate(
        {"task": {"target": "models.mlp:MLPClassifier"}, "data": {"source": "digits", "global_batch": 8}} | tables
    )


def run_with(path, config: Config) -> RunDir:
    run_dir = RunDir(path)
    path.mkdir(exist_ok=True)
    run_dir.write_config(config_file.dump(config, redact=True))
    return run_dir


def test_a_runs_own_settings_take_overrides(tmp_path):
    config = settings(run={"seed": 7, "num_steps": 30})
    run_dir = run_with(tmp_path, config)
    assert own_settings(run_dir) == config
    assert own_settings(run_dir, ["run.num_steps=40"]).run == config.run.model_copy(update={"num_steps": 40})
    with pytest.raises(SettingsRefused, match=r"run\.num_step = 40: unknown key; did you mean run\.num_steps"):
        own_settings(run_dir, ["run.num_step=40"])


def test_a_run_whose_replacement_was_killed_still_has_its_settings(tmp_path):
    config = settings()
    run_dir = run_with(tmp_path, config)
    (tmp_path / REPLACED).mkdir()
    run_dir.config.rename(tmp_path / REPLACED / "config.toml")
    assert own_settings(run_dir) == config


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_where_no_run_is_a_configuration_is_asked_for(tmp_path, place):
    with pytest.raises(SettingsRefused, match=r"holds no run yet; give the CONFIG"):
        own_settings(RunDir(tmp_path / place))
    assert not (tmp_path / "nowhere").exists()


def test_damaged_settings_are_bad_input_and_not_a_bad_command(tmp_path):
    (tmp_path / "config.toml").write_text("[")
    with pytest.raises(InputRefused, match="holds damaged settings"):
        own_settings(RunDir(tmp_path), ["run.seed=1"])


def test_a_run_made_shorter_than_its_warmup_is_told_the_one_thing_that_helps(tmp_path):
    run_dir = run_with(tmp_path, settings(optimizer={"schedule": "cosine", "warmup_steps": 50}))
    with pytest.raises(SettingsRefused, match=r"run.num_steps = 20: set that to 50 or more; only") as refusal:
        own_settings(run_dir, ["run.num_steps=20"])
    assert "\n" not in str(refusal.value)
    assert own_settings(run_dir, ["run.num_steps=50"]).run.num_steps == 50


@pytest.mark.parametrize("args", [{"api_key": "hunter2"}, {"stores": [{"password": "hunter2"}]}])
def test_a_secret_that_the_run_directory_does_not_hold_is_asked_for(tmp_path, args):
    run_dir = run_with(tmp_path, settings(data={"source": "digits", "global_batch": 8, "args": args}))
    (name,) = args
    with pytest.raises(SettingsRefused, match=rf"holds no secrets, and this run needs data\.args\.{name}: give"):
        own_settings(run_dir)


def test_changes_are_one_bounded_line():
    saved = settings()
    assert told_changes(saved, saved) == ""
    one = settings(run={"num_steps": 5})
    assert told_changes(saved, one) == "settings changed since the last attempt: run.num_steps = 5 (was 1000)"
    keys = Config.model_fields["timeouts"].default.model_dump()
    many = settings(timeouts={name: value + 1 for name, value in keys.items()}, run={"num_steps": 5}, mesh={"nodes": 2},
                    observe={"log_every_steps": 3}, checkpoint={"keep": 9})  # fmt: skip
    line = told_changes(saved, many)
    assert line.count("(was ") == 10
    assert line.endswith(f", and {len(keys) + 4 - 10} more")
