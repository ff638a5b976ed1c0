"""``lockstep bench codecs``: what each codec costs on a device of this machine, what it saves, and what it drops.

The work is that of one member of an exchange between two nodes of one device each, on one square matrix (codecs for
flat vectors get it flat). Nothing is sent: the other member is taken to have sent the same. What a member computes
before its first message is called encoding, all that follows decoding: adding up, and where codes do not add up also
encoding the sum once more, belong to it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from trainer import mesh as meshes
from trainer import sync
from trainer.config import Config
from trainer.evidence import options
from trainer.evidence.codec_table import NODES, Measured, as_json, table
from trainer.evidence.output import deliver
from trainer.evidence.timing import Action, Machine, agreed_repeats, in_turn, machine, once, slowest
from trainer.rundir import RunDir
from trainer.sync import compression
from trainer.sync.codecs import build
from trainer.sync.codecs.base import Codec, Exchanged

TAIL_DEGREES = 2
"""Degrees of freedom of Student's t distribution, by which the heavy-tailed values are drawn: no finite variance."""


@dataclass(frozen=True)
class Echo:
    """The wire of one of ``size`` members, to which the others send just what it sends them; notes what it is given."""

    size: int
    messages: list[jax.Array] = field(default_factory=list)

    def index(self) -> jax.Array:
        """The first member's."""
        return jnp.int32(0)

    def total(self, summand: jax.Array) -> jax.Array:
        """The sum, for a member is one device."""
        return self.sum(summand)

    def own_and_total(self, summand: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The vector, and the sum."""
        return summand, self.sum(summand)

    def share(self, words: jax.Array) -> jax.Array:
        """The vector, likewise: (1, n)."""
        return words[None]

    def sum(self, vector: jax.Array) -> jax.Array:
        """The sum of as many times the same vector."""
        self.messages.append(vector)
        return self.size * vector

    def gather(self, words: jax.Array) -> jax.Array:
        """Everybody's words: (size, n)."""
        self.messages.append(words)
        return jnp.broadcast_to(words, (self.size, *words.shape))

    def swap(self, words: jax.Array) -> jax.Array:
        """What the members have sent this one: row 0 of each."""
        self.messages.append(words)
        return jnp.broadcast_to(words[0], words.shape)


def run(
    config: Config,
    run_dir: RunDir,
    attempt: int,
    console: Console | None,
    *,
    codecs: list[str],
    mib: float,
    seconds: float,
    json_path: str,
) -> None:
    """Measures the codecs on one device of the mesh of ``config``, and shows a table or writes JSON.

    Args:
        codecs: as ``options.codec`` reads them.
        mib: size of the values in float32, to the nearest square.
        seconds: how long to measure each codec.
        json_path: "" for none, "-" for standard output in place of the table.

    Raises:
        SettingsRefused: an argument that a codec does not take.
    """
    del run_dir, attempt
    chosen = {label: build(choice.name, choice.args) for label in codecs for choice in [options.codec(label)]}
    mesh = meshes.make(config.mesh)
    told, where = None if json_path == "-" else console, machine(mesh)
    values = samples(round(math.sqrt(mib * 2**20 / 4)))
    measured = []
    for label, codec in chosen.items():
        if told is not None:
            told.print(f"{label} …", highlight=False)
        measured.append(measure(label, codec, values, seconds, mesh.devices.flat[0]))
    result = as_json(where, measured)
    deliver(console, json_path, result, lambda result: table(result, described(where)))


def described(where: Machine) -> str:
    """The device in words."""
    shared = f"; {where.cores} cores, shared by the emulated devices" if where.shares_cores else ""
    return f"one {where.device_kind} device{shared}"


def samples(side: int) -> dict[str, np.ndarray]:
    """Matrices of ``side`` rows and columns, float32: normal, and with heavy tails."""
    generator, shape = np.random.default_rng(0), (max(1, side),) * 2
    tails = generator.standard_t(TAIL_DEGREES, shape)
    return {"normal": generator.normal(size=shape).astype(np.float32), "heavy_tailed": tails.astype(np.float32)}


def measure(label: str, codec: Codec, values: Mapping[str, np.ndarray], budget_seconds: float, device: Any) -> Measured:
    """Times ``codec`` on the first of ``values`` for about ``budget_seconds``, and finds what it drops of each."""
    shape = next(iter(values.values())).shape
    placed = {name: jax.device_put(_as_unit(codec, value), device) for name, value in values.items()}
    whole, encode = member(codec)
    first = next(iter(placed.values()))
    actions: dict[str, Action] = {"encode": lambda: encode(first), "whole": lambda: whole(first)}
    for compiling in actions.values():
        once(compiling)
    repeats = agreed_repeats(sum(once(action) for action in actions.values()), budget_seconds)
    times = {name: slowest([taken]) for name, taken in in_turn(actions, repeats, meet=lambda: first).items()}
    errors = {name: dropped(value, whole(value).sent[0]) for name, value in placed.items()}
    ratios = {nodes: wire_ratio(codec, shape, nodes) for nodes in NODES}
    applies = codec.applies(first.shape)
    return Measured(label, first.nbytes, times["encode"], times["whole"], ratios, errors, applies)


def member(codec: Codec) -> tuple[Any, Any]:
    """Two jitted functions of a value: a member's whole part in an exchange of two, and its first message."""

    def exchanged(value: jax.Array) -> tuple[Exchanged, list[jax.Array]]:
        wire = Echo(2)
        done = codec.exchange([value], [codec.init(value.shape)], jax.random.key(0), wire)
        return done._replace(packed=None), wire.messages

    return jax.jit(lambda value: exchanged(value)[0]), jax.jit(lambda value: exchanged(value)[1][0])


def dropped(value: jax.Array, sent: jax.Array) -> float:
    """The norm of what was not sent, relative to that of the value."""
    kept, whole = (np.asarray(part, np.float64) for part in (value - sent, value))
    return float(np.linalg.norm(kept) / np.linalg.norm(whole))


def wire_ratio(codec: Codec, shape: tuple[int, ...], num_nodes: int) -> float:
    """How many times fewer bytes leave a node than in float32, by the accounting, for nodes of one device."""
    leaf = jax.ShapeDtypeStruct(shape, np.float32)
    coded = compression.choose(codec, {})
    exact = sync.traffic(leaf, num_nodes, 1, algorithm="hierarchical")
    code = sync.traffic(leaf, num_nodes, 1, algorithm="auto", bucket_mib="auto", compression=coded)
    return float(exact.node_bytes(num_nodes).max() / code.node_bytes(num_nodes).max())


def _as_unit(codec: Codec, matrix: np.ndarray) -> np.ndarray:
    return matrix.reshape(-1) if codec.unit == "element" else matrix
