"""The command line, as people and scripts call it: real processes, exit codes, and one line for each mistake."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from trainer import __main__, metrics

SHORT = ("--set", "run.num_steps=4", "--set", "data.global_batch=48", "--set", "observe.log_every_steps=1")


def lockstep(*arguments, cwd=None):
    """Runs the command; returns the finished process, its output as text."""
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=240, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of a shipped configuration, by its name, from a directory that is not the checkout."""
    cwd = tmp_path_factory.mktemp("work")
    done = lockstep("train", "digits_mlp", *SHORT, "--set", "optimizer.ema_decay=0.5", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "digits_mlp", done


def test_train_says_what_it_does_and_leaves_a_run(finished):
    run_dir, done = finished
    for words in (
        "9,610 parameters",
        "48 global",
        "2 nodes x 4 local",
        "step 4/4",
        "evaluation on 360 examples",
        "done",
    ):
        assert words in done.stdout
    assert "\x1b" not in done.stdout
    lines = [re.sub(r"[\d.]+ (ms|s)\b", "TIME", line) for line in done.stdout.splitlines()]
    compiled = next(index for index, line in enumerate(lines) if line.startswith("compiled in TIME, "))
    assert lines[compiled + 1] == "first step, with compilation: TIME"
    assert lines[compiled + 2].startswith("step 1/4 ")
    assert not re.search("left|examples/s", lines[compiled + 2])
    assert lines.index("step 4  checkpoint saved in TIME") == lines.index("done after 4 steps") - 1
    assert [row["step"] for row in metrics.read(run_dir / "metrics.jsonl", "train")] == [1, 2, 3, 4]
    config = tomllib.loads((run_dir / "config.toml").read_text())
    assert config["mesh"]["virtual_replicas"] == 8
    verdict = json.loads((run_dir / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["exit_code"]) == ("completed", 0)
    assert (run_dir / "attempts" / "1" / "logs" / "rank-0.log").is_file()


def test_a_directory_that_holds_a_run_is_refused(finished):
    run_dir, _ = finished
    again = lockstep("train", "digits_mlp", *SHORT, "--run-dir", run_dir)
    assert again.returncode == 3
    assert "--resume" in again.stderr
    assert len(again.stderr.splitlines()) == 1


def test_resume_goes_on_and_refuses_other_settings(finished):
    run_dir, _ = finished
    other = lockstep(
        "train", "digits_mlp", *SHORT, "--run-dir", run_dir, "--resume", "--set", "optimizer.ema_decay=0.6"
    )
    assert other.returncode == 3
    assert "optimizer.ema_decay" in other.stderr
    assert [entry.name for entry in (run_dir / "attempts").iterdir()] == ["1"]
    assert (run_dir / "verdict.json").is_file()
    same = [*SHORT, "--set", "optimizer.ema_decay=0.5", "--set", "run.num_steps=6"]
    longer = lockstep("train", "digits_mlp", *same, "--run-dir", run_dir, "--resume")
    assert longer.returncode == 0, longer.stderr
    assert "resumed from step 4" in longer.stdout
    assert [row["step"] for row in metrics.read(run_dir / "metrics.jsonl", "train")] == [1, 2, 3, 4, 5, 6]


def test_resume_without_a_configuration_keeps_the_runs_own_settings(finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    before = tomllib.loads((run_dir / "config.toml").read_text())
    end = before["run"]["num_steps"] + 2
    done = lockstep("train", "--resume", "--run-dir", run_dir, "--set", f"run.num_steps={end}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = f"settings changed since the last attempt: run.num_steps = {end} (was {end - 2})\n"
    assert done.stdout.startswith(told)
    after = tomllib.loads((run_dir / "config.toml").read_text())
    assert after == before | {"run": before["run"] | {"num_steps": end}}
    forgetful = lockstep("train", "digits_mlp", *SHORT[:4], "--set", "optimizer.ema_decay=0.5", "--set",
                         f"run.num_steps={end}", "--run-dir", run_dir, "--resume")  # fmt: skip
    assert forgetful.returncode == 0, forgetful.stderr
    assert forgetful.stdout.startswith(
        "settings changed since the last attempt: observe.log_every_steps = 10 (was 1)\n"
    )


def test_hosts_go_on_alike_without_a_configuration_and_only_the_first_begins_an_attempt(
    finished, tmp_path, monkeypatch, capsys
):
    """The agents compare the settings when they meet, so each host has to read the same from the run directory."""
    run_dir, jobs = tmp_path / "run", []
    shutil.copytree(finished[0], run_dir)
    attempts = len(list((run_dir / "attempts").iterdir()))
    monkeypatch.setenv("LOCKSTEP_TOKEN", "0123456789abcdef")
    monkeypatch.setattr(__main__.agent, "run", lambda job, place: jobs.append(job) or 0)
    for host in ("1", "0"):
        arguments = ["train", "--resume", "--run-dir", str(run_dir), "--set", "run.num_steps=9", "--num-hosts", "2"]
        with pytest.raises(SystemExit) as end:
            __main__.app([*arguments, "--host-index", host, "--rendezvous", "192.0.2.1:29400"])
        assert end.value.code == 0
        os.environ["LOCKSTEP_TOKEN"] = "0123456789abcdef"  # which the command has taken out
        told = capsys.readouterr().out
        assert ("run.num_steps = 9 (was" in told) == (host == "0")
        assert len(list((run_dir / "attempts").iterdir())) == attempts + (host == "0")
    assert jobs[0].config == jobs[1].config
    assert tomllib.loads(jobs[0].config)["run"]["num_steps"] == 9


def test_status_evaluate_and_export(finished, tmp_path):
    run_dir, _ = finished
    state = json.loads(lockstep("status", run_dir).stdout)
    assert (state["name"], state["outcome"]) == ("digits_mlp", "completed")
    assert state["step"] == state["num_steps"]

    evaluated = lockstep("evaluate", run_dir)
    assert evaluated.returncode == 0, evaluated.stderr
    row = json.loads(evaluated.stdout)
    last = metrics.read(run_dir / "metrics.jsonl", "eval")[-1]
    assert {key: row[key] for key in ("step", "loss", "accuracy", "examples")} == {
        key: last[key] for key in ("step", "loss", "accuracy", "examples")
    }

    for name in ("params.safetensors", "params.npz"):
        exported = lockstep("export", run_dir, "--output", tmp_path / name)
        assert exported.returncode == 0, exported.stderr
    arrays, same = load_file(tmp_path / "params.safetensors"), np.load(tmp_path / "params.npz")
    assert sum(array.size for array in arrays.values()) == 9610
    assert set(arrays) == set(same.files)
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], same[name])


def test_checkpoints_are_listed_verified_and_gone_back_to(finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    (found,) = json.loads(lockstep("checkpoint", "list", run_dir, "--json").stdout)[-1:]
    assert (found["status"], found["metrics"].keys()) == ("good", {"loss"})
    assert found["num_bytes"] > 9610 * 4
    step = str(found["step"])
    verified = lockstep("checkpoint", "verify", run_dir)
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.splitlines()[-1].split()[:2] == [step, "good"]

    file = next((run_dir / "checkpoints" / step / "params").glob("ocdbt.process_0/d/*"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert lockstep("checkpoint", "list", run_dir).returncode == 0, "sizes are as they were"
    verified = lockstep("checkpoint", "verify", run_dir)
    assert verified.returncode == 3
    assert f"{file.name} has changed: its checksum is wrong" in verified.stdout
    back = lockstep("train", "digits_mlp", *SHORT, "--run-dir", run_dir, "--resume", "--set", "optimizer.ema_decay=0.5",
                    "--from-step", step)  # fmt: skip
    assert back.returncode == 3
    assert "its checksum is wrong" in back.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "digits_mlp", "--set", "optimizer.learning_rat=1.0"], 2, "optimizer.learning_rate"),
        (["train", "digits_mlpp"], 2, "digits_mlp"),
        (["train", "digits_mlp", "--set", "data.global_batch=3"], 2, "data.global_batch"),
        (["train", "digits_mlp", "--processes", "3"], 2, "--processes 3"),
        (["train", "digits_mlp", "--resume", "--overwrite"], 2, "--overwrite"),
        (["config", "digits_mlp", "--set", "run.seed=-1"], 2, "run.seed"),
        (["config"], 2, "CONFIG"),
        (["train"], 2, "needs a CONFIG"),
        (["train", "--overwrite", "--run-dir", "nowhere"], 2, "needs a CONFIG"),
        (["train", "--resume"], 2, "--run-dir"),
        (["train", "--resume", "--run-dir", "nowhere"], 2, "nowhere holds no run yet"),
        (["train", "digits_mlp", "--set", 'sync.profile="nowhere.json"'], 3, "nowhere.json"),
        (["bench", "sync", "--sizes", "3"], 2, "--sizes"),
        (["bench", "sync", "--sizes", ""], 2, "--sizes: '' is no size"),
        (["bench", "sync", "--algorithms", "rign"], 2, "rign"),
        (["bench", "sync", "--set", "mesh.nodes=1", "--set", "mesh.devices_per_node=1"], 2, "one replica"),
        (["bench", "sync", "--processes", "3"], 2, "--processes 3"),
        (["bench", "scaling", "digits_mlp", "--json", "nowhere/x.json"], 2, "--json nowhere/x.json"),
        (["bench", "scaling", "digits_mlp", "--seconds", "0"], 2, "--seconds 0"),
        (["bench", "codecs", "--codecs", "int9"], 2, "'int9' is none of bf16"),
        (["status", "nowhere"], 3, "nowhere"),
        (["evaluate", "nowhere"], 3, "nowhere"),
        (["export", "nowhere"], 3, "nowhere"),
        (["checkpoint", "list", "nowhere"], 3, "nowhere"),
        (["train", "digits_mlp", "--from-step", "3"], 2, "--resume"),
        (["train", "digits_mlp", "--from-step", "3", "--resume"], 3, "no checkpoint of step 3"),
    ],
)
def test_a_mistake_is_one_line_and_the_right_code(tmp_path, arguments, code, words):
    done = lockstep(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_run_directory_is_one_line(finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    shutil.rmtree(run_dir / "attempts" / "2", ignore_errors=True)  # another test's
    for damaged in ("attempts/1/verdict.json", "config.toml"):
        for text in ("[1, 2]\n[\n]", '"', "\0"):
            (run_dir / damaged).write_text(text)
            done = lockstep("status", run_dir)
            assert (done.returncode, done.stdout) == (3, ""), done.stderr
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert str(run_dir) in done.stderr


@pytest.mark.parametrize(
    ("setting", "table"),
    [
        ("data.args.path", {"data": {"source": "npz", "args": {"path": "data/mine.npz"}}}),
        ("data.args.path", {"data": {"source": "arrayrecord", "args": {"path": "data/mine.npz"}}}),
        ("sync.profile", {"sync": {"profile": "data/mine.npz"}}),
    ],
)
def test_evaluation_elsewhere_says_where_it_looked_for_a_relative_path(finished, tmp_path, setting, table):
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    config = tomllib.loads((run_dir / "config.toml").read_text())
    (run_dir / "config.toml").write_text(tomli_w.dumps(config | {key: config[key] | table[key] for key in table}))
    done = lockstep("evaluate", run_dir, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr == (
        f"lockstep: {setting} = 'data/mine.npz': there is no such file; a relative path counts from the current "
        f"directory, so {tmp_path}/data/mine.npz was looked for\n"
    )


def test_the_version_is_told_without_starting_jax():
    program = (
        "import sys\nfrom trainer.__main__ import main\nsys.argv = ['lockstep', '--version']\n"
        "try:\n    main()\nfinally:\n    print('jax' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    names = ("lockstep-trainer", "jax", "jaxlib")
    own, jax, jaxlib = map(importlib.metadata.version, names)
    assert done.stdout == f"lockstep {own}, jax {jax}, jaxlib {jaxlib}, Python {platform.python_version()}\n"
    assert done.stderr == "False\n"


def test_a_current_directory_that_is_gone_is_one_line(tmp_path):
    (tmp_path / "gone").mkdir()
    program = (
        "import os, sys\nos.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'trainer', 'train', 'digits_mlp'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "gone")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr == "lockstep: the current directory does not exist any more: change to one that does\n"


def test_a_users_own_configs_do_not_hide_the_shipped_ones(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("")
    (tmp_path / "configs.py").write_text("")
    done = lockstep("config", "digits_mlp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_training_survives_a_reader_that_goes_away_and_a_closed_output(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    for name, redirection in (("pipe", ""), ("closed", ">&-")):
        command = [sys.executable, "-m", "trainer", "train", "digits_mlp", *SHORT, "--run-dir", str(tmp_path / name)]
        shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
        done = subprocess.run(shell, stdout=writer, stderr=subprocess.PIPE, timeout=240, check=False)
        assert (done.returncode, done.stderr) == (0, b""), name
        assert (tmp_path / name / "checkpoints" / "4").is_dir()
        assert (tmp_path / name / ".lock").read_text().strip().isdecimal()
    os.close(writer)


def test_config_prints_settings_that_load_again(tmp_path):
    printed = lockstep("config", "digits_mlp", "--set", "run.seed=7")
    (tmp_path / "again.toml").write_text(printed.stdout)
    assert tomllib.loads(printed.stdout)["run"]["seed"] == 7
    assert lockstep("config", tmp_path / "again.toml").stdout == printed.stdout
    schema = json.loads(lockstep("config", "--schema").stdout)
    assert "global_batch" in json.dumps(schema)


def test_help_settings_and_lists_start_no_jax(finished):
    for arguments in (["--help"], ["config", "digits_mlp"], ["checkpoint", "list", str(finished[0])]):
        program = (
            "import sys\nfrom trainer.__main__ import main\n"
            f"sys.argv = ['lockstep', *{arguments!r}]\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
            "print('jax' in sys.modules, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr.strip().endswith("False")


def test_the_current_directory_may_hold_a_users_own_task(tmp_path):
    """A task in the user's own package, named in a config file of their own."""
    toy = (Path(__file__).parent / "toy_task.py").read_text()
    (tmp_path / "mine.py").write_text(toy)
    (tmp_path / "mine.toml").write_text(
        '[task]\ntarget = "mine:Mean"\n[data]\nsource = "digits"\nglobal_batch = 16\n'
        '[run]\nname = "mine"\nnum_steps = 2\n[optimizer]\nname = "sgd"\n'
    )
    done = lockstep("train", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "2").is_dir()


def test_an_output_that_cannot_be_written_is_said_in_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "trainer", "config", "digits_mlp"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        1,
        "lockstep: the output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize(("codec", "args"), [("powersgd", "rank=0"), ("topk", "ratio=2"), ("int8", "rank=4")])
def test_a_codecs_arguments_are_refused_before_anything_starts(codec, args):
    done = lockstep("config", "digits_mlp", "--set", f'sync.codec="{codec}"', "--set", f"sync.args.{args}")
    assert done.returncode == 2
    assert f"sync.args.{args.split('=')[0]}" in done.stderr
    assert "Traceback" not in done.stderr
