"""Agents and workers, as real processes: what comes out, who is blamed, and that nothing stays behind."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trainer.checkpoint import manifest
from trainer.config import Checkpoint, Config
from trainer.errors import ExitCode
from trainer.launch import agent, processes, signals, worker
from trainer.launch.abort import describe_exit, explain_abort
from trainer.launch.signals import HEEDED
from trainer.launch.spec import Event, Job, WorkerSpec, parse, send
from trainer.launch.verdict import Failure, judge, newest_checkpoint
from trainer.placement import Placement
from trainer.resilience.policy import RankView, Stuck
from trainer.resilience.preemption import Ask
from trainer.resilience.progress import Marks
from trainer.rundir import RunDir

HERE = Path(__file__).parent / "multiprocess"
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv("LOCKSTEP_COMPILATION_CACHE", "off")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    yield
    while STARTED:  # an agent that a failed test left behind, and with it its workers
        process = STARTED.pop()
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def make_job(path: Path, entry: str, processes: int, nodes: int = 2, per_node: int = 2, name: str = "x") -> Job:
    """A job in ``path``/run with emulated devices, calling ``worker_entries.<entry>``."""
    run_dir, attempt = RunDir.open(path / "run", resume=True)
    settings = f"""
        run.name = "{name}"
        task.target = "a:B"
        data = {{ source = "digits", global_batch = 8 }}
        mesh = {{ nodes = {nodes}, devices_per_node = {per_node}, platform = "cpu" }}
        """
    run_dir.write_config(settings)
    return Job(settings, str(run_dir.path), attempt, processes, entry=f"worker_entries:{entry}")


def start_agent(job: Job, **options) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "run_agent.py"), json.dumps(asdict(job))]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    STARTED.append(subprocess.Popen(command, text=True, **streams))
    return STARTED[-1]


def read_json(path: Path):
    return json.loads(path.read_text())


def wait_until(condition, seconds: float, every: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(every)


def worker_pids(run_dir: Path, count: int) -> list[int]:
    def pids() -> list[int]:
        return [int(text) for p in run_dir.glob("pid-*") if (text := p.read_text())]

    wait_until(lambda: len(pids()) == count, 120)
    return pids()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie whose parent was killed waits for init, which some containers lack


def check_agreement(job: Job, devices: int) -> list[dict]:
    results = [read_json(Path(job.run_dir) / f"agreed-{rank}.json") for rank in range(job.num_processes)]
    share = devices // job.num_processes
    for rank, result in enumerate(results):
        assert (result["devices"], result["local_devices"]) == (devices, share)
        assert result["processes"] == job.num_processes
        assert result["total"] == share * sum(range(1, job.num_processes + 1))
        assert result["told"] == [{"rank": r, "text": "ä" * 10**r, "pair": [1, None]} for r in range(job.num_processes)]
        assert result["has_console"] == (rank == 0)
        assert f"a line in the log of rank {rank}" in RunDir(Path(job.run_dir)).log(job.attempt, rank).read_text()
    return results


def test_one_worker_and_its_second_attempt_on_a_terminal(tmp_path, capfd):
    job = make_job(tmp_path, "agree", 1)
    assert agent.run(job) == 0
    assert check_agreement(job, devices=4)[0]["attempt"] == job.attempt == 1
    assert capfd.readouterr() == ("a line on the display, terminal: False\n", "")

    job = make_job(tmp_path, "agree", 1)
    ours, theirs = pty.openpty()
    process = start_agent(job, stdout=theirs)
    assert process.wait(240) == 0
    assert os.read(ours, 1000).decode().splitlines() == ["a line on the display, terminal: True"]
    assert check_agreement(job, devices=4)[0]["attempt"] == job.attempt == 2
    os.close(ours)
    os.close(theirs)

    run_dir = RunDir(Path(job.run_dir))
    verdict = read_json(run_dir.verdict)
    assert verdict == read_json(run_dir.attempt_dir(2) / "verdict.json")
    assert (verdict["outcome"], verdict["attempt"], verdict["culprits"]) == ("completed", 2, [])
    assert run_dir.log(1, 0).exists()


def test_several_agents_at_once_whatever_the_proxies(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=77 --xla_cpu_enable_fast_math=false")
    jobs = [make_job(tmp_path / str(i), "agree", processes) for i, processes in enumerate((2, 2, 4))]
    agents = [start_agent(job) for job in jobs]
    for job, process in zip(jobs, agents, strict=True):
        assert process.communicate(timeout=240) == ("a line on the display, terminal: False\n", "")
        assert process.returncode == 0
        for result in check_agreement(job, devices=4):
            assert result["xla_flags"].startswith(os.environ["XLA_FLAGS"] + " --xla_cpu_collective_call_")
            assert result["xla_flags"].count("xla_cpu_collective_timeout_seconds") == 1
            assert result["proxy"] == "http://127.0.0.1:9"


FAILURES = {  # kind: (exit code, what stderr begins with, how many lines it has at most)
    "settings": (2, "lockstep: data.global_batch = 7 does not fit\n", 1),
    "input": (3, "lockstep: no such data\n", 1),
    "halt": (4, "lockstep: loss is nan\nlockstep: at rank 1, step 3\n", 2),
    "bug": (1, "", 23),
    "memory": (1, "lockstep: a device ran out of memory: lower data.global_batch", 1),
    "kill": (6, "", 23),
}


def test_the_first_failure_ends_all_and_is_told_once(tmp_path):
    jobs = {kind: make_job(tmp_path / kind, "fail", 2, nodes=1, name=kind) for kind in FAILURES}
    agents = {kind: start_agent(job) for kind, job in jobs.items()}
    for kind, (code, begins, num_lines) in FAILURES.items():
        output, errors = agents[kind].communicate(timeout=240)
        assert (kind, agents[kind].returncode, output) == (kind, code, ""), errors
        assert errors.startswith(begins), kind
        assert errors.count("\n") <= num_lines, errors
        verdict = read_json(RunDir(Path(jobs[kind].run_dir)).verdict)
        assert verdict["exit_code"] == code
        assert verdict["outcome"] == ExitCode(code).name.lower()
        assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], kind
        for line in verdict["message"].splitlines():
            assert errors.count(f"lockstep: {line}\n") == 1
        assert not any(alive(pid) for pid in worker_pids(Path(jobs[kind].run_dir), 2)), kind
        if kind == "bug":
            assert "RuntimeError: a bug in the model" in errors
            assert "Traceback" in errors
            assert str(RunDir(Path(jobs[kind].run_dir)).log(1, 1)) in errors
        if kind == "kill":
            assert f"lockstep: rank 1 (host {socket.gethostname()}) was killed by SIGKILL" in errors


def test_nothing_stays_behind(tmp_path):
    jobs = [make_job(tmp_path / str(i), "sleep", 2) for i in range(4)]
    agents = [start_agent(job) for job in jobs]
    pids = [worker_pids(Path(job.run_dir), 2) for job in jobs]
    for stopped in (pids[1][1], pids[3][1]):
        os.kill(stopped, signal.SIGSTOP)  # it reacts to nothing any more but SIGKILL
    os.kill(pids[3][0], signal.SIGKILL)
    agents[2].send_signal(signal.SIGINT)
    for killed in agents[:2]:
        killed.kill()
        killed.communicate(timeout=60)

    wait_until(lambda: not any(alive(pid) for group in pids[:3] for pid in group), 60)
    ended = "ended by SIGINT to the agent: no step had been taken; there is no checkpoint"
    assert f"lockstep: {ended}" in agents[2].communicate(timeout=60)[1]
    assert agents[2].returncode == ExitCode.PREEMPTED
    verdict = read_json(RunDir(Path(jobs[2].run_dir)).verdict)
    assert (verdict["message"], verdict["culprits"], verdict["next"]) == (ended, [], "start it again with --resume")
    assert "was killed by SIGKILL" in agents[3].communicate(timeout=60)[1]
    assert agents[3].returncode == ExitCode.DIED
    assert not any(alive(pid) for pid in pids[3])


@pytest.mark.slow
def test_limits_are_for_training_alone(tmp_path):
    job = make_job(tmp_path, "outlive", 1)
    limited = replace(job, config=job.config + "\ntimeouts.init_seconds = 15.0\n")
    start = time.monotonic()
    assert agent.run(limited) == 0
    assert time.monotonic() - start > 30


@pytest.mark.parametrize("file", ["pipe", "/dev/full"])
def test_a_display_that_nobody_reads_goes_quiet(file):
    if file == "pipe":
        reader, fd = os.pipe()
        os.close(reader)
    else:
        fd = os.open(file, os.O_WRONLY)
    console = worker.open_console(fd)
    assert console is not None
    for _ in range(3):
        console.print("x\n" * 10_000, highlight=False)
    console.file.close()


def python_worker(path: Path, code: str) -> processes.Worker:
    """A worker that is gone already, having run ``code`` and said nothing."""
    reader, writer = os.pipe()
    os.close(writer)
    os.set_blocking(reader, False)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    process.wait()
    return processes.Worker(0, process, reader, path / "log")


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(0)", 1), ("raise SystemExit(3)", 1), ("import os; os.abort()", 6)]
)
def test_who_ends_by_itself_without_a_word_is_at_fault(tmp_path, code, exit_code):
    gone = python_worker(tmp_path, code)
    processes.reap(gone)
    os.close(gone.report_fd)
    gone.block.close()
    assert gone.failure is not None
    assert gone.failure.exit_code == exit_code


def test_a_run_directory_removed_in_mid_run_does_not_hide_the_verdict(tmp_path, capfd):
    job = make_job(tmp_path, "vanish", 1)
    assert agent.run(job) == ExitCode.HALTED
    assert capfd.readouterr().err == "lockstep: the directory is gone\n"


def test_the_verdict_names_a_checkpoint_in_an_object_store_by_the_workers_word(tmp_path):
    job = make_job(tmp_path, "elsewhere", 2)
    job = replace(job, config=f'{job.config}\ncheckpoint.directory = "gs://bucket/run"')
    assert agent.run(job) == ExitCode.HALTED
    verdict = read_json(RunDir(Path(job.run_dir)).verdict)
    assert verdict["last_checkpoint"] == {"step": 7, "path": "gs://bucket/run/7"}
    assert "it goes on from step 7" in verdict["next"]


@pytest.mark.parametrize("here", [False, True])
def test_a_refused_replacement_leaves_the_run_that_was_there(tmp_path, here, capfd):
    run_dir = RunDir(Path(make_job(tmp_path, "refuse", 1).run_dir))
    run_dir.metrics.write_text("old")
    before = run_dir.config.read_text()
    job = Job(before, str(run_dir.path), run_dir.begin_attempt(overwrite=True), entry="worker_entries:refuse")
    if here:
        code = (
            "import sys, json; from trainer.launch import worker; from trainer.launch.spec import Job;"
            "sys.exit(worker.run_here(Job(**json.loads(sys.argv[1]))))"
        )
        assert subprocess.run([sys.executable, "-c", code, json.dumps(asdict(job))], check=False).returncode == 2
    else:
        assert agent.run(job) == 2
    assert capfd.readouterr().err == "lockstep: refused\n"
    assert (run_dir.config.read_text(), run_dir.metrics.read_text()) == (before, "old")
    assert read_json(run_dir.attempt_dir(2) / "verdict.json")["exit_code"] == 2
    assert read_json(run_dir.verdict)["attempt"] == 2


def test_a_misspelt_flag_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_maths=true")
    job = make_job(tmp_path, "agree", 1)
    assert agent.run(job) == ExitCode.SETTINGS_REFUSED
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lockstep: XLA_FLAGS")
    assert "--xla_cpu_enable_fast_maths=true" in line


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_start_finds_the_compiled_step_and_computes_the_same_bits(tmp_path, monkeypatch, capfd, processes):
    monkeypatch.delenv("LOCKSTEP_COMPILATION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digests = set()
    for hits in (0, 1):
        job = make_job(tmp_path, "cached_step", processes, nodes=2, per_node=4)
        assert agent.run(job) == 0
        results = [read_json(Path(job.run_dir) / f"cached-{rank}.json") for rank in range(processes)]
        assert results[0]["found"] == hits
        digests |= {result["digest"] for result in results}
        assert "arning" not in RunDir(Path(job.run_dir)).log(job.attempt, 0).read_text()
    assert len(digests) == 1
    assert capfd.readouterr().err == ""


def test_in_this_very_process(tmp_path):
    job = make_job(tmp_path, "agree", 1)
    code = (
        "import sys, json; from trainer.launch import worker; from trainer.launch.spec import Job;"
        "sys.exit(worker.run_here(Job(**json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run([*command, json.dumps(asdict(job))], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    check = read_json(Path(job.run_dir) / "agreed-0.json")
    assert check["has_console"]
    assert check["devices"] == 4
    two = json.dumps(asdict(job) | {"num_processes": 2})
    refused = subprocess.run([*command, two], capture_output=True, text=True, timeout=240)
    assert refused.returncode == 2
    assert refused.stderr == "lockstep: --no-agent runs one process, not --processes 2\n"


def test_a_signal_that_the_agent_was_started_to_ignore_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with agent.noting_signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert [ask.signal for ask in signals.received] == ["SIGUSR1"]
    finally:
        signal.signal(signal.SIGHUP, before)


def heeds(pid: int, number: int) -> bool:
    """Whether the process has a handler for that signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


DELAYS = (0.0, 0.05, 0.1, 0.3, 0.6, 1.0)
"""Seconds from when the handlers stand: in the imports, as settings are read, as workers start, in the first step."""


@pytest.mark.parametrize(("program", "delays"), [("-m trainer", DELAYS), ("lockstep", (0.0, 0.3))])
def test_a_signal_at_any_moment_of_the_start_ends_with_75_and_the_run_can_be_started(tmp_path, program, delays):
    script = "import sys; sys.argv[0] = 'lockstep'; from trainer.__main__ import main; sys.exit(main())"
    command = [sys.executable, *(["-m", "trainer"] if program == "-m trainer" else ["-c", script]), "train"]
    command += ["digits_mlp", "--resume", "--set", "run.num_steps=2", "--set", "data.global_batch=16", "--run-dir"]
    for turn, delay in enumerate(delays):
        number = HEEDED[turn % len(HEEDED)]
        path = tmp_path / str(delay)
        slow = ["--set", 'debug.faults=[{kind="delay", rank=0, step=1, seconds=20.0}]']
        process = subprocess.Popen(
            [*command, str(path), *slow], stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
        )
        STARTED.append(process)
        wait_until(lambda pid=process.pid: heeds(pid, HEEDED[-1]), 60, every=0.001)
        time.sleep(delay)
        process.send_signal(number)
        errors = process.communicate(timeout=240)[1]
        assert process.returncode == ExitCode.PREEMPTED, (delay, errors)
        assert "Traceback" not in errors
        assert f"ended by {number.name}" in errors
        if (path / "config.toml").exists():
            assert read_json(path / "verdict.json")["exit_code"] == 75
    again = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 0, again.stderr


def test_a_worker_heeds_a_signal_from_its_first_moment(tmp_path):
    for delay in (0.0, 0.1, 0.5):
        job = make_job(tmp_path / str(delay), "sleep", 1)
        process = start_agent(job)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(children.read_text, 60)
        time.sleep(delay)
        os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
        errors = process.communicate(timeout=240)[1]
        assert process.returncode == ExitCode.PREEMPTED, (delay, errors)
        assert "ended by SIGTERM to rank 0" in errors


def test_a_signal_just_before_the_agent_heeds_it_is_not_lost(tmp_path, capfd):
    job = make_job(tmp_path, "agree", 1)
    signals.note(signal.SIGTERM, None)
    assert agent.run(job) == signals.PREEMPTED == ExitCode.PREEMPTED
    assert capfd.readouterr().err.startswith("lockstep: ended by SIGTERM before the workers were started\n")
    assert read_json(RunDir(Path(job.run_dir)).verdict)["outcome"] == "preempted"
    assert not RunDir(Path(job.run_dir)).log(1, 0).exists()


def test_a_signal_counts_where_nobody_reads_what_is_said_of_it():
    code = "import os, signal; from trainer.launch import signals; signals.heed(signals.leave); os.close(2); "
    command = [sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGHUP)"]
    assert subprocess.run(command, check=False, timeout=240).returncode == ExitCode.PREEMPTED


def test_what_heeds_signals_first_loads_next_to_nothing():
    code = "import sys; before = set(sys.modules); import trainer.launch.signals; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "trainer" in loaded
    assert not loaded & {"dataclasses", "json", "pydantic", "typer", "numpy", "jax"}


def test_spec_and_events_survive_the_way():
    spec = WorkerSpec(Job("c", "r", 2, 3, True), Placement(1, 3, "127.0.0.1:1"), 5, None, 7, 8, 9)
    assert WorkerSpec.loads(spec.dumps()) == spec
    reader, writer = os.pipe()
    event = Event("failed", 4, "ü\n" * 4000, explained=False)
    send(writer, event)
    assert parse(os.read(reader, processes.PIPE_BYTES)) == event
    os.close(reader)
    send(writer, event)
    os.close(writer)


REPORTED = {"exit_code": 1, "message": "m", "explained": False}
KILLED = {"exit_code": 6, "message": "m", "explained": False, "returncode": -9}
ABORTED = {"exit_code": 6, "message": "m", "explained": False, "returncode": -6}
REFUSED = {"exit_code": 2, "message": "m", "explained": True}
TERMINATED = {"exit_code": 6, "message": "m", "explained": False, "returncode": -15}


@pytest.mark.parametrize(
    ("failures", "ended_by", "code", "rank"),
    [
        ([], None, 0, None),
        ([(0, 1.0, REPORTED), (1, 2.0, REPORTED)], None, 1, 0),
        ([(0, 2.0, REPORTED), (1, 1.0, REPORTED)], None, 1, 1),
        ([(0, 1.0, REPORTED), (1, 1.1, KILLED)], None, 6, 1),  # the exception came of the death noticed after it
        ([(0, 1.0, ABORTED), (1, 1.1, REFUSED)], None, 2, 1),
        ([(0, 1.0, REPORTED), (1, 1.1, ABORTED)], None, 1, 0),
        ([(0, 1.0, REFUSED), (1, 1.1, KILLED)], None, 2, 0),
        ([], ("SIGTERM", 1.0), 75, None),
        ([(1, 0.5, REFUSED)], ("SIGTERM", 1.0), 2, 1),
        ([(1, 1.5, REFUSED)], ("SIGTERM", 1.0), 75, None),
        ([(1, 1.5, KILLED)], ("SIGTERM", 1.0), 75, None),
        ([(1, 0.5, KILLED)], ("SIGTERM", 1.0), 6, 1),
        ([(1, 0.9, TERMINATED)], ("SIGTERM", 1.0), 75, None),  # both were sent it
    ],
)
def test_the_cause_is_told_from_its_consequences(failures, ended_by, code, rank):
    failed = [Failure(rank=r, seconds=s, **rest) for r, s, rest in failures]
    verdict = judge(VIEWS, failed, None, Ask(*ended_by) if ended_by else None)
    assert verdict.exit_code == code
    assert [view.rank for view in verdict.culprits] == ([] if rank is None else [rank])


VIEWS = [RankView(rank, "h", Marks("step", dispatched=4)) for rank in range(2)]


def test_a_verdict_says_all_that_scripts_ask_for():
    verdict = judge(VIEWS, [], Stuck((VIEWS[1],), (VIEWS[0],), 20.0, 20.0), None)
    assert verdict.as_json(attempt=3) == {
        "outcome": "stuck",
        "exit_code": 5,
        "attempt": 3,
        "culprits": [{"rank": 1, "host": "h", "phase": "step", "step": 5}],
        "message": "rank 1 (host h) never entered step 5; rank 0 waited 20 s in step 5 (timeouts.step_seconds = 20)",
        "last_checkpoint": None,
        "seconds_to_detection": 20.0,
        "next": "",
    }


@pytest.mark.parametrize("directory", ["", "within"])
def test_the_newest_checkpoint_is_a_whole_one(tmp_path, directory):
    run_dir, settings = RunDir(tmp_path), Checkpoint(directory=directory)
    config = Config.model_validate({"task": {"target": "a:B"}, "data": {"source": "digits", "global_batch": 8}})
    config = config.model_copy(update={"checkpoint": settings})
    assert newest_checkpoint(config, run_dir) is None
    elsewhere = config.model_copy(update={"checkpoint": Checkpoint(directory="gs://b/c/")})
    assert newest_checkpoint(elsewhere, run_dir) is None
    assert newest_checkpoint(elsewhere, run_dir, marked=4) == (4, "gs://b/c/4")
    place = tmp_path / (directory or "checkpoints")
    for step in (4, 12, 20, 30):
        (place / str(step)).mkdir(parents=True)
        (place / str(step) / "params").write_bytes(b"12345")
        if step != 30:
            manifest.write(place / str(step), step, "")
    (place / "20" / "params").write_bytes(b"1234")
    assert newest_checkpoint(config, run_dir) == (12, str(place / "12"))


def test_what_xla_says_before_it_ends_the_process_is_understood():
    assert explain_abort("ordinary\nlines") is None
    told = explain_abort("x\nF parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --xla_a=1 --xla_b\n*** stack")
    assert told is not None
    assert "--xla_a=1 --xla_b;" in told
    told = explain_abort("E command_line_flags.cc:63] Couldn't interpret value oops for flag xla_n.\nusage: long")
    assert told == "XLA_FLAGS: --xla_n does not take the value 'oops'"
    told = explain_abort('Could not open file "xla_x" to read flags for environment variable "XLA_FLAGS". (We')
    assert told is not None
    assert "'xla_x'" in told
    assert describe_exit(0) == "ended without a word, with status 0"
    assert describe_exit(-11) == "was killed by SIGSEGV"
