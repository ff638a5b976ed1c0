"""Fits the alpha-beta model to measured exchanges in the net lab, and predicts others that it has not seen.

    sudo python scripts/bench/lab_fit.py [--rate 200mbit] [--other-rate 400mbit] [--hosts 2] [--devices 4] [--json]

The profile is fitted by trainer.sync.fit to exchanges of one vector, of 1 KiB to 64 MiB in steps of four times, by
every algorithm, on --hosts hosts at --rate. From it are predicted, and then measured:

    other sizes   in between, on the same hosts and links
    more hosts    those other sizes on one host more, each with as many devices, with the profile as it is
    other rate    those other sizes on the same hosts with links of --other-rate; the profile's seconds per byte of the
                  slow level are multiplied by rate / other rate, and nothing else is changed

Shown are measured / predicted seconds: their median, extremes, and how many lie within 15 %, by algorithm, of all, and
of the large ones, from 512 KiB on, for which the links count for more than the processors that all devices here share.
A point is the median of its repetitions; small exchanges are repeated back to back, and an idle link lets 1 ms of its
rate (or 16 KiB) pass at once, and not 128 KiB as in other labs, so that small ones are held to the rate too.
"""

import argparse
import sys

import lab_hosts
from lab_hosts import bytes_per_second, median, slowest

ALGORITHMS = ("xla", "ring", "tree", "hierarchical-ring", "hierarchical-tree", "hierarchical-xla")
SMALLEST_BYTES = 2**10
MOST_CALLS, ENOUGH_BYTES = 40, 8 * 2**20
WITHIN, LARGE_BYTES = 0.15, 2**19
BURST_MS = 1.0


def worker(job: dict) -> list[list[float]]:
    """On each host: for every point (algorithm, bytes) the seconds of each repetition."""
    import jax
    import jax.numpy as jnp
    import lab_jax

    from trainer import sync

    mesh = lab_jax.start(job, job["devices"])
    programs = []
    for name, size in job["points"]:
        algorithm, _, across = name.partition("-")
        transform = sync.all_reduce(mesh, algorithm=algorithm, across=across or "auto")
        vector = lab_jax.ones(mesh, jax.ShapeDtypeStruct((size // 4,), jnp.float32))
        program = lab_jax.exchange_program(mesh, transform)
        jax.block_until_ready(program(vector))
        programs.append((program, vector))
    seconds = [[] for _ in programs]
    for _ in range(job["repetitions"]):
        for row, (program, vector) in zip(seconds, programs, strict=True):
            calls = min(MOST_CALLS, max(1, ENOUGH_BYTES // vector.nbytes))
            row.append(lab_jax.timed(lambda program=program, vector=vector: program(vector), calls)[0])
    lab_jax.stop()
    return seconds


def measure(options: argparse.Namespace) -> dict:
    fitted_sizes = _sizes(SMALLEST_BYTES, options.largest_mib, 4)
    other_sizes = _sizes(3 * SMALLEST_BYTES, options.largest_mib, 4)
    hosts, rate, other = options.hosts, options.rate, options.other_rate
    seen = _points(options, hosts, rate, fitted_sizes)
    profile = _fit(seen, options.devices)
    slow = profile.slow._replace(
        seconds_per_byte=profile.slow.seconds_per_byte * bytes_per_second(rate) / bytes_per_second(other)
    )
    held_out = {
        "fitted": (profile, seen),
        "other sizes": (profile, _points(options, hosts, rate, other_sizes)),
        "more hosts": (profile, _points(options, hosts + 1, rate, other_sizes)),
        "other rate": (profile._replace(slow=slow), _points(options, hosts, other, other_sizes)),
    }
    points = {name: _compared(known, measured, options.devices) for name, (known, measured) in held_out.items()}
    names = ("hosts", "devices", "rate", "other_rate", "largest_mib")
    return {
        **{name: getattr(options, name) for name in names},
        "profile": {"fast": profile.fast._asdict(), "slow": profile.slow._asdict()}
        | {"seconds_per_exchange": profile.seconds_per_exchange},
        "points": points,
    }


def _sizes(first: int, largest_mib: float, factor: int) -> list[int]:
    sizes = [first]
    while sizes[-1] * factor <= largest_mib * 2**20:
        sizes.append(sizes[-1] * factor)
    return sizes


def _points(options: argparse.Namespace, hosts: int, rate: str, sizes: list[int]) -> list[dict]:
    """Measures every algorithm at every size in a new lab."""
    pairs = [(name, size) for name in options.algorithms for size in sizes]
    job = {"points": pairs, "devices": options.devices, "repetitions": options.repetitions}
    with lab_hosts.laboratory(hosts, rate, BURST_MS) as lab:
        rows = lab_hosts.run(lab, options.script, job, limit_seconds=options.limit)
    seconds = [median(slowest(times)) for times in zip(*rows, strict=True)]
    return [
        {"algorithm": name, "bytes": size, "hosts": hosts, "rate": rate, "seconds": measured}
        for (name, size), measured in zip(pairs, seconds, strict=True)
    ]


def _traffic(point: dict, devices: int):
    import numpy as np

    from trainer import sync

    algorithm, _, across = point["algorithm"].partition("-")
    vector = np.empty(point["bytes"] // 4, np.float32)
    return sync.traffic(vector, point["hosts"], devices, algorithm=algorithm, across=across or "ring")


def _fit(points: list[dict], devices: int):
    from trainer import sync

    return sync.fit([sync.Sample(_traffic(point, devices), point["seconds"]) for point in points])


def _compared(profile, points: list[dict], devices: int) -> list[dict]:
    from trainer import sync

    predicted = [sync.predict(profile, _traffic(point, devices)) for point in points]
    return [
        {**point, "predicted_seconds": seconds, "ratio": point["seconds"] / seconds}
        for point, seconds in zip(points, predicted, strict=True)
    ]


def show(report: dict) -> str:
    levels = {name: report["profile"][name] for name in ("fast", "slow")}
    lines = ["{hosts} hosts x {devices} devices at {rate}; other rate {other_rate}".format(**report)]
    for name, level in levels.items():
        alpha, beta = level["seconds_per_message"], level["seconds_per_byte"]
        lines.append(f"{name}: {1e6 * alpha:.1f} us a message, {1e9 * beta:.2f} ns a byte")
    lines.append(f"{1e6 * report['profile']['seconds_per_exchange']:.1f} us an exchange; measured / predicted:")
    lines.append(f"{'':<12} {'algorithm':<18} {'median':>7} {'least':>7} {'most':>7}  within {WITHIN:.0%}")
    for name, points in report["points"].items():
        names = dict.fromkeys(point["algorithm"] for point in points)
        rows = {row: [point for point in points if point["algorithm"] == row] for row in names}
        large = [point for point in points if point["bytes"] >= LARGE_BYTES]
        for row, chosen in {**rows, "all": points, "all, large": large}.items():
            ratios = [point["ratio"] for point in chosen]
            near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
            numbers = f"{median(ratios):>7.3f} {min(ratios):>7.3f} {max(ratios):>7.3f}" if ratios else f"{'-':>7}"
            lines.append(f"{name:<12} {row:<18} {numbers}  {near} of {len(ratios)}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("--hosts", type=int, default=2)
    result.add_argument("--devices", type=int, default=4, help="of each host")
    result.add_argument("--rate", default="200mbit", help="of every host's link, for the fit")
    result.add_argument("--other-rate", default="400mbit")
    result.add_argument("--largest-mib", type=float, default=64)
    result.add_argument("--repetitions", type=int, default=3)
    result.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    return result


if __name__ == "__main__":
    sys.exit(lab_hosts.main(__file__, parser(), measure, worker, show))
