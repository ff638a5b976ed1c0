"""How much of the exchange hides behind the backward pass: two hosts, one core each, against bare JAX and PyTorch.

    sudo python scripts/bench/lab_overlap.py [--rate 1gbit] [--rounds 3] [--ddp | --torch-python PYTHON] [--json]

A chain of 16 layers of 1024 x 1024 with ReLU, batch 1024 a host, SGD. Measured each by itself and all in turn: the
step without its exchange (compute), the exchange without the step, and the whole step; by

    lockstep   trainer.sync.all_reduce inside shard_map (--algorithm, --across, --bucket-mib), with the flags of --flags
    jax        jax.lax.psum of every leaf inside shard_map, all flags at their defaults
    ddp        PyTorch's DistributedDataParallel over Gloo, its settings at their defaults

Every host is held to one core, each framework to one thread for its products. Groups of processes of the kinds
alternate, ``--rounds`` times; in each the three programs alternate. What counts is the whole step as a multiple of the
compute alone, of the same framework and the same group of processes; processor seconds stand beside the wall's.

``--ddp`` makes an environment for PyTorch under ~/.cache/lockstep-bench at its first use, by pip.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import lab_hosts
from lab_hosts import median

TORCH = "torch==2.13.0"
TORCH_HOME = Path.home() / ".cache" / "lockstep-bench" / "torch"
FLAGS = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
PROGRAMS = ("compute", "exchange", "step")
SIZES = ("layers", "width", "batch", "repetitions", "steps")
LEARNING_RATE = 1e-3


def worker(job: dict) -> dict:
    """On each host: wall and processor seconds of each program, for every repetition."""
    import jax
    import lab_jax
    import optax

    from trainer import sync

    mesh = lab_jax.start(job, 1) if job["kind"] == "lockstep" else lab_jax.start_bare(job)
    exchange = _psum(jax, optax) if job["kind"] == "jax" else sync.all_reduce(mesh, **job["settings"])
    params, x = lab_jax.chain(mesh, job["layers"], job["width"], job["batch"])
    optimizer = optax.sgd(job["learning_rate"])
    programs = {
        "compute": lab_jax.chain_step(mesh, optimizer),
        "exchange": lab_jax.exchange_program(mesh, exchange),
        "step": lab_jax.chain_step(mesh, optax.chain(exchange, optimizer)),
    }
    state = {"compute": lab_jax.copy(params), "step": params}

    def call(name: str) -> None:
        if name == "exchange":
            jax.block_until_ready(programs[name](state["step"]))
        else:
            state[name] = jax.block_until_ready(programs[name](state[name], x))

    report = lab_jax.take_turns(call, PROGRAMS, job["repetitions"], job["steps"])
    lab_jax.stop()
    return report


def _psum(jax, optax):
    """What one writes by hand."""
    mean = lambda updates, state, params=None: (jax.lax.pmean(updates, ("node", "local")), state)  # noqa: E731
    return optax.GradientTransformation(lambda params: optax.EmptyState(), mean)


def measure(options: argparse.Namespace) -> dict:
    python = options.torch_python or (torch_python(TORCH_HOME) if options.ddp else None)
    kinds = [kind for kind in ("lockstep", "jax", "ddp") if kind != "ddp" or python]
    job = {name: getattr(options, name) for name in SIZES} | {"learning_rate": LEARNING_RATE}
    job["settings"] = _settings(options)
    rounds = {kind: [] for kind in kinds}
    with lab_hosts.laboratory(2, options.rate) as lab:
        for index in range(options.rounds):
            # The order turns round, so that no kind is always the first.
            for kind in kinds if index % 2 == 0 else kinds[::-1]:
                rounds[kind].append(_group(lab, kind, job, options, python))
    rows = {kind: _row(groups) for kind, groups in rounds.items()}
    return {"rate": options.rate, "flags": options.flags, "threads": options.threads, **job, "kinds": rows}


def _group(lab, kind: str, job: dict, options: argparse.Namespace, python: str | None) -> list[dict]:
    """One group of processes: what each host reported."""
    script, environment, interpreter = options.script, {}, sys.executable
    if kind == "ddp":
        script, interpreter = str(Path(options.script).with_name("lab_ddp.py")), python
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    elif kind == "lockstep":
        environment = {"XLA_FLAGS": options.flags, **({"NPROC": str(options.threads)} if options.threads else {})}
    else:
        environment = {"XLA_FLAGS": ""}
    return lab_hosts.run(
        lab,
        script,
        {**job, "kind": kind},
        limit_seconds=options.limit,
        python=interpreter or sys.executable,
        environment=environment,
        cores=options.cores or None,
    )


def _settings(options: argparse.Namespace) -> dict:
    names = {"algorithm": options.algorithm, "across": options.across, "bucket_mib": options.bucket_mib}
    return {name: value for name, value in names.items() if value is not None}


def _row(groups: list[list[dict]]) -> dict:
    """Medians over everything, and the ratio by groups, of the slowest host's seconds."""

    def seconds(hosts: list[dict], program: str, key: str) -> list[float]:
        return lab_hosts.slowest([[entry[key] for entry in host[program]] for host in hosts])

    row = {}
    for program in PROGRAMS:
        for key in ("seconds", "cpu_seconds"):
            row[f"{program}_{key}"] = median([value for hosts in groups for value in seconds(hosts, program, key)])
    for key, name in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
        ratios = [median(seconds(hosts, "step", key)) / median(seconds(hosts, "compute", key)) for hosts in groups]
        row |= {name: median(ratios), f"{name}_of_each_round": ratios}
    return row


def show(report: dict) -> str:
    lines = [
        f"{report['layers']} layers of {report['width']} x {report['width']}, batch {report['batch']} a host, "
        f"2 hosts, {report['rate']}; lockstep with {report['settings'] or 'the defaults'} and {report['flags']!r}",
        f"{'':<10} {'compute':>8} {'exchange':>8} {'step':>8} {'step/compute':>12} {'of cpu time':>12}  each round",
    ]
    for kind, row in report["kinds"].items():
        times = " ".join(f"{row[f'{program}_seconds']:>8.3f}" for program in PROGRAMS)
        rounds = " ".join(f"{ratio:.3f}" for ratio in row["ratio_of_each_round"])
        lines.append(f"{kind:<10} {times} {row['ratio']:>12.3f} {row['cpu_ratio']:>12.3f}  {rounds}")
    ours, *others = report["kinds"].items()
    for kind, row in others:
        lines.append(
            f"lockstep's whole step takes {ours[1]['step_seconds'] / row['step_seconds']:.3f} of that of {kind}"
        )
    return "\n".join(lines)


def torch_python(home: Path, *more: str) -> str:
    """The interpreter of an environment with PyTorch and ``more`` packages, which is made if it is not there."""
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        _call(f"making an environment in {home}", sys.executable, "-m", "venv", "--clear", str(home))
    for package, marker in [(TORCH, "complete"), *((package, f"with-{package}") for package in more)]:
        if not (home / marker).exists():
            _call(f"installing {package} in {home}", str(python), "-m", "pip", "-q", "install", package)
            (home / marker).touch()
    return str(python)


def _call(what: str, *command: str) -> None:
    print(what, file=sys.stderr)
    done = subprocess.run(command, stdout=sys.stderr, timeout=1200)
    if done.returncode:
        raise lab_hosts.LabFailed(f"{' '.join(command)} ended with code {done.returncode}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    add = result.add_argument
    add("--rate", default="1gbit", help="of every host's link")
    add("--algorithm", help="as in [sync] (default: auto)")
    add("--across", help="as in [sync]")
    add("--bucket-mib", type=float, help="as in [sync] (default: auto)")
    add("--flags", default=FLAGS, help="XLA_FLAGS of lockstep's processes")
    add("--threads", type=int, help="of XLA's pool in lockstep's processes, by NPROC (default: as the trainer sets it)")
    add("--layers", type=int, default=16)
    add("--width", type=int, default=1024)
    add("--batch", type=int, default=1024, help="of each host")
    add("--rounds", type=int, default=3, help="groups of processes of each kind")
    add("--repetitions", type=int, default=5, help="in each group")
    add("--steps", type=int, default=2, help="in each repetition")
    add("--cores", type=int, nargs="*", default=[0, 1], help="host by host; none after the option: any core")
    add("--ddp", action="store_true", help="measure PyTorch too")
    add("--torch-python", help="a Python that has PyTorch; implies --ddp")
    return result


if __name__ == "__main__":
    sys.exit(lab_hosts.main(__file__, parser(), measure, worker, show))
