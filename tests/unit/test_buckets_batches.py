"""Extraction batches: they hold the budget, cross no edge, cover all once, and come in a fair order."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tool.buckets import (
    BATCH_COST,
    assign_buckets,
    choose_edges,
    epoch_order,
    extraction_batches,
    padding_share,
)
from dflash_tool.errors import ConfigError

some = settings(max_examples=100, deadline=None, derandomize=True)


def samples(count: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths (log-normal), buckets and an epoch's order."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(220), 0.9, count), 16, 4096).astype(np.int64)
    buckets = assign_buckets(lengths, choose_edges(lengths, k))
    ids = rng.integers(0, 2**64, (count, 2), dtype=np.uint64)
    return lengths, buckets, epoch_order(ids, buckets, seed=seed, epoch=0)


@some
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=120),
    st.integers(1, 5),
    st.integers(1, 3000),
    st.integers(1, 60),
    st.data(),
)
def test_batches_hold_what_they_promise(
    lengths_list: list[int], k: int, budget: int, window: int, data: st.DataObject
) -> None:
    lengths = np.array(lengths_list)
    buckets = assign_buckets(lengths, choose_edges(lengths, k))
    order = np.array(data.draw(st.permutations(range(len(lengths)))))[: data.draw(st.integers(1, len(lengths)))]
    batches = extraction_batches(order, lengths, buckets, batch_tokens=budget, window=window)
    assert [batch.index for batch in batches] == list(range(len(batches)))
    done = np.concatenate([batch.rows for batch in batches])
    assert sorted(done.tolist()) == sorted(order.tolist()), "every sample of the order once"
    for start in range(0, len(order), window):
        assert set(done[start : start + window].tolist()) == set(order[start : start + window].tolist())
    for batch in batches:
        assert set(buckets[batch.rows].tolist()) == {batch.bucket}
        held = lengths[batch.rows].tolist()
        assert held == sorted(held)
        assert batch.width == held[-1]
        assert batch.padded_tokens == len(held) * max(held)
        assert len(held) == 1 or batch.padded_tokens <= budget
        assert batch.padded_tokens - sum(held) <= BATCH_COST


def test_no_batch_could_have_taken_one_more_sample() -> None:
    lengths, buckets, order = samples(3000, 4)
    batches = extraction_batches(order, lengths, buckets, batch_tokens=2048, window=3000)
    for bucket in range(4):
        shortest_first = sorted((b for b in batches if b.bucket == bucket), key=lambda b: (b.width, lengths[b.rows[0]]))
        for shorter, longer in pairwise(shortest_first):
            held = [int(lengths[shorter.rows[-1]]), *lengths[longer.rows].tolist()]
            padded = len(held) * longer.width
            assert padded > 2048 or padded - sum(held) > BATCH_COST


@pytest.mark.parametrize(("budget", "most"), [(2048, 0.01), (32_768, 0.03)])
def test_padding_is_small(budget: int, most: float) -> None:
    lengths, buckets, order = samples(20_000, 6)
    batches = extraction_batches(order, lengths, buckets, batch_tokens=budget)
    assert padding_share(batches, lengths) < most
    in_data_order = lengths.reshape(-1, 8)
    assert 1 - lengths.sum() / (8 * in_data_order.max(axis=1)).sum() > 0.5, "what it is compared with"


def test_padding_share_counts_tokens() -> None:
    lengths = np.array([10, 8, 10, 3])
    batches = extraction_batches(np.arange(4), lengths, np.array([1, 1, 1, 0]), batch_tokens=30)
    assert sorted(batch.padded_tokens for batch in batches) == [3, 30]
    assert padding_share(batches, lengths) == pytest.approx(2 / 33)
    assert padding_share([], lengths) == 0


@pytest.mark.parametrize("budget", [2048, 32_768])
def test_a_half_finished_plan_is_a_fair_sample(budget: int) -> None:
    lengths, buckets, order = samples(20_000, 6, seed=3)
    batches = extraction_batches(order, lengths, buckets, batch_tokens=budget)
    all_of = np.bincount(buckets)
    for share in (0.1, 0.25, 0.5, 0.75):
        done = np.concatenate([batch.rows for batch in batches[: int(share * len(batches))]])
        held = np.bincount(buckets[done], minlength=6)
        # A few batches of a bucket are the unit here: compare samples with the largest batches of the bucket.
        for bucket in range(6):
            largest = max(batch.rows.size for batch in batches if batch.bucket == bucket)
            expected = all_of[bucket] * done.size / lengths.size
            assert abs(held[bucket] - expected) <= 3 * largest


def test_inside_a_window_the_batches_of_every_bucket_are_spread() -> None:
    lengths, buckets, order = samples(4096, 6, seed=4)
    batches = extraction_batches(order, lengths, buckets, batch_tokens=2048)
    places = np.array([batch.bucket for batch in batches])
    total = len(batches)
    for bucket in range(6):
        seen = np.cumsum(places == bucket)
        assert (np.abs(seen * total - seen[-1] * np.arange(1, total + 1)) < total).all()
        widths = [batch.width for batch in batches if batch.bucket == bucket]
        if len(widths) > 20:
            assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.4, "shuffled, not sorted"


def test_nothing_to_do_and_wrong_options() -> None:
    none = np.array([], dtype=np.int64)
    assert extraction_batches(none, np.array([3]), np.array([0]), batch_tokens=10) == []
    with pytest.raises(ConfigError, match="batch tokens: got 0"):
        extraction_batches(none, none, none, batch_tokens=0)
    with pytest.raises(ConfigError, match="window: got 0"):
        extraction_batches(none, none, none, batch_tokens=10, window=0)
