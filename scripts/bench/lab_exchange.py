"""Times whole exchanges of one gradient over a slow link, by every algorithm, against what the link allows.

    sudo python scripts/bench/lab_exchange.py [--hosts 2] [--devices 4] [--rate 200mbit] [--megabytes 22] [--json]

Each host of the net lab is a node. For each algorithm it shows the seconds of one exchange (the slowest host's; median
of the repetitions, in which the algorithms take turns), the lower bound, which is the bytes that leave the busiest host
divided by the link's rate, and how many times that it took. The bytes are the accounting's; beside them stands how
many more or fewer the kernel counted on the hosts' devices. The link's rate covers headers, some 4.5 % of full
packets, which the bound leaves out; the kernel counts one header for each 64 KiB that it cuts into packets later.
The gradient is that of a small transformer: ten leaves a block, from vectors to the embedding's matrix.
"""

import argparse
import sys

import lab_hosts
from lab_hosts import bytes_per_second, median, slowest

ALGORITHMS = ("xla", "ring", "tree", "hierarchical-ring", "hierarchical-tree", "hierarchical-xla", "central")
WARM_UP = 1


def worker(job: dict) -> dict:
    """On each host, for every algorithm: seconds and bytes sent of each repetition, and the accounting's bytes."""
    import lab_jax

    from trainer import sync

    mesh = lab_jax.start(job, job["devices"])
    nodes, local = mesh.devices.shape
    shapes = lab_jax.transformer_gradient(job["megabytes"])
    gradient = lab_jax.ones(mesh, shapes)
    programs, report = {}, {"payload_bytes": sync.payload_bytes(shapes), "algorithms": {}}
    bucket = {} if job["bucket_mib"] is None else {"bucket_mib": job["bucket_mib"]}
    links = sync.Links(nodes, local, nodes, "cpu")
    for name in job["algorithms"]:
        algorithm, _, across = name.partition("-")
        settings = {"algorithm": algorithm, **({"across": across} if across else {})}
        programs[name] = lab_jax.exchange_program(mesh, sync.all_reduce(mesh, **settings, **bucket))
        choice = sync.choose(shapes, links, **settings, **bucket)
        settled = {"algorithm": choice.algorithm, "across": choice.across, "bucket_mib": choice.bucket_mib}
        counted = sync.traffic(shapes, nodes, local, **settled)
        report["algorithms"][name] = {
            "node_bytes": counted.node_bytes(nodes).tolist(),
            "critical_bytes": counted.slow.critical_bytes,
            "num_buckets": counted.num_buckets,
            "seconds": [],
            "bytes_sent": [],
        }
    for repetition in range(WARM_UP + job["repetitions"]):
        for name, program in programs.items():
            seconds, num_bytes = lab_jax.timed(lambda program=program: program(gradient))
            if repetition >= WARM_UP:
                report["algorithms"][name]["seconds"].append(seconds)
                report["algorithms"][name]["bytes_sent"].append(num_bytes)
    lab_jax.stop()
    return report


def measure(options: argparse.Namespace) -> dict:
    names = ("devices", "megabytes", "repetitions", "bucket_mib", "algorithms")
    job = {name: getattr(options, name) for name in names}
    with lab_hosts.laboratory(options.hosts, options.rate) as lab:
        hosts = lab_hosts.run(lab, options.script, job, limit_seconds=options.limit)
    rows = {name: _row([host["algorithms"][name] for host in hosts], options.rate) for name in options.algorithms}
    settings = {"hosts": options.hosts, "devices": options.devices, "rate": options.rate}
    return {**settings, "payload_bytes": hosts[0]["payload_bytes"], "algorithms": rows}


def _row(hosts: list[dict], rate: str) -> dict:
    """One algorithm's result from what every host reported."""
    expected = hosts[0]["node_bytes"]
    bound = max(expected) / bytes_per_second(rate)
    seconds = slowest([host["seconds"] for host in hosts])
    counted = [median(host["bytes_sent"]) for host in hosts]
    excess = [count / bytes_ - 1 for count, bytes_ in zip(counted, expected, strict=True) if bytes_]
    return {
        "seconds": median(seconds),
        "fastest_seconds": min(seconds),
        "bound_seconds": bound,
        "ratio": median(seconds) / bound,
        "critical_seconds": hosts[0]["critical_bytes"] / bytes_per_second(rate),
        "accounted_bytes": expected,
        "counted_bytes": counted,
        "largest_excess": max(excess, key=abs),
        "num_buckets": hosts[0]["num_buckets"],
        "all_seconds": seconds,
    }


def show(report: dict) -> str:
    head = "{hosts} hosts x {devices} devices, links of {rate}, gradient of {mb:.1f} MB"
    lines = [head.format(mb=report["payload_bytes"] / 1e6, **report)]
    lines += [f"{'algorithm':<18} {'seconds':>8} {'bound':>8} {'ratio':>6} {'MB a host':>10} {'counted':>8}"]
    for name, row in sorted(report["algorithms"].items(), key=lambda item: item[1]["seconds"]):
        lines.append(
            f"{name:<18} {row['seconds']:>8.3f} {row['bound_seconds']:>8.3f} {row['ratio']:>6.3f}"
            f" {max(row['accounted_bytes']) / 1e6:>10.2f} {row['largest_excess']:>+8.2%}"
        )
    times = {name: row["seconds"] for name, row in report["algorithms"].items()}
    flat = [times[name] for name in ("xla", "ring") if name in times]
    levels = [seconds for name, seconds in times.items() if name.startswith("hierarchical")]
    if flat and levels:
        lines.append(
            f"the quickest of xla and ring takes {min(flat) / min(levels):.2f} times the quickest hierarchical"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("--hosts", type=int, default=2)
    result.add_argument("--devices", type=int, default=4, help="of each host")
    result.add_argument("--rate", default="200mbit", help="of every host's link")
    result.add_argument("--megabytes", type=float, default=22, help="size of the gradient, in 10^6 bytes")
    result.add_argument("--bucket-mib", type=float, help="as in [sync] (default: auto)")
    result.add_argument("--repetitions", type=int, default=7)
    result.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    return result


if __name__ == "__main__":
    sys.exit(lab_hosts.main(__file__, parser(), measure, worker, show))
