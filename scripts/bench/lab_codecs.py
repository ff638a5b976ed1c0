"""What codecs save over a slow link: seconds and bytes of exchanges, or of whole train steps, beside the exact one.

    sudo python scripts/bench/lab_codecs.py [--hosts 2] [--devices 4] [--rate 200mbit] [--megabytes 22] [--ddp] [--json]
    sudo python scripts/bench/lab_codecs.py --config digits_vit [--set KEY=VALUE] [--repetitions 20] [--json]

Each host of the net lab is a node; ``compress = "slow"``, with error feedback, and residuals carried from one exchange
to the next. The codecs take turns; shown are the medians of the slowest host. A codec's bound is the bytes that leave
the busiest host divided by the link's rate. The bytes are the accounting's; beside them stands how many more or fewer
the kernel counted on the hosts' devices.

With ``--config`` whole steps of that configuration are timed instead, with its own gradient and batch, on the lab's
mesh: the bound is still that of the exchange alone. The JSON of that is what codec_quality.py --lab reads.

``--ddp`` also measures PyTorch's DistributedDataParallel over Gloo in the same lab, one process a host: its backward
pass of a model that computes nearly nothing and has just these gradients, without a hook, and with its fp16 and
PowerSGD (rank 4) hooks. It makes an environment for PyTorch under ~/.cache/lockstep-bench at its first use, by pip.
"""

import argparse
import json
import sys
from pathlib import Path

import lab_hosts
from codec_specs import DEFAULT, EXACT, checked, overrides, sync_settings
from lab_hosts import bytes_per_second, median, slowest
from lab_overlap import TORCH_HOME, torch_python

WARM_UP = 3
DDP = ("ddp", "ddp fp16", "ddp powersgd rank 4")
NUMPY = "numpy"
"""PyTorch's PowerSGD hook needs it."""


def worker(job: dict) -> dict:
    """On each host, for every codec: seconds and bytes sent of each repetition, and the accounting's bytes."""
    import lab_jax

    mesh = lab_jax.start(job, job["devices"])
    if job["config"]:
        subjects = {label: _step(job, mesh, label) for label in job["labels"]}
    else:
        gradient = lab_jax.normal(mesh, lab_jax.transformer_gradient(job["megabytes"]))
        subjects = {label: _exchange(job, mesh, gradient, label) for label in job["labels"]}
    report = {label: {**counts, "seconds": [], "bytes_sent": []} for label, (_, counts) in subjects.items()}
    for repetition in range(WARM_UP + job["repetitions"]):
        for label, (call, _) in subjects.items():
            seconds, num_bytes = lab_jax.timed(call)
            if repetition >= WARM_UP:
                report[label]["seconds"].append(seconds)
                report[label]["bytes_sent"].append(num_bytes)
    lab_jax.stop()
    return report


def _exchange(job: dict, mesh, gradient, label: str):
    """(what exchanges the gradient once, what that sends)."""
    import lab_jax

    from trainer import sync

    settings = sync_settings(label)
    args = settings.pop("args", {})
    transform = sync.all_reduce(mesh, **settings, codec_args=args, bucket_mib=job["bucket_mib"])
    return lab_jax.carrying_exchange(mesh, transform, gradient), _counts(job, mesh, gradient, label)


def _step(job: dict, mesh, label: str):
    """(what takes one step of the configuration, what its exchange sends)."""
    from emulated import CONFIGS

    from trainer import config_file, state
    from trainer.assembly import assemble
    from trainer.evidence.scaling import Steps

    nodes, local = mesh.devices.shape
    lab = [f"mesh.nodes={nodes}", f"mesh.devices_per_node={local}", 'mesh.platform="cpu"']
    lab += [f"sync.bucket_mib={json.dumps(job['bucket_mib'])}", *overrides(label)]
    pieces = assemble(config_file.load(job["config"], [*job["set"], *lab], search=[CONFIGS]))
    return Steps(pieces), _counts(job, mesh, state.trainable_part(pieces.parts, pieces.shapes.params), label)


def _counts(job: dict, mesh, gradient, label: str) -> dict:
    """What one exchange sends: of each node, and in float32 before any padding."""
    from trainer import sync
    from trainer.sync import compression

    nodes, local = mesh.devices.shape
    settings, bucket_mib = sync_settings(label), job["bucket_mib"]
    if label == EXACT:
        links = sync.Links(nodes, local, nodes, "cpu")
        choice = sync.choose(gradient, links, algorithm="hierarchical", bucket_mib=bucket_mib)
        ways = {"algorithm": "hierarchical", "across": choice.across, "bucket_mib": choice.bucket_mib}
    else:
        how = compression.choose(settings["codec"], settings["args"], error_feedback=True)
        ways = {"algorithm": "auto", "across": "auto", "bucket_mib": bucket_mib, "compression": how}
    counted = sync.traffic(gradient, nodes, local, **ways)
    return {"node_bytes": counted.node_bytes(nodes).tolist(), "payload_bytes": counted.payload_bytes}


def measure(options: argparse.Namespace) -> dict:
    names = ("devices", "megabytes", "repetitions", "config", "set")
    job = {name: getattr(options, name) for name in names} | {"labels": [EXACT, *options.codecs]}
    job["bucket_mib"] = options.bucket_mib or "auto"
    if options.config and options.ddp:
        raise lab_hosts.LabFailed("--ddp: PyTorch is measured by the exchange, not by steps; leave out --config")
    python = options.torch_python or (torch_python(TORCH_HOME, NUMPY) if options.ddp else None)
    ddp = []
    with lab_hosts.laboratory(options.hosts, options.rate) as lab:
        ours = lab_hosts.run(lab, options.script, job, limit_seconds=options.limit)
        if python:
            ddp = _measure_ddp(lab, job, options, python)
    rows = {label: _row([host[label] for host in ours], options.rate) for label in job["labels"]}
    for row in rows.values():
        row["times_fewer_bytes"] = max(rows[EXACT]["accounted_bytes"]) / max(row["accounted_bytes"])
        row["times_faster"] = rows[EXACT]["seconds"] / row["seconds"]
    others = {label: _others_row([host[label] for host in ddp]) for label in (DDP if ddp else ())}
    settings = {"hosts": options.hosts, "rate": options.rate, **job}
    return {**settings, "payload_bytes": ours[0][EXACT]["payload_bytes"], "codecs": rows, "ddp": others}


def _measure_ddp(lab, job: dict, options: argparse.Namespace, python: str) -> list[dict]:
    import jax
    import lab_jax

    shapes = [list(leaf.shape) for leaf in jax.tree.leaves(lab_jax.transformer_gradient(options.megabytes))]
    return lab_hosts.run(
        lab,
        str(Path(options.script).with_name("lab_ddp_hooks.py")),
        {**job, "shapes": shapes, "labels": DDP, "warm_up": WARM_UP},
        limit_seconds=options.limit,
        python=python,
        environment={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )


def _row(hosts: list[dict], rate: str) -> dict:
    """One codec's result from what every host reported."""
    expected = hosts[0]["node_bytes"]
    row = _others_row(hosts)
    excess = [count / bytes_ - 1 for count, bytes_ in zip(row["counted_bytes"], expected, strict=True)]
    bound = max(expected) / bytes_per_second(rate)
    return {
        **row,
        "bound_seconds": bound,
        "ratio": row["seconds"] / bound,
        "accounted_bytes": expected,
        "largest_excess": max(excess, key=abs),
    }


def _others_row(hosts: list[dict]) -> dict:
    seconds = slowest([host["seconds"] for host in hosts])
    counted = [median(host["bytes_sent"]) for host in hosts]
    return {"seconds": median(seconds), "counted_bytes": counted, "all_seconds": seconds}


def show(report: dict) -> str:
    subject = f"steps of {report['config']}" if report["config"] else "exchanges"
    head = f"{subject}: {{hosts}} hosts x {{devices}} devices, links of {{rate}}, gradient of {{mb:.1f}} MB"
    lines = [head.format(mb=report["payload_bytes"] / 1e6, **report)]
    columns = f"{'seconds':>8} {'bound':>8} {'ratio':>6} {'faster':>7} {'MB a host':>10} {'fewer':>7} {'counted':>8}"
    lines += [f"{'codec':<24} {columns}"]
    for label, row in report["codecs"].items():
        lines.append(
            f"{label:<24} {row['seconds']:>8.3f} {row['bound_seconds']:>8.3f} {row['ratio']:>6.2f}"
            f" {row['times_faster']:>6.2f}x {max(row['accounted_bytes']) / 1e6:>10.3f}"
            f" {row['times_fewer_bytes']:>6.2f}x {row['largest_excess']:>+8.2%}"
        )
    exact = report["codecs"][EXACT]["seconds"]
    for label, row in report["ddp"].items():
        counted = f"{max(row['counted_bytes']) / 1e6:>10.3f} counted"
        lines.append(f"{label:<24} {row['seconds']:>8.3f} {'':>15} {exact / row['seconds']:>6.2f}x {counted}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    add = result.add_argument
    add("--hosts", type=int, default=2)
    add("--devices", type=int, default=4, help="of each host")
    add("--rate", default="200mbit", help="of every host's link")
    add("--megabytes", type=float, default=22, help="size of the gradient, in 10^6 bytes; not with --config")
    add("--bucket-mib", type=float, help="as in [sync] (default: auto)")
    add("--codecs", nargs="+", type=checked, default=DEFAULT, help="such as int8 topk:ratio=0.05")
    add("--config", default="", help="measure steps of this configuration")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="with --config, as in lockstep train")
    add("--repetitions", type=int, default=20)
    add("--ddp", action="store_true", help="measure PyTorch too")
    add("--torch-python", help="a Python that has PyTorch and NumPy; implies --ddp")
    return result


if __name__ == "__main__":
    sys.exit(lab_hosts.main(__file__, parser(), measure, worker, show))
