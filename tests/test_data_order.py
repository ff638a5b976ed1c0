"""The order of an epoch: exact, fixed for good, and as good as random."""

import numpy as np
import pytest

from trainer.data.order import shuffled


def order(num_examples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(num_examples), num_examples, seed, epoch).tolist()


@pytest.mark.parametrize("num_examples", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_each_epoch_is_an_exact_permutation(num_examples: int, epoch: int) -> None:
    assert sorted(order(num_examples, epoch=epoch)) == list(range(num_examples))


def test_any_part_can_be_computed_alone() -> None:
    whole = order(1000, seed=3, epoch=2)
    assert shuffled(np.array([999, 0, 500]), 1000, 3, 2).tolist() == [whole[999], whole[0], whole[500]]


def test_large_data_needs_no_table() -> None:
    positions = np.array([0, 1, 2**31 - 2])
    examples = shuffled(positions, 2**31 - 1, 0, 0)
    assert len(set(examples.tolist())) == 3
    assert (examples >= 0).all()
    assert (examples < 2**31 - 1).all()


def test_orders_differ_between_epochs_and_seeds_and_not_by_a_shift_between_the_two() -> None:
    orders = {(seed, epoch): tuple(order(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(set(orders.values())) == len(orders)
    assert orders[2, 3] == tuple(order(50, 2, 3))


def test_seeds_beyond_64_bits_are_told_apart() -> None:
    assert order(50, seed=1) != order(50, seed=1 + 2**64)


def test_the_order_is_the_same_for_ever() -> None:
    # A checkpoint's place in the data means nothing if a new version orders the examples anew.
    assert order(10, seed=0, epoch=0) == [9, 6, 4, 2, 7, 8, 1, 5, 0, 3]


def test_every_example_is_equally_likely_at_every_position() -> None:
    counts = np.zeros((10, 10))
    for epoch in range(2000):
        counts[np.arange(10), order(10, epoch=epoch)] += 1
    chi_squared = ((counts - 200) ** 2 / 200).sum()
    assert 40 < chi_squared < 135  # 81 degrees of freedom: outside this less than once in 5,000 times


def test_neighbours_are_as_mixed_as_in_a_random_order() -> None:
    # In a random order two neighbours are n/3 apart on average; over 10,000 examples that scatters by 0.7 %.
    steps = np.abs(np.diff(order(10_000)))
    assert steps.mean() == pytest.approx(10_000 / 3, rel=0.03)
