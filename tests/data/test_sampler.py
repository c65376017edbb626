"""The order of rows: complete in each epoch, and a function of the position alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data import Sampler


@given(st.integers(1, 60), st.integers(0, 2**32), st.booleans(), st.integers(0, 5))
def test_every_epoch_visits_each_row_once(size, seed, shuffle, epoch):
    sampler = Sampler(size, seed, shuffle)
    assert sorted(sampler.at(epoch * size + i) for i in range(size)) == list(range(size))


def test_a_position_is_independent_of_earlier_calls():
    walk = [Sampler(100, 7, True).at(position) for position in range(350)]
    for cursor in (0, 1, 99, 100, 101, 349):
        assert Sampler(100, 7, True).at(cursor) == walk[cursor]
    backwards = Sampler(100, 7, True)
    assert [backwards.at(position) for position in reversed(range(350))] == walk[::-1]


def test_epochs_and_seeds_have_different_orders():
    def epoch(seed, number):
        return tuple(Sampler(50, seed, True).at(number * 50 + i) for i in range(50))

    orders = {epoch(seed, number) for seed in range(4) for number in range(4)}
    assert len(orders) == 16
    assert tuple(range(50)) not in orders


def test_the_order_never_changes_between_releases():
    assert [Sampler(10, 0, True).at(position) for position in range(20)] == [
        *(3, 2, 1, 8, 6, 0, 7, 4, 5, 9),
        *(7, 4, 5, 1, 9, 8, 6, 2, 0, 3),
    ]


def test_without_shuffling_rows_keep_the_order_of_the_file():
    assert [Sampler(3, 0, False).at(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_sampler_without_rows_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        Sampler(0, 0, True)
