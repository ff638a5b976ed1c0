"""The order of the training examples: a permutation of each epoch that is computed index by index.

A Feistel network permutes the smallest range(4**k) that holds all examples; an index that lands outside the examples is
sent through again ("cycle walking"; Black and Rogaway, 2002). This takes no memory, whatever the number of examples,
and the result depends on (seed, epoch, number of examples) alone, not on a library's version.
"""

import numpy as np

_NUM_ROUNDS = 8


def shuffled(positions: np.ndarray, num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns which examples stand at ``positions`` of the epoch's order: int64, same shape.

    positions: integers in range(num_examples), any shape.

    Over all of range(num_examples) the result is an exact permutation.

    >>> sorted(shuffled(np.arange(5), 5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    assert not positions.size or (positions.min() >= 0 and positions.max() < num_examples)
    half_bits = max(1, ((num_examples - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(entropy=seed, spawn_key=(epoch,)).generate_state(_NUM_ROUNDS, np.uint64)
    examples = _permute(positions.astype(np.uint64), half_bits, keys)
    while (outside := examples >= num_examples).any():
        examples[outside] = _permute(examples[outside], half_bits, keys)
    return examples.astype(np.int64)


def _permute(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection on range(4**half_bits): uint64 -> uint64, elementwise."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Spreads every input bit over all output bits (the finaliser of splitmix64; Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
