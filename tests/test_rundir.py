"""The run directory: who may write it, what is removed, and what is never touched."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import rundir
from trainer.errors import InputRefused, SettingsRefused
from trainer.rundir import RunDir


def make_run(path: Path) -> RunDir:
    run_dir, attempt = RunDir.open(path)
    assert attempt == 1
    run_dir.write_config("[run]\n")
    run_dir.metrics.write_text("{}\n")
    (run_dir.checkpoints / "7").mkdir(parents=True)
    return run_dir


def test_paths_are_those_that_the_design_promises(tmp_path):
    run_dir = RunDir(tmp_path)
    relative = [
        str(path.relative_to(tmp_path))
        for path in (run_dir.config, run_dir.metrics, run_dir.checkpoints, run_dir.verdict, run_dir.log(2, 3))
    ]
    assert relative == ["config.toml", "metrics.jsonl", "checkpoints", "verdict.json", "attempts/2/logs/rank-3.log"]
    assert rundir.default_run_dir("a.b") == Path("runs/a.b")


@pytest.mark.parametrize("resume", [False, True])
def test_a_missing_and_an_empty_directory_start_fresh(tmp_path, resume):
    for path in (tmp_path / "deep" / "new", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        run_dir, attempt = RunDir.open(path, resume=resume)
        assert attempt == 1
        assert run_dir.log(1, 0).parent.is_dir()


def test_a_run_is_refused_unless_resumed_or_overwritten(tmp_path):
    run_dir = make_run(tmp_path / "run")
    with pytest.raises(InputRefused, match=r"holds a run already.*--resume.*--overwrite"):
        RunDir.open(run_dir.path)
    with pytest.raises(SettingsRefused, match="exclude each other"):
        RunDir.open(run_dir.path, resume=True, overwrite=True)
    assert [RunDir.open(run_dir.path, resume=True)[1] for _ in range(10)] == [*range(2, 12)]  # 9, 10, 11: by number
    assert run_dir.metrics.exists()


def test_overwrite_removes_what_a_run_writes_and_nothing_else(tmp_path):
    run_dir = make_run(tmp_path / "run")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    for link in ("linked", "checkpoints/8"):
        (run_dir.path / link).symlink_to(outside)
    (run_dir.path / "notes.txt").write_text("mine")
    assert RunDir.open(run_dir.path, overwrite=True)[1] == 1
    run_dir.write_config("")
    assert {e.name for e in run_dir.path.iterdir()} == {"attempts", "config.toml", ".lock", "linked", "notes.txt"}
    assert (outside / "precious").exists()


def test_overwrite_removes_a_link_but_not_what_it_points_to(tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir.checkpoints / "7").rmdir()
    run_dir.checkpoints.rmdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "7").write_text("x")
    run_dir.checkpoints.symlink_to(tmp_path / "store")
    RunDir.open(run_dir.path, overwrite=True)
    run_dir.write_config("")
    assert not run_dir.checkpoints.is_symlink()
    assert (tmp_path / "store" / "7").exists()


def contents(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("killed", [False, True])
def test_a_replaced_run_comes_back_if_the_new_one_is_refused(tmp_path, killed):
    run_dir = make_run(tmp_path / "run")
    (run_dir.checkpoints / "7" / "x").write_text("old")
    run_dir.log(1, 0).write_text("old log")
    before = contents(run_dir.path)
    attempt = RunDir.open(run_dir.path, overwrite=True)[1]
    run_dir.log(attempt, 0).write_text("new log")
    run_dir.metrics.write_text("new")
    (run_dir.checkpoints / "tmp").mkdir(parents=True)
    if killed:
        assert RunDir.open(run_dir.path, resume=True)[1] == 3
    else:
        assert run_dir.restore_replaced(attempt) == 2
    assert contents(run_dir.path) == before | {"attempts/2/logs/rank-0.log": "new log"}
    assert run_dir.restore_replaced(2) == 2
    with pytest.raises(InputRefused, match="holds a run already"):
        RunDir.open(run_dir.path)


def test_a_run_is_replaced_for_good_once_the_new_one_has_its_settings(tmp_path):
    run_dir = make_run(tmp_path / "run")
    RunDir.open(run_dir.path, overwrite=True)
    run_dir.write_config("new")
    assert run_dir.restore_replaced(1) == 1
    assert contents(run_dir.path).keys() == {".lock", "config.toml"}
    assert run_dir.config.read_text() == "new"


def test_a_killed_replacement_does_not_make_the_directory_look_free(tmp_path):
    run_dir = make_run(tmp_path / "run")
    RunDir.open(run_dir.path, overwrite=True)
    with pytest.raises(InputRefused, match="holds a run already"):
        RunDir.open(run_dir.path)


def test_a_directory_in_use_is_refused_until_its_process_ends(tmp_path):
    code = (
        "import sys; from pathlib import Path; from trainer.rundir import RunDir\n"
        "RunDir.open(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for how in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(InputRefused, match=f"in use by process {holder.pid}:"):
                RunDir.open(tmp_path, **how)
        assert {entry.name for entry in tmp_path.iterdir()} == {".lock", "attempts"}
        holder.kill()
    assert RunDir.open(tmp_path)[1] == 2


def test_a_new_attempt_has_no_verdict_yet(tmp_path):
    run_dir = make_run(tmp_path / "run")
    rundir.write_json(run_dir.verdict, {})
    RunDir.open(run_dir.path, resume=True)
    assert not run_dir.verdict.exists()


@pytest.mark.parametrize("names", [["thesis.tex"], ["config.toml", "checkpoints/"], ["attempts/", "other"]])
@pytest.mark.parametrize("how", [{}, {"overwrite": True}])
def test_a_directory_that_is_no_run_is_refused_and_left_alone(tmp_path, names, how):
    for name in names:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputRefused):
        RunDir.open(tmp_path, **how)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_attempt_that_never_became_a_run_does_not_stand_in_the_way(tmp_path):
    RunDir.open(tmp_path)
    rundir.write_json(RunDir(tmp_path).verdict, {})
    assert RunDir.open(tmp_path)[1] == 2


def test_a_run_whose_logs_were_thrown_away_can_be_resumed(tmp_path):
    (tmp_path / "config.toml").write_text("")
    assert RunDir.open(tmp_path, resume=True)[1] == 1


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/no-run")):
        with pytest.raises(InputRefused, match="--run-dir"):
            RunDir.open(path)


def test_existing_refuses_what_is_no_run(tmp_path):
    with pytest.raises(InputRefused, match="not a run directory"):
        RunDir.existing(tmp_path)
    assert RunDir.existing(make_run(tmp_path / "run").path).path == tmp_path / "run"


def test_json_is_strict_and_replaced_whole(tmp_path):
    path = tmp_path / "x.json"
    rundir.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        rundir.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]
