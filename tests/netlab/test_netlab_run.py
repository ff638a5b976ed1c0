"""The lab's command line: what commands are given, which exit code counts, and that nothing is ever left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

IDLE = "setsid sleep 300 & sleep 300 & echo $LAB_ADDRESS; wait"
"""A command that starts children, one of them in a session of its own, and then says its address."""
LOOP = "while true; do sleep 0.05; done"


@pytest.fixture
def idle(start, marker, root):
    """Starts a lab of two idle hosts; returns its process and number once both commands have begun."""

    def go(*options):
        process = start("run", *options, "--", "sh", "-c", IDLE)
        addresses = {process.stdout.readline().split()[-1] for _ in range(2)}
        assert len(addresses) == 2
        return process, int(addresses.pop().split(".")[2])

    return go


def test_commands_get_their_places_filled_in_and_the_same_in_the_environment(lab_run, root):
    script = "echo $LAB_HOST_INDEX $LAB_NUM_HOSTS $LAB_ADDRESS $LAB_ADDRESS_0; printf '%s\\n' \"$@\""
    places = ["{host}:{hosts}", "{address}", "tcp://{address0}:1", "{other}", '{{"a": {host}}}', "--", "{}"]
    code, out, _ = lab_run("run", "--hosts", 3, "--", "sh", "-c", script, "sh", *places)
    assert code == 0
    for host in range(3):
        lines = [line.split("] ", 1)[1] for line in out.splitlines() if line.startswith(f"[host {host}] ")]
        index, hosts, address, first = lines[0].split()
        assert (index, hosts) == (str(host), "3")
        assert address.rsplit(".", 1) == [first.rsplit(".", 1)[0], str(host + 1)]
        filled = [f"{host}:3", address, f"tcp://{first}:1", "{other}", f'{{{{"a": {host}}}}}', "--", "{}"]
        assert lines[1:] == filled


def test_quiet_others_shows_host_0_as_it_is(lab_run, root):
    code, out, err = lab_run("run", "--quiet-others", "--", "sh", "-c", "printf 'out {host}'; echo err {host} >&2")
    assert (code, out) == (0, "out 0")
    assert "err 0\n" in err
    assert "err 1" not in err


def test_output_keeps_its_stream_and_every_line_its_host(lab_run, root):
    _, out, err = lab_run("run", "--", "sh", "-c", "echo one; echo two >&2; printf three")
    assert sorted(out.splitlines()) == ["[host 0] one", "[host 0] three", "[host 1] one", "[host 1] three"]
    assert {"[host 0] two", "[host 1] two"} <= set(err.splitlines())


def test_the_report_says_what_each_host_sent_and_how_it_ended(lab_run, root, tmp_path):
    send = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(10**6))"
    receive = "import socket; peer = socket.create_server(('', 5000)).accept()[0]\nwhile peer.recv(10**6): pass"
    script = 'if [ {host} = 0 ]; then "$0" -c "$1"; else sleep 0.5; until "$0" -c "$2" {address0}; do :; done; fi'
    file = tmp_path / "report.json"
    options = ["--rate", "1gbit", "--json", file]
    code, _, err = lab_run("run", *options, "--", "sh", "-c", script, sys.executable, receive, send)
    assert code == 0
    report = json.loads(file.read_text())
    assert (report["hosts"], report["rate"], report["exit_code"]) == (2, "1gbit", 0)
    receiver, sender = report["per_host"]
    assert sender["bytes_sent"] == pytest.approx(10**6, rel=0.05)
    assert receiver["bytes_received"] == pytest.approx(10**6, rel=0.05)
    assert receiver["bytes_sent"] < 50_000
    assert sender["exit_code"] == receiver["exit_code"] == 0
    assert sender["seconds"] >= 0.5
    for row in report["per_host"]:
        assert f"{row['bytes_sent']:,}" in err
        assert row["address"] in err


FAIL_IN_TURN = "case {host} in 0) sleep 300;; 1) sleep 3; exit 4;; 2) exit 5;; esac"


def test_the_first_failure_in_time_is_the_exit_code_and_ends_the_others(lab_run, root):
    code, _, err = lab_run("run", "--hosts", 3, "--", "sh", "-c", FAIL_IN_TURN)
    assert code == 5
    assert "netlab: exit code 5; ending the other hosts" in err


def test_keep_going_lets_the_others_run_to_their_end(lab_run, root):
    script = FAIL_IN_TURN.replace("sleep 300", "sleep 4; echo done")
    code, out, _ = lab_run("run", "--hosts", 3, "--keep-going", "--", "sh", "-c", script)
    assert (code, out) == (5, "[host 0] done\n")


def test_a_death_by_signal_counts_as_a_shell_counts_it(lab_run, root):
    code, _, _ = lab_run("run", "--hosts", 1, "--", "sh", "-c", "kill -SEGV $$")
    assert code == 128 + signal.SIGSEGV


def test_after_the_grace_who_ignores_term_is_killed(lab_run, root, tmp_path):
    script = "trap 'echo heard' TERM; " + LOOP
    file = tmp_path / "report.json"
    options = ["--timeout", 4, "--grace", 1, "--json", file]
    code, out, _ = lab_run("run", *options, "--", "sh", "-c", script)
    assert code == 124
    assert sorted(out.splitlines()) == ["[host 0] heard", "[host 1] heard"]
    for row in json.loads(file.read_text())["per_host"]:
        assert row["exit_code"] == 128 + signal.SIGKILL
        assert row["seconds"] >= 5


def test_a_second_signal_ends_the_grace(start, root):
    process = start("run", "--grace", 60, "--hosts", 1, "--", "sh", "-c", "trap 'echo heard' TERM; echo ready; " + LOOP)
    assert process.stdout.readline() == "[host 0] ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "[host 0] heard\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(idle, traces, number):
    process, lab = idle()
    assert len(traces(lab)) > 10, "the test cannot see what it looks for"
    process.send_signal(number)
    assert process.wait(timeout=20) == 128 + number
    assert traces(lab) == []


@pytest.mark.parametrize("script", ["true", "exit 3", "setsid sleep 300 & setsid sleep 300 & exit 0"])
def test_an_end_leaves_nothing_behind(lab_run, traces, root, script):
    code, out, _ = lab_run("run", "--", "sh", "-c", f"echo $LAB_ADDRESS; {script}")
    assert code == (3 if "3" in script.split() else 0)
    assert traces(int(out.split(".")[2])) == []


def test_an_exception_leaves_nothing_behind(netlab, traces, root):
    def fail():
        with netlab.Lab(hosts=2, rate="1gbit") as lab:
            number = int(lab.addresses[0].split(".")[2])
            lab.popen(1, ["sleep", "300"])
            assert len(traces(number)) > 5
            raise KeyError(number)

    with pytest.raises(KeyError) as caught:
        fail()
    assert traces(caught.value.args[0]) == []


def test_a_lab_that_cannot_be_finished_leaves_nothing_behind(netlab, traces, root, monkeypatch):
    real, calls = netlab._call, []

    def fail_in_the_middle(*arguments):
        calls.append(arguments)
        if arguments[0] == "tc":
            raise netlab.LabError("no tbf")
        return real(*arguments)

    monkeypatch.setattr(netlab, "_call", fail_in_the_middle)
    lab = netlab.Lab(hosts=2, rate="1gbit")
    with pytest.raises(netlab.LabError, match="no tbf"):
        lab.__enter__()
    made = next(name for *_, name in calls if name.endswith("-host0"))
    assert traces(int(made.removeprefix("lockstep-lab").split("-")[0])) == []


def test_a_script_that_never_closes_its_lab_leaves_nothing_behind(netlab, traces, root):
    code = f"import sys; sys.path.insert(0, {str(Path(netlab.__file__).parent)!r}); import netlab\n"
    code += "lab = netlab.Lab().__enter__(); lab.popen(0, ['sleep', '300']); print(lab.addresses[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert traces(int(done.stdout.split(".")[2])) == []


@pytest.mark.parametrize("by", ["clean", "the next lab"])
def test_what_a_killed_lab_left_is_removed_and_a_living_one_is_not_touched(idle, start, traces, by):
    killed, stale = idle()
    alive, living = idle("--rate", "100mbit")
    kept = [trace for trace in traces(living) if "process" not in trace]
    killed.kill()
    killed.wait()
    assert any("process" in trace for trace in traces(stale))
    sweep = start("clean") if by == "clean" else start("run", "--", "true")
    out, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 0
    assert (f"lab{stale}" in out) == (by == "clean")
    assert f"lab{living}" not in out
    assert [trace for trace in traces(living) if "process" not in trace] == kept
    assert len([trace for trace in traces(living) if "process" in trace]) == 7, "the lab and three a host"
    alive.terminate()
    alive.wait(timeout=20)
    assert traces(stale) == traces(living) == []


def test_remains_without_any_owner_are_removed_too(lab_run, root):
    remains = Path("/etc/netns/lockstep-lab249-host0"), Path("/etc/netns/other-lab249-host0")
    for path in remains:
        path.mkdir(parents=True)
    code, out, _ = lab_run("clean")
    left = [path.exists() for path in remains]
    remains[1].rmdir()
    assert (code, left) == (0, [False, True])
    assert "lab249" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "run needs '-- COMMAND ...'"),
        (["run", "--"], "run needs '-- COMMAND ...'"),
        (["clean", "--", "true"], "clean takes none"),
        (["run", "--hosts", "0", "--", "true"], "hosts: must be 1 to 250, not 0"),
        (["run", "--hosts", "251", "--", "true"], "hosts: must be 1 to 250, not 251"),
        (["run", "--rate", "0mbit", "--", "true"], "rate: must be a number above 0 with kbit, mbit or gbit"),
        (["run", "--rate", "200", "--", "true"], "such as 200mbit, not '200'"),
        (["run", "--burst-ms", "1", "--", "true"], "burst-ms: a link without a rate"),
        (["run", "--rate", "1mbit", "--burst-ms", "nan", "--", "true"], "burst-ms: must be a number above 0 and up to"),
        (["run", "--timeout", "-1", "--", "true"], "--timeout: must be a number of seconds, not '-1'"),
        (["run", "--grace", "nan", "--", "true"], "--grace: must be a number of seconds, not 'nan'"),
        (["run", "--json", "/nonexistent/x", "--", "true"], "--json /nonexistent/x: No such file or directory"),
    ],
)
def test_bad_input_is_refused_in_a_line(netlab, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(netlab, "check_machine", lambda: None)
    try:
        code = netlab.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["run", "--", "true"], ["clean"]])
def test_without_root_it_says_so_in_one_line(netlab, capsys, monkeypatch, arguments):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab.main(arguments) == 2
    err = capsys.readouterr().err
    assert err == "netlab: a lab needs Linux and root, because it makes network namespaces; run it with sudo\n"


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_without_iproute2_it_names_the_package(netlab, capsys, monkeypatch, missing):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netlab.shutil, "which", lambda name, path: None if name == missing else f"/sbin/{name}")
    assert netlab.main(["run", "--", "true"]) == 2
    message = f"netlab: the program '{missing}' is missing; on Debian or Ubuntu: apt-get install iproute2\n"
    assert capsys.readouterr().err == message
