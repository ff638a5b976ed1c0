"""Rounds: the messages of an exchange that are under way together, one round after another.

XLA's own all-reduce and all-gather are taken for rings, which is what Gloo and NCCL do with large vectors, and its
all-to-all for one message to each other member.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from trainer.sync import ring, tree
from trainer.sync.levels import Pairs

Groups = Sequence[Sequence[int]]
"""Replicas that exchange among themselves."""


class Round(NamedTuple):
    """Messages of ``num_bytes`` that are under way together, along ``pairs`` of replicas; ``times`` such rounds."""

    pairs: Pairs
    num_bytes: float
    times: int = 1


def exchange_rounds(
    num_elements: int, num_nodes: int, devices_per_node: int, algorithm: str, across: str
) -> Iterator[Round]:
    """The messages that exchange one vector of ``num_elements`` float32, in order."""
    total, local = num_nodes * devices_per_node, devices_per_node
    if total == 1 or num_elements == 0:
        return
    if algorithm != "hierarchical":
        yield from flat_rounds(algorithm, num_elements, total)
        return
    nodes, columns = groups_of(num_nodes, local)
    shard = math.ceil(num_elements / local)
    if local > 1:
        yield Round(in_groups(everybody(local), nodes), 4 * shard)
    yield from within(columns, flat_rounds(across, shard, num_nodes))
    if local > 1:
        yield Round(in_groups(ring.neighbours(local), nodes), 4 * shard, local - 1)


def flat_rounds(algorithm: str, num_elements: int, size: int) -> Iterator[Round]:
    """One level of ``size`` members; pairs are member indices."""
    whole = 4 * num_elements
    if size == 1:
        return
    if algorithm == "ring":
        yield Round(ring.neighbours(size), 4 * math.ceil(num_elements / size), 2 * (size - 1))
    elif algorithm == "xla":
        yield Round(ring.neighbours(size), whole / size, 2 * (size - 1))
    elif algorithm == "central":
        yield from (Round([(member, 0)], whole) for member in range(1, size))
        yield from (Round([(0, member)], whole) for member in range(1, size))
    else:
        yield from _tree_rounds(num_elements, size)


def _tree_rounds(num_elements: int, size: int) -> Iterator[Round]:
    fold, distances = tree.fold_pairs(size), tree.distances(size)
    power = tree.largest_power_of_two(size)
    whole = 4 * num_elements
    if fold:
        yield Round(fold, whole)
    if whole < tree.HALVING_BYTES:
        yield from (Round(tree.partners(size, distance), whole) for distance in distances)
    else:
        padded = 4 * math.ceil(num_elements / power) * power
        parts = [(distance, padded // (2 * distance)) for distance in distances]
        yield from (Round(tree.partners(size, distance), part) for distance, part in [*parts, *reversed(parts)])
    if fold:
        yield Round([(receiver, sender) for sender, receiver in fold], whole)


def groups_of(num_nodes: int, local: int) -> tuple[Groups, Groups]:
    """The replicas node by node, and the nodes' n-th devices for each n."""
    nodes = [list(range(node * local, (node + 1) * local)) for node in range(num_nodes)]
    return nodes, [list(column) for column in zip(*nodes, strict=True)]


def everybody(size: int) -> Pairs:
    """Everybody sends to everybody else."""
    return [(sender, receiver) for sender in range(size) for receiver in range(size) if sender != receiver]


def within(groups: Groups, rounds: Iterable[Round]) -> Iterator[Round]:
    """The same rounds in each of the groups, whose member indices their pairs were."""
    for pairs, num_bytes, times in rounds:
        yield Round(in_groups(pairs, groups), num_bytes, times)


def in_groups(pairs: Pairs, groups: Groups) -> Pairs:
    """The same pairs of members in each of the groups, as replicas."""
    return [(group[sender], group[receiver]) for group in groups for sender, receiver in pairs]
