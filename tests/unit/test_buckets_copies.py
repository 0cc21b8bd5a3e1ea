"""Weights as copies: counts against the weight, numbers against a plain loop, one key for each copy."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_tool.buckets import copy_ids, count_copies, number_copies

some = settings(max_examples=100, deadline=None, derandomize=True)


def random_ids(count: int) -> NDArray[np.uint64]:
    return np.random.default_rng(0).integers(0, 2**64, (count, 2), dtype=np.uint64)


@pytest.mark.parametrize("weight", [0, 0.1, 0.999, 1, 1.5, 2, 3.25])
def test_as_many_copies_as_the_weight_says(weight: float) -> None:
    ids = random_ids(10_000)
    counts = count_copies(ids, weight, seed=4)
    assert counts.min() >= int(weight)
    assert counts.max() <= np.ceil(weight)
    assert abs(counts.mean() - weight) < 0.02  # 4 standard deviations of the worst fraction
    np.testing.assert_array_equal(counts[::2], count_copies(ids[::2], weight, seed=4))  # each by its own id alone
    more = count_copies(ids, weight + 0.2, seed=4)
    assert (more >= counts).all()
    if weight % 1:
        assert (counts != count_copies(ids, weight, seed=5)).any()


@some
@given(st.lists(st.integers(0, 5), max_size=30))
def test_rows_of_one_id_are_numbered_in_their_order(names: list[int]) -> None:
    ids = random_ids(6)[np.array(names, np.int64)]
    seen: Counter[int] = Counter()
    expected = []
    for name in names:
        expected.append(seen[name])
        seen[name] += 1
    assert number_copies(ids).tolist() == expected


def test_each_copy_is_shuffled_on_its_own_and_the_first_as_ever() -> None:
    ids = np.repeat(random_ids(1000), 3, axis=0)
    keyed = copy_ids(ids, np.tile(np.arange(3), 1000))
    np.testing.assert_array_equal(keyed[::3], ids[::3])
    assert len(np.unique(keyed, axis=0)) == 3000
