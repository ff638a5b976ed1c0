"""The command line. Thin: each command reads settings, calls one function, and ends with its exit code."""

import os
import signal
import sys

from trainer.launch import signals

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "lockstep":
    # Before the imports below, which take most of a second: a run that is asked to end now has not begun.
    if sys.argv[1:2] == ["train"]:
        signals.heed(signals.leave)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C shows no traceback from some import

import errno
import json
import platform
import shutil
import tempfile
from contextlib import suppress
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from trainer import config_file
from trainer.checkpoint import catalog, table
from trainer.config import Config
from trainer.errors import ExitCode, InputRefused, LockstepError, SettingsRefused
from trainer.evidence import options
from trainer.launch import agent, clusters
from trainer.launch.spec import Job
from trainer.resume import go_back, own_settings, starting_from, told_changes
from trainer.rundir import RunDir, default_run_dir
from trainer.status import describe, saved_settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure here: the exchange, codecs, or how training scales.", no_args_is_help=True)
app.add_typer(bench, name="bench")

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a.b to a TOML value; may be given many times."),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")]
PLAIN_WIDTH = 200
"""Columns of a table that does not go to a terminal."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

checkpoints = typer.Typer(help="What checkpoints a run has.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    own, jax, jaxlib = map(metadata.version, ("lockstep-trainer", "jax", "jaxlib"))
    print(f"lockstep {own}, jax {jax}, jaxlib {jaxlib}, Python {platform.python_version()}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_versions, help="Print the versions.")
    ] = False,
) -> None:
    """Data-parallel training for JAX on many hosts, with the gradient exchange at its heart."""


@app.command()
def train(
    config_path: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="A TOML file, or the name of a shipped one. Without it, --resume takes the run's own settings.",
        ),
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run goes; runs/<run.name> if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint; start if none.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run that is there.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Worker processes on this host.")] = 1,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="So often start again from the last checkpoint if a worker dies or is stuck."),
    ] = 0,
    num_hosts: Annotated[int | None, typer.Option(help="Hosts of the run; each starts this command.")] = None,
    host_index: Annotated[int | None, typer.Option(help="Which of them this is, from 0.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A free port on host 0, where the hosts meet.")
    ] = None,
    no_agent: Annotated[bool, typer.Option("--no-agent", help="Train in this very process, for a debugger.")] = False,
    init_from: Annotated[
        str, typer.Option(metavar="DIR", help="Start a new run from the parameters of a run or a checkpoint.")
    ] = "",
    from_step: Annotated[
        int | None, typer.Option(min=1, help="With --resume: go back to this step's checkpoint; abandon later ones.")
    ] = None,
) -> None:
    """Train CONFIG, or go on with a run. Under SLURM, Kubernetes or Open MPI the hosts need not be given."""
    place = clusters.locate(os.environ, clusters.Options(num_hosts, host_index, rendezvous))
    os.environ.pop(clusters.TOKEN, None)  # the workers have no business with it
    config = starting_from(_settings(config_path, overrides, run_dir, resume=resume), init_from)
    if no_agent and place.num_hosts > 1:
        raise SettingsRefused(f"--no-agent runs on one host, not on {place.num_hosts}: give --num-hosts 1")
    if from_step is not None and not resume:
        raise SettingsRefused(f"--from-step {from_step}: only with --resume can a run go back to an older step")
    signals.begin()
    if place.host_index == 0:
        directory = RunDir.claim(run_dir or default_run_dir(config.run.name), resume=resume, overwrite=overwrite)
    else:  # host 0 claims it for all
        directory = RunDir(run_dir or default_run_dir(config.run.name))
    changes = ""
    if resume and directory.config.is_file():
        saved = saved_settings(directory)
        config = config_file.continued(saved, config)
        changes = told_changes(saved, config)
    if from_step is not None and place.host_index == 0:
        go_back(config, directory, from_step)
    if resume and place.host_index == 0 and (newest := catalog.newest(config, directory)):
        catalog.refuse_shorter(newest.path, newest.step, config.run.num_steps)  # before it counts as an attempt
    attempt = directory.begin_attempt(overwrite) if place.host_index == 0 else 0
    if changes and place.host_index == 0:
        print(changes, flush=True)
    job = Job(config_file.dump(config), str(directory.path), attempt, processes, max_restarts=max_restarts)
    _run(job, place, here=no_agent)


@app.command()
def evaluate(run_dir: RunPath) -> None:
    """Evaluate the newest checkpoint of RUN_DIR on the test split; prints the metrics as JSON."""
    directory = RunDir.existing(run_dir)
    text = config_file.dump(saved_settings(directory))
    _run(Job(text, str(directory.path), attempt=0, entry="trainer.offline:evaluate"), here=True)


@app.command()
def export(
    run_dir: RunPath,
    output: Annotated[
        Path | None,
        typer.Option(help="A .safetensors or .npz file; RUN_DIR/params.safetensors if not given."),
    ] = None,
) -> None:
    """Write the newest checkpoint's parameters (their moving average, if there is one) to a file."""
    directory = RunDir.existing(run_dir)
    from trainer import offline  # only now, for it loads JAX, which the other commands do without

    print(offline.export(directory, output or directory.path / "params.safetensors"))


@app.command()
def status(run_dir: RunPath) -> None:
    """Tell how far RUN_DIR has come and how it ended, as JSON."""
    print(json.dumps(describe(RunDir.existing(run_dir)), indent=2))


@checkpoints.command(name="list")
def list_checkpoints(run_dir: RunPath, as_json: AsJson = False) -> None:
    """List RUN_DIR's checkpoints, and what is wrong with them as far as their sizes show."""
    _tell_checkpoints(run_dir, as_json, checksums=False)


@checkpoints.command(name="verify")
def verify_checkpoints(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Read every byte of RUN_DIR's checkpoints; ends with code 3 if one is damaged or unfinished."""
    if not _tell_checkpoints(run_dir, as_json, checksums=True):
        raise typer.Exit(int(ExitCode.INPUT_REFUSED))


def _tell_checkpoints(path: Path, as_json: bool, *, checksums: bool) -> bool:
    """Prints a run's checkpoints; False if one is not sound."""
    run_dir = RunDir.existing(path)
    config = saved_settings(run_dir)
    found = table.rows(config, run_dir, checksums=checksums)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        Console(width=width).print(table.table(found, config.checkpoint.best_metric))
    return table.is_sound(found)


@app.command(name="config")
def show_config(
    config_path: Annotated[str | None, typer.Argument(metavar="CONFIG")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the settings.")] = False,
) -> None:
    """Print the resolved settings of CONFIG as TOML."""
    if schema:
        print(json.dumps(config_file.schema(), indent=2))
    elif config_path is None:
        raise SettingsRefused("lockstep config needs a CONFIG, or --schema")
    else:
        print(config_file.dump(_load(config_path, overrides), redact=True), end="")


Processes = Annotated[int, typer.Option(min=1, help="Worker processes on this host.")]
JsonPath = Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; -: to stdout.")]


@bench.command(name="sync")
def bench_sync(
    config_path: Annotated[str, typer.Argument(metavar="CONFIG", help="Its [mesh] counts.")] = "digits_mlp",
    overrides: Overrides = None,
    processes: Processes = 1,
    sizes: Annotated[
        str | None, typer.Option(help="Such as 1KiB,1MiB; 1 KiB to 64 MiB by factors of 4 if not given.")
    ] = None,
    algorithms: Annotated[str | None, typer.Option(help="Such as xla,ring; all if not given.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each size.")] = 5.0,
    json_path: JsonPath = "",
    profile: Annotated[str, typer.Option(metavar="FILE", help="Write the fitted links, for sync.profile.")] = "",
) -> None:
    """Measure the exchange by algorithm and size on the mesh of CONFIG, and fit the links (2 x 4 on CPU if none).

    A fit that says little, as where a link came out as free, is warned of in a line; a profile is written all the same.
    "auto" does not follow one in which the links that it has to cross take no time.
    """
    args = {
        "sizes": options.sizes(sizes),
        "algorithms": options.algorithms(algorithms),
        "seconds": options.seconds(seconds),
        "json_path": options.output("--json", json_path, or_stdout=True),
        "profile_path": options.output("--profile", profile),
    }
    _measure(_load(config_path, overrides), "trainer.evidence.exchange_bench:run", processes, args)


@bench.command(name="codecs")
def bench_codecs(
    config_path: Annotated[str, typer.Argument(metavar="CONFIG", help="Its [mesh] names the device.")] = "digits_mlp",
    overrides: Overrides = None,
    codecs: Annotated[str | None, typer.Option(help="Such as int8,topk:ratio=0.05; all if not given.")] = None,
    mib: Annotated[float, typer.Option(help="Size of the values in float32.")] = 4.0,
    seconds: Annotated[float, typer.Option(help="How long to measure each codec.")] = 1.0,
    json_path: JsonPath = "",
) -> None:
    """Measure codecs on one device: time to encode and decode, bytes saved, and what is dropped."""
    args = {
        "codecs": options.codecs(codecs),
        "mib": options.mib(mib),
        "seconds": options.seconds(seconds),
        "json_path": options.output("--json", json_path, or_stdout=True),
    }
    _measure(_load(config_path, overrides), "trainer.evidence.codec_bench:run", 1, args)


@bench.command(name="scaling")
def bench_scaling(
    config_path: ConfigPath,
    overrides: Overrides = None,
    processes: Processes = 1,
    fixed_batch: Annotated[
        bool, typer.Option("--fixed-batch", help="Keep the global batch fixed, not the batch per replica.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="How long to measure each number of replicas.")] = 10.0,
    json_path: JsonPath = "",
) -> None:
    """Measure CONFIG's step on 1, 2, 4, ... replicas: throughput, efficiency, and where the rest goes."""
    args = {
        "fixed_batch": fixed_batch,
        "seconds": options.seconds(seconds),
        "json_path": options.output("--json", json_path, or_stdout=True),
    }
    _measure(_load(config_path, overrides), "trainer.evidence.scaling:run", processes, args)


def _settings(config_path: str | None, overrides: list[str] | None, run_dir: Path | None, *, resume: bool) -> Config:
    """Those of CONFIG; without one, those of the run that is resumed."""
    if config_path is not None:
        return _load(config_path, overrides)
    if not resume:
        raise SettingsRefused("train needs a CONFIG; only --resume, of a run that is there, does without")
    if run_dir is None:
        raise SettingsRefused("--resume without a CONFIG: give the run's directory with --run-dir")
    return _checked(own_settings(RunDir(run_dir), overrides or ()))


def _load(path: str, overrides: list[str] | None) -> Config:
    beside = Path(__file__).parents[1] / "configs"  # a user may have a package 'configs' too
    shipped = beside if beside.is_dir() else Path(str(files("configs")))
    return _checked(config_file.load(path, overrides or (), search=[shipped]))


def _checked(config: Config) -> Config:
    if config.sync.codec != "none":
        from trainer.sync import codecs  # only now: it loads JAX, though it starts nothing

        codecs.build(config.sync.codec, config.sync.args)  # refuses arguments before any device is touched
    return config


def _run(job: Job, place: clusters.Place | None = None, *, here: bool) -> None:
    if here:
        from trainer.launch.worker import run_here  # only now: the agent does not load JAX

        signals.give_back()
        raise typer.Exit(run_here(job))
    code = agent.run(job, place)
    signals.ignore_from_now_on()
    raise typer.Exit(code)


def _measure(config: Config, entry: str, processes: int, args: dict[str, Any]) -> None:
    """Runs ``entry`` under an agent in a directory that is kept only if its logs may be of use."""
    directory = tempfile.mkdtemp(prefix="lockstep-bench-")
    code = agent.run(Job(config_file.dump(config), directory, 0, processes, entry=entry, args=args))
    if code not in (ExitCode.PROGRAM_FAULT, ExitCode.DIED):
        shutil.rmtree(directory, ignore_errors=True)
    raise typer.Exit(code)


def open_standard_streams() -> None:
    """Opens /dev/null for each standard stream that is closed: else the next file opened would take its place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def require_current_directory() -> None:
    """Refuses a current directory that was removed."""
    try:
        os.getcwd()
    except OSError:
        raise InputRefused("the current directory does not exist any more: change to one that does") from None


def main() -> None:
    """Runs the command line; a refusal is printed as it is, without a traceback."""
    open_standard_streams()
    try:
        require_current_directory()
        app()
    except LockstepError as error:
        for line in str(error).splitlines():
            print(f"lockstep: {line}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        with suppress(OSError):
            print(f"lockstep: the output cannot be written: {error.strerror}", file=sys.stderr)
        os._exit(int(ExitCode.PROGRAM_FAULT))  # an orderly exit would try to write the rest


if __name__ == "__main__":
    main()
