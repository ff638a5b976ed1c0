"""Levels: the groups of replicas among which one stage of an exchange runs, with the messages they can send.

An algorithm is written once, against a ``Level``; whether its members are a whole mesh axis (``shard_map``) or groups
within one flat axis (``pmap``) is settled here, and so is what a platform does well.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.errors import SettingsRefused

Pairs = Sequence[tuple[int, int]]
"""Who sends to whom: (sender, receiver), as member indices within a group. Nobody receives twice."""

PAIR: Pairs = [(0, 1), (1, 0)]
"""Two members that send to each other."""

TURNS_BYTES = 64 * 2**10
"""Smaller messages do without turns: of 64 KiB, four pairs on a link of 200 Mbit/s are as quick either way."""


class Turns(NamedTuple):
    """How replicas on different nodes that send to each other do so in turns; a node has one link for all its pairs.

    axes:             all mapped axes.
    devices_per_node: how many neighbours along ``axes`` share a node.
    groups:           the level's, as indices along ``axes``.
    """

    axes: tuple[str, ...]
    devices_per_node: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Level:
    """Groups of ``size`` replicas each; what is called on a level happens in all its groups at once.

    axes:   the mapped axes that the collectives run over, flattened in row-major order.
    size:   members of a group.
    groups: the groups, as indices along ``axes``; None: all of ``axes`` is one group.
    has_psum_scatter: whether a reduce-scatter may rest on ``lax.psum_scatter``.
    turns:  where two replicas on different nodes that send to each other do so one way after the other, and not both
            ways at once. Of a node's pairs one half then begins each way: together they fill its link in both
            directions.
    """

    axes: tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...] | None = None
    has_psum_scatter: bool = False
    turns: Turns | None = None

    def index(self) -> jax.Array:
        """This replica's member index within its group, an int32 scalar."""
        index = jax.lax.axis_index(self.axes)
        if self.groups is None:
            return index
        member = {replica: position for group in self.groups for position, replica in enumerate(group)}
        return jnp.asarray([member[replica] for replica in range(len(member))], jnp.int32)[index]

    def permute(self, x: jax.Array, pairs: Pairs) -> jax.Array:
        """One message along each of ``pairs``; whoever receives nothing gets zeros."""
        if self.turns and x.nbytes >= TURNS_BYTES and {(receiver, sender) for sender, receiver in pairs} == set(pairs):
            first, then = _in_turns(pairs, self.turns)
            if then:
                return _one_after_another(x, first, then, self.turns)
        if self.groups is not None:
            pairs = [(group[sender], group[receiver]) for group in self.groups for sender, receiver in pairs]
        return jax.lax.ppermute(x, self.axes, list(pairs))

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """XLA's own sum over the group."""
        return jax.lax.psum(x, self.axes, axis_index_groups=self._lists())

    def all_gather(self, x: jax.Array) -> jax.Array:
        """The members' vectors, each of shape (n,), one after another: (size * n,)."""
        if self.turns and self.size == 2:
            return self._in_order(x, self.permute(x, PAIR)).reshape(-1)
        return jax.lax.all_gather(x, self.axes, axis_index_groups=self._lists(), tiled=True)

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        """Row j goes to member j, and row i of the result came from member i: (size, n) both."""
        if self.turns and self.size == 2:
            me = self.index()
            return self._in_order(rows[me], self.permute(rows[1 - me], PAIR))
        return jax.lax.all_to_all(rows, self.axes, 0, 0, axis_index_groups=self._lists())

    def reduce_scatter(self, chunks: jax.Array) -> jax.Array:
        """Row i of the sum over the group, on member i: (size, n) -> (n,).

        On CPUs it is an all-to-all and a local sum, since there a ``psum_scatter`` across processes fails as soon as a
        peer is late.
        """
        if self.has_psum_scatter:
            return jax.lax.psum_scatter(chunks, self.axes, scatter_dimension=0, axis_index_groups=self._lists())
        return jnp.sum(self.all_to_all(chunks), axis=0)

    def _in_order(self, mine: jax.Array, others: jax.Array) -> jax.Array:
        """What the two members of a group have, the first one's first."""
        return jnp.where(self.index() == 0, jnp.stack([mine, others]), jnp.stack([others, mine]))

    def _lists(self) -> list[list[int]] | None:
        return None if self.groups is None else [list(group) for group in self.groups]


def _in_turns(pairs: Pairs, turns: Turns) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """``pairs``, which all send both ways, cut into what is sent first and what then, as indices along ``turns.axes``.

    Pairs within a node send both ways first. Of two nodes that one begins which has come second more often so far.
    """
    first, then, lead = [], [], Counter[int]()
    for group in turns.groups:
        for one, other in ((group[one], group[other]) for one, other in pairs if one < other):
            node, other_node = one // turns.devices_per_node, other // turns.devices_per_node
            if node == other_node:
                first += [(one, other), (other, one)]
                continue
            if lead[node] > lead[other_node]:
                one, other, node, other_node = other, one, other_node, node
            first.append((one, other))
            then.append((other, one))
            lead[node] += 1
            lead[other_node] -= 1
    return first, then


def _one_after_another(x: jax.Array, first: Pairs, then: Pairs, turns: Turns) -> jax.Array:
    """What each replica receives, along ``first`` or along ``then``; nobody receives in both."""
    receivers, num_replicas = {receiver for _, receiver in first}, sum(map(len, turns.groups))
    receives_first = jnp.asarray([replica in receivers for replica in range(num_replicas)])
    early, late = jax.lax.ppermute(x, turns.axes, first), jax.lax.ppermute(x, turns.axes, then)
    return jnp.where(receives_first[jax.lax.axis_index(turns.axes)], early, late)


@dataclass(frozen=True)
class Topology:
    """All replicas as one level, and as two: ``fast`` within a node, ``slow`` between the nodes' n-th devices.

    A replica's index is its position in row-major order, so that replica r sits on node r // fast.size.
    """

    flat: Level
    fast: Level
    slow: Level


def divide(sizes: Sequence[int], devices_per_node: int | None) -> tuple[int, int]:
    """``(nodes, devices per node)`` of axes of these sizes: the last axis counts a node's devices, the others nodes.

    A single axis is cut into nodes of ``devices_per_node``; without that every device is a node of its own.

    Raises:
        SettingsRefused: nodes of ``devices_per_node`` do not fit.
    """
    total = 1
    for size in sizes:
        total *= size
    local = sizes[-1] if len(sizes) > 1 else 1
    if devices_per_node is None:
        return total // local, local
    if devices_per_node < 1 or total % devices_per_node:
        fitting = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise SettingsRefused(
            f"devices_per_node = {devices_per_node} does not divide the {total} replicas: choose one of {fitting}"
        )
    if len(sizes) > 1 and devices_per_node != local:
        raise SettingsRefused(
            f"devices_per_node = {devices_per_node}, but the last of the axes counts {local} devices: leave it out, "
            "for it is only needed with a single axis"
        )
    return total // devices_per_node, devices_per_node


def topology(
    axes: tuple[str, ...],
    sizes: Sequence[int],
    devices_per_node: int | None = None,
    platform: str = "cpu",
    *,
    takes_turns: bool = False,
) -> Topology:
    """The levels of mapped axes of these sizes (see ``divide``).

    platform:    as JAX names it.
    takes_turns: whether two processes that send to each other do so one way after the other: as with Gloo, where who
                 comes later sends first, and asks for what it is to receive behind that, over the same connection.
    """
    nodes, local = divide(sizes, devices_per_node)
    scatters = platform != "cpu"
    within = tuple(tuple(range(node * local, (node + 1) * local)) for node in range(nodes))
    across = tuple(zip(*within, strict=True))
    everyone = (tuple(range(nodes * local)),)
    has_turns = takes_turns and min(nodes, local) > 1
    of_flat, of_slow = (Turns(axes, local, groups) if has_turns else None for groups in (everyone, across))
    flat = Level(axes, nodes * local, None, scatters, of_flat)
    if len(axes) > 1:
        return Topology(flat, Level(axes[-1:], local, None, scatters), Level(axes[:-1], nodes, None, scatters, of_slow))
    return Topology(flat, Level(axes, local, within, scatters), Level(axes, nodes, across, scatters, of_slow))
