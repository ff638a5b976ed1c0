"""What the JAX workers of the lab's measurements share: a start as the trainer's own, barriers, and timing."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lab_hosts import bytes_sent

from trainer import mesh as meshes
from trainer import runtime, sync
from trainer.config import Mesh as MeshSettings
from trainer.placement import Placement

START_SECONDS = 60
BLOCKS, VOCABULARY_WIDTHS = 6, 12


def start(job: Mapping[str, Any], devices: int) -> Mesh:
    """Starts this host's process with that many CPU devices, as the trainer does; one host is one node."""
    hosts = job["num_processes"]
    settings = MeshSettings(nodes=hosts, devices_per_node=devices, platform="cpu")
    place = Placement(job["rank"], hosts, job["coordinator"] if hosts > 1 else "")
    runtime.start(settings, place, init_seconds=START_SECONDS, shutdown_seconds=START_SECONDS, cache_dir=None)
    return meshes.make(settings)


def stop() -> None:
    """Leaves together with the other hosts' processes."""
    barrier()
    runtime.stop()


def barrier() -> None:
    """Waits for the other hosts. Its own traffic is some hundred bytes."""
    multihost_utils.sync_global_devices("lab")


def timed(program: Callable[[], Any], times: int = 1) -> tuple[float, int]:
    """Seconds a call, of ``times`` calls one after another that begin on all hosts together; and bytes sent a call."""
    barrier()
    sent, begin = bytes_sent(), time.perf_counter()
    for _ in range(times):
        jax.block_until_ready(program())
    seconds = (time.perf_counter() - begin) / times
    barrier()
    return seconds, (bytes_sent() - sent) // times


def take_turns(call: Callable[[str], None], names: Sequence[str], repetitions: int, steps: int) -> dict[str, list]:
    """Wall and processor seconds of ``call(name)``, blocks of ``steps`` of each name in turn, begun on all hosts
    together; after two calls of each that do not count."""
    for name in (*names, *names):
        call(name)
    report = {name: [] for name in names}
    for _ in range(repetitions):
        for name in names:
            barrier()
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                call(name)
            row = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - used}
            report[name].append({key: value / steps for key, value in row.items()})
    barrier()
    return report


def exchange_program(mesh: Mesh, transform: Any) -> Callable[[Any], Any]:
    """A jitted exchange of a tree that every replica holds a copy of."""

    def body(gradient: Any) -> Any:
        return transform.update(gradient, transform.init(gradient))[0]

    spec = PartitionSpec()
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def carrying_exchange(mesh: Mesh, transform: Any, gradient: Any) -> Callable[[], Any]:
    """A call that exchanges ``gradient`` once and carries the exchange's state to the next, as a train step does."""
    specs = sync.state_specs(jax.eval_shape(transform.init, gradient), mesh=mesh)
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state, spec = jax.jit(transform.init, out_shardings=layout)(gradient), PartitionSpec()
    body = jax.shard_map(transform.update, mesh=mesh, in_specs=(spec, specs), out_specs=(spec, specs), check_vma=False)
    program = jax.jit(body, donate_argnums=1)

    def call() -> Any:
        nonlocal state
        total, state = program(gradient, state)
        return total, state

    return call


def transformer_gradient(megabytes: float) -> dict[str, Any]:
    """Shapes of the gradient of a small transformer of about that size (10^6 bytes): embedding, then blocks."""
    width = max(2, round((megabytes * 1e6 / 4 / (BLOCKS * 12 + VOCABULARY_WIDTHS)) ** 0.5))

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {
        "norm_1": {"scale": leaf(width), "bias": leaf(width)},
        "attention": {"qkv": leaf(width, 3 * width), "out": leaf(width, width), "bias": leaf(width)},
        "norm_2": {"scale": leaf(width), "bias": leaf(width)},
        "mlp": {"up": leaf(width, 4 * width), "up_bias": leaf(4 * width), "down": leaf(4 * width, width)},
    }
    blocks = {f"block_{index}": block for index in range(BLOCKS)}
    return {"embedding": leaf(VOCABULARY_WIDTHS * width, width), **blocks}


def ones(mesh: Mesh, shapes: Any) -> Any:
    """Arrays of these shapes on every device."""
    return meshes.place_replicated(mesh, jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes))


def normal(mesh: Mesh, shapes: Any) -> Any:
    """Normal values of these shapes, the same on every device."""
    generator = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: generator.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    return meshes.place_replicated(mesh, values)


def start_bare(job: Mapping[str, Any]) -> Mesh:
    """Starts this host's process with one CPU device by JAX's own means, every flag at its default."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    hosts = job["num_processes"]
    jax.distributed.initialize(job["coordinator"], hosts, job["rank"], initialization_timeout=START_SECONDS)
    return meshes.make(MeshSettings(nodes=hosts, devices_per_node=1, platform="cpu"))


def chain(mesh: Mesh, num_layers: int, width: int, batch: int) -> tuple[list[jax.Array], jax.Array]:
    """The weights of ``num_layers`` square layers, on every device, and a batch of ``batch`` rows for each host."""
    generator, scale = np.random.default_rng(0), (2 / width) ** 0.5
    weights = [(scale * generator.normal(size=(width, width))).astype(np.float32) for _ in range(num_layers)]
    rows = generator.normal(size=(batch, width)).astype(np.float32)
    return meshes.place_replicated(mesh, weights), meshes.place_rows(mesh, {"x": rows})["x"]


def chain_gradient(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """Of the mean square of what the layers make of x, a ReLU behind each."""

    def loss(params: list[jax.Array]) -> jax.Array:
        y = x
        for weight in params:
            y = jax.nn.relu(y @ weight)
        return jnp.mean(y * y)

    return jax.grad(loss)(params)


def chain_step(mesh: Mesh, optimizer: Any) -> Callable[[Any, Any], Any]:
    """A jitted step (params, x) -> params by an optimizer without state; it may exchange, and params are donated."""

    def body(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        updates, _ = optimizer.update(chain_gradient(params, x), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return step_program(mesh, body)


def step_program(mesh: Mesh, body: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``body(params, x)`` jitted on every replica: params are replicated and donated, x is shared out by rows."""
    specs = (PartitionSpec(), PartitionSpec(meshes.AXES))
    step = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(step, donate_argnums=0)


def copy(tree: Any) -> Any:
    """Arrays of their own, for a program that its input is donated to."""
    return jax.tree.map(jnp.copy, tree)
