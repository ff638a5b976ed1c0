"""Does it pay to exchange an accumulated gradient early? Two hosts, one core each, several virtual replicas a host.

    sudo python scripts/bench/lab_accumulation.py [--rate 1gbit] [--virtual 2] [--json]

A chain of 16 layers of 1024 x 1024 with ReLU, batch 1024 a host, cut into --virtual slices whose gradients are added
up one after another. Whole steps, in turn, as multiples of the same step without any exchange:

    at the end    a scan adds all slices up; then the sum is exchanged
    last round    a scan adds up all slices but the last, and each leaf is exchanged as soon as the backward pass of
                  the last slice has completed it: the same bytes
    each round    every slice's gradient is exchanged by itself, during the next slice's computation: the bytes of one
                  exchange for each slice
"""

import argparse
import sys

import lab_hosts
from lab_hosts import median, slowest

FLAGS = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
WAYS = ("no exchange", "at the end", "last round", "each round")
LEARNING_RATE = 1e-3


def worker(job: dict) -> dict:
    """On each host: wall and processor seconds of a step of each way, for every repetition."""
    import jax
    import lab_jax

    from trainer import sync

    mesh = lab_jax.start(job, 1)
    params, x = lab_jax.chain(mesh, job["layers"], job["width"], job["batch"])
    transform = sync.all_reduce(mesh, **job["settings"])

    def exchange(gradient):
        return transform.update(gradient, transform.init(gradient))[0]

    programs = {way: _program(mesh, way, job["virtual"], exchange) for way in WAYS}
    state = {way: lab_jax.copy(params) for way in WAYS}

    def call(way: str) -> None:
        state[way] = jax.block_until_ready(programs[way](state[way], x))

    report = lab_jax.take_turns(call, WAYS, job["repetitions"], job["steps"])
    lab_jax.stop()
    return report


def _program(mesh, way: str, virtual: int, exchange):
    """A jitted step (params, x) -> params, with the gradient accumulated and exchanged as ``way`` says."""
    import jax
    import jax.numpy as jnp
    import lab_jax

    def add(a, b):
        return jax.tree.map(jnp.add, a, b)

    def accumulated(params, slices):
        def body(total, part):
            return add(total, lab_jax.chain_gradient(params, part)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), slices)[0]

    def gradient(params, slices):
        if way == "each round":
            total = exchange(lab_jax.chain_gradient(params, slices[0]))
            for index in range(1, virtual):
                total = add(total, exchange(lab_jax.chain_gradient(params, slices[index])))
            return total
        if way == "last round":
            before = accumulated(params, slices[:-1])
            return exchange(add(before, lab_jax.chain_gradient(params, slices[-1])))
        total = accumulated(params, slices)
        return exchange(total) if way == "at the end" else total

    def body(params, x):
        slices = x.reshape(virtual, -1, x.shape[-1])
        rate = LEARNING_RATE / virtual
        return jax.tree.map(lambda leaf, slope: leaf - rate * slope, params, gradient(params, slices))

    return lab_jax.step_program(mesh, body)


def measure(options: argparse.Namespace) -> dict:
    names = ("virtual", "layers", "width", "batch", "repetitions", "steps")
    job = {name: getattr(options, name) for name in names}
    job["settings"] = {"algorithm": options.algorithm}
    with lab_hosts.laboratory(2, options.rate) as lab:
        hosts = lab_hosts.run(
            lab,
            options.script,
            job,
            limit_seconds=options.limit,
            environment={"XLA_FLAGS": options.flags},
            cores=options.cores or None,
        )
    return {"rate": options.rate, "flags": options.flags, **job, "ways": {way: _row(hosts, way) for way in WAYS}}


def _row(hosts: list[dict], way: str) -> dict:
    def seconds(name: str, key: str) -> list[float]:
        return slowest([[entry[key] for entry in host[name]] for host in hosts])

    row = {key: median(seconds(way, key)) for key in ("seconds", "cpu_seconds")}
    alone = zip(seconds(way, "seconds"), seconds(WAYS[0], "seconds"), strict=True)
    return {**row, "ratio": median([whole / compute for whole, compute in alone])}


def show(report: dict) -> str:
    head = "{layers} layers of {width} x {width}, batch {batch} a host in {virtual} slices, 2 hosts, {rate}"
    lines = [head.format(**report), f"{'':<12} {'seconds':>8} {'ratio':>6} {'cpu seconds':>12}"]
    for way, row in report["ways"].items():
        lines.append(f"{way:<12} {row['seconds']:>8.3f} {row['ratio']:>6.3f} {row['cpu_seconds']:>12.3f}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    add = result.add_argument
    add("--rate", default="1gbit", help="of every host's link")
    add("--virtual", type=int, default=2, help="slices of each host's batch")
    add("--algorithm", default="auto", help="as in [sync]")
    add("--flags", default=FLAGS, help="XLA_FLAGS of the processes")
    add("--layers", type=int, default=16)
    add("--width", type=int, default=1024)
    add("--batch", type=int, default=1024, help="of each host")
    add("--repetitions", type=int, default=7)
    add("--steps", type=int, default=2, help="in each repetition")
    add("--cores", type=int, nargs="*", default=[0, 1], help="host by host; none after the option: any core")
    return result


if __name__ == "__main__":
    sys.exit(lab_hosts.main(__file__, parser(), measure, worker, show))
