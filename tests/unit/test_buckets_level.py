"""Levelled steps: the same samples, the same counts of every bucket; each swap the best that a plain search finds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_tool.buckets.level import best_swap, level_steps

samples_of = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=2, max_size=60)


@given(samples_of, st.integers(1, 9))
def test_a_permutation_inside_the_buckets(samples: list[tuple[int, int]], size: int) -> None:
    lengths, buckets = (np.array(column, dtype=np.int64) for column in zip(*samples, strict=True))
    order = np.random.default_rng(0).permutation(len(samples))
    before = order.copy()
    levelled = level_steps(order, lengths, buckets, batch_samples=size)
    np.testing.assert_array_equal(order, before)
    np.testing.assert_array_equal(np.sort(levelled), np.arange(len(samples)))
    np.testing.assert_array_equal(buckets[levelled], buckets[order])
    excess = [
        float(abs(lengths[rows[:size]].sum() - min(size, len(rows)) * lengths.mean())) for rows in (order, levelled)
    ]
    assert excess[1] <= excess[0]


@given(samples_of, st.floats(-200, 200), st.data())
def test_a_swap_is_the_best_of_all_pairs(samples: list[tuple[int, int]], excess: float, data: st.DataObject) -> None:
    lengths, buckets = (np.array(column, dtype=np.int64) for column in zip(*samples, strict=True))
    cut = data.draw(st.integers(1, len(samples) - 1))
    here, there = np.arange(cut), np.arange(cut, len(samples))
    changes = {
        (i, j): int(lengths[i] - lengths[j]) for i in here.tolist() for j in there.tolist() if buckets[i] == buckets[j]
    }
    found = best_swap(lengths, buckets, here, there, excess)
    if found is None:
        assert not changes
    else:
        mine, theirs, change = found
        assert changes[int(here[mine]), int(there[theirs])] == change
        assert abs(excess - change) == min(abs(excess - each) for each in changes.values())
