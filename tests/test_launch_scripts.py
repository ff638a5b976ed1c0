"""The launch scripts without their engines: what they print, start and refuse."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from trainer.errors import ExitCode
from trainer.launch.clusters import Options, locate

SCRIPTS = Path(os.environ.get("LOCKSTEP_CHECKOUT", Path(__file__).parents[1])) / "scripts"
OPTIONS = ["--name", "vit", "--image", "registry.example/lockstep:1", "--hosts", "4", "--claim", "runs"]
VERSIONS = ("1.31", "1.36")
HOSTILE = (
    'run.name="x"',
    "data.args.path='it''s'",
    "a: b # c",
    "{{name}}",
    "$(HOME) $(id) `id`",
    "- x\n- y",
    "---",
    "*anchor &anchor !!python/object",
    "ünïcode\u2028\x07",
    '"; rm -rf /',
    "null",
    "1e3",
    "\\",
)


@pytest.fixture(scope="module")
def renderer():
    spec = importlib.util.spec_from_file_location("render", SCRIPTS / "kubernetes/render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(renderer, *arguments):
    text = renderer.render(renderer.parse([*OPTIONS, *arguments]), "a token")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("more", [[], ["--gpus", "8"], ["--port", "1234", "--grace-seconds", "600", "--retries", "0"]])
def test_the_manifest_fits_the_published_schemas(renderer, version, more):
    documents = rendered(renderer, *more, "--", "vit_b16_two_nodes")
    assert set(documents) == {"Secret", "Service", "Job"}
    for document in documents.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_would_refuse_a_manifest_that_is_wrong(renderer):
    job = rendered(renderer, "--", "x")["Job"]
    job["spec"]["completion"] = 4
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_hostile_words_reach_the_program_as_they_are(renderer):
    settings = [word for text in HOSTILE for word in ("--set", text)]
    job = rendered(renderer, "--", "my config.toml", *settings)["Job"]
    given = job["spec"]["template"]["spec"]["containers"][0]["args"]
    as_started = [word.replace("$$(", "$(") for word in given]  # as Kubernetes does it
    assert as_started[0] == "my config.toml"
    assert as_started[-len(settings) :] == settings
    assert all("$(" not in word.replace("$$(", "") for word in given), "would be replaced by a variable"


def test_a_pod_finds_its_place_and_the_service_has_its_name(renderer):
    documents = rendered(renderer, "--", "x")
    job, service, secret = documents["Job"]["spec"], documents["Service"], documents["Secret"]
    pod = job["template"]["spec"]
    given = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    source = pod["containers"][0]["env"][-1]["valueFrom"]["secretKeyRef"]
    assert (source["name"], secret["stringData"][source["key"]]) == (secret["metadata"]["name"], "a token")
    environ = {**given, "LOCKSTEP_TOKEN": "0123456789abcdef", "JOB_COMPLETION_INDEX": "3"}
    place = locate(environ, Options())
    assert (place.num_hosts, place.host_index, place.rendezvous) == (4, 3, "vit-0.vit:29400")
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()


def test_every_exit_code_has_its_rule(renderer):
    rules = rendered(renderer, "--", "x")["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_action = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in rules}
    retried = [int(code) for code in ExitCode if code.worth_retrying]
    final = [int(code) for code in ExitCode if code and not code.worth_retrying]
    assert (by_action["Count"], by_action["FailJob"]) == (retried, final)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--name", "Vit"], "--name 'Vit': lower-case letters"),
        (["--name", "a" * 53], "at most 52 of them"),
        (["--name", "x\ny"], "lower-case letters"),
        (["--name", 'x"}'], "lower-case letters"),
        (["--claim", "a b"], "is no name of a PersistentVolumeClaim"),
        (["--image", "a b"], "is no name of an image"),
        (["--image", "x\n"], "is no name of an image"),
        (["--hosts", "0"], "--hosts 0: must be at least 1"),
        (["--memory", "much"], "--memory 'much': must be a quantity"),
        (["--port", "70000"], "must be at most 65535"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_here(renderer, capsys, change, message):
    with pytest.raises(SystemExit) as end:
        renderer.parse([*OPTIONS, *change, "--", "x"])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("key", ["data.args.token", "data.args.api_key", "data.args.PASSWORD", "x.secret"])
def test_secrets_are_kept_out_of_manifests(renderer, capsys, key):
    with pytest.raises(SystemExit):
        renderer.parse([*OPTIONS, "--", "x", "--set", f'{key}="s3cr3t"'])
    said = capsys.readouterr().err
    assert "put it into a Secret" in said
    assert "s3cr3t" not in said
    renderer.parse([*OPTIONS, "--", "x", "--set", "task.args.num_tokenizers=1", "--set", "data.keyframes=1"])


def test_the_renderer_needs_python_alone_and_makes_a_new_token_each_time():
    command = [sys.executable, "-I", "-S", str(SCRIPTS / "kubernetes/render.py"), *OPTIONS, "--", "x"]
    texts = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    tokens = [next(yaml.safe_load_all(text))["stringData"]["token"] for text in texts]
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize("script", ["mpi/run.sh", "ssh/run.sh"])
@pytest.mark.parametrize(
    "arguments", [[], ["a,b"], ["a b", "x"], ["a;id", "x"], ["-oProxyCommand=id", "x"], ["a,,b", "x"]]
)
def test_hosts_that_are_none_are_refused_by_the_scripts(script, arguments):
    marker = {"SSH": "echo started", "MPIRUN": "echo started"}
    done = subprocess.run(
        [str(SCRIPTS / script), *arguments], env={**os.environ, **marker}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "started" not in done.stdout
    assert "run.sh" in done.stderr


@pytest.fixture
def engine(tmp_path):
    """A stand-in for ssh and mpirun: ends with N on host cN, on others with 75 once it is asked to end."""
    program = tmp_path / "engine"
    program.write_text(
        "#!/bin/bash\n"
        '[[ "$*" =~ c([0-9]+) ]] && exit "${BASH_REMATCH[1]}"\n'
        "trap 'sleep 0.5; exit 75' USR1\n"  # as mpirun is asked
        "echo waiting\n"
        "if [[ -p /dev/stdin ]]; then cat >/dev/null; sleep 0.5; exit 75; fi\n"  # as ssh is
        "while true; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    return {**os.environ, "SSH": str(program), "MPIRUN": str(program)}


@pytest.mark.parametrize(("hosts", "code"), [("c0,c0", 0), ("c0,c6,c5", 6), ("c75,c75", 75)])
def test_the_outcome_is_that_of_the_first_host_that_did_not_complete(engine, hosts, code):
    argv = [str(SCRIPTS / "ssh/run.sh"), hosts, "x"]
    assert subprocess.run(argv, env=engine, check=False, timeout=60).returncode == code


@pytest.mark.parametrize("script", ["mpi/run.sh", "ssh/run.sh"])
def test_signals_do_not_keep_a_script_from_the_outcome(engine, script):
    argv = [str(SCRIPTS / script), "a", "x"]
    with subprocess.Popen(argv, env=engine, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        assert process.wait(timeout=60) == 75


def test_mpirun_is_told_one_agent_a_host_and_no_secret():
    env = {**os.environ, "MPIRUN": "printf [%s]\\n", "LOCKSTEP_TOKEN": "0123456789abcdef", "LOCKSTEP_PORT": "5"}
    argv = [str(SCRIPTS / "mpi/run.sh"), "a,b", "my config", "--set", "x=1"]
    said = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "0123456789abcdef" not in "".join(said)
    assert said[-6:] == ["[train]", "[my config]", "[--set]", "[x=1]", "[--rendezvous]", "[a:5]"]
    assert said[said.index("[--map-by]") + 1] == "[ppr:1:node]"


@pytest.fixture
def sbatch(tmp_path):
    """Runs train.sbatch with stand-ins: an srun that ends with a code, and a scontrol that notes what it is asked."""

    def run(code, state="RUNNING", **env):
        note = f'printf "%s\\n" "$@" > {tmp_path}/words; echo "${{#LOCKSTEP_TOKEN}}" > {tmp_path}/token'
        programs = {
            "srun": f"{note}; exit {code}",
            "scontrol": f'echo "$*" >> {tmp_path}/asked; echo "JobId=7 JobState={state} x"',
            "sleep": "exit 0",
        }
        for name, body in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", **env}
        script = [str(SCRIPTS / "slurm/train.sbatch"), "cfg", "--set", "a=b c"]
        done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
        asked = tmp_path / "asked"
        return done, (asked.read_text() if asked.exists() else "")

    return run


@pytest.mark.parametrize("code", [int(code) for code in ExitCode])
def test_slurm_requeues_what_is_worth_another_try(sbatch, code):
    done, asked = sbatch(code)
    assert ("requeue 7" in asked) == ExitCode(code).worth_retrying
    assert done.returncode == code


def test_slurm_requeues_when_an_agent_was_killed_but_not_for_ever_and_never_what_was_cancelled(sbatch, tmp_path):
    assert "requeue 7" in sbatch(137)[1]
    (tmp_path / "asked").unlink()
    assert "requeue" not in sbatch(75, SLURM_RESTART_COUNT="20")[1]
    assert "requeue" not in sbatch(75, SLURM_RESTART_COUNT="2", LOCKSTEP_MAX_REQUEUES="2")[1]
    assert "requeue" not in sbatch(75, state="COMPLETING")[1]
    assert "requeue 7" in sbatch(75, SLURM_RESTART_COUNT="19")[1]


def test_slurm_passes_the_arguments_on_and_the_token_by_the_environment(sbatch, tmp_path):
    sbatch(0)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[-8:] == ["lockstep", "train", "cfg", "--set", "a=b c", "--resume", "--set", "mesh.nodes=3"]
    assert (tmp_path / "token").read_text() == "64\n"


def test_the_settings_of_a_manifest_are_those_that_the_program_takes(renderer):
    job = rendered(renderer, "--", "digits_mlp", "--set", "run.seed=1")["Job"]
    assert json.dumps(job["spec"]["template"]["spec"]["containers"][0]["command"]) == '["lockstep", "train"]'
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args == [
        *("digits_mlp", "--resume", "--run-dir", "/runs/vit", "--set", "mesh.nodes=4", "--set", "run.seed=1")
    ]
