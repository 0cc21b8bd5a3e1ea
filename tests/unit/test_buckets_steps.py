"""Step plans: the cuts against every possible cut, workers' shares against every possible assignment."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tool.buckets import (
    BATCH_COST,
    BLOCK_COST,
    Microbatch,
    Step,
    StepPlan,
    assign,
    cut_group,
    epoch_order,
)
from dflash_tool.errors import ConfigError

some = settings(max_examples=100, deadline=None, derandomize=True)


def plan_of(count: int = 1000, **changes: Any) -> StepPlan:
    """A plan over random samples in three buckets, lengths up to 300."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 300, count)
    arguments: dict[str, Any] = {
        "ids": rng.integers(0, 2**64, (count, 2), dtype=np.uint64),
        "lengths": lengths,
        "buckets": lengths // 100,
        "block_tokens": rng.integers(0, 200, count),
        "seed": 3,
        "epoch": 1,
        "batch_samples": 64,
        "context_budget": 2000,
        "block_budget": 900,
    }
    return StepPlan(**{**arguments, **changes})


@some
@given(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 300)), min_size=1, max_size=9),
    st.integers(1, 4000),
    st.integers(1, 900),
)
def test_no_other_cuts_cost_less(samples: list[tuple[int, int]], context: int, block: int) -> None:
    samples.sort()
    lengths = [length for length, _ in samples]
    blocks = [tokens for _, tokens in samples]

    def cost(ends: list[int]) -> int | None:
        total, start = 0, 0
        for end in ends:
            padded = (end - start) * lengths[end - 1]
            if end - start > 1 and (padded > context or sum(blocks[start:end]) > block):
                return None
            total += padded + BATCH_COST
            start = end
        return total

    everything = [
        cost([place + 1 for place, cut in enumerate(cuts) if cut] + [len(samples)])
        for cuts in product((False, True), repeat=len(samples) - 1)
    ]
    ends = cut_group(np.array(lengths), np.array(blocks), context_budget=context, block_budget=block)
    assert cost(ends) == min(c for c in everything if c is not None)


@pytest.mark.parametrize("batch_samples", [1, 7, 64, 512, 5000])
@pytest.mark.parametrize("context_budget", [50, 2000, 100_000])
def test_steps_hold_what_they_promise(batch_samples: int, context_budget: int) -> None:
    plan = plan_of(batch_samples=batch_samples, context_budget=context_budget)
    lengths, buckets, blocks = plan._lengths, plan._buckets, plan._block_tokens
    order = epoch_order(plan._ids, buckets, seed=3, epoch=1)
    assert len(plan) == -(-1000 // batch_samples)
    for index in {0, len(plan) // 2, len(plan) - 1}:
        rows = plan.samples(index)
        as_interleaved = order[index * batch_samples :][:batch_samples]
        assert sorted(buckets[rows].tolist()) == sorted(buckets[as_interleaved].tolist())
        step = plan.step(index)
        assert step.index == index
        assert [batch.index_in_step for batch in step.microbatches] == list(range(len(step.microbatches)))
        held = np.concatenate([batch.rows for batch in step.microbatches])
        assert sorted(held.tolist()) == sorted(rows.tolist()), "each sample of the step once"
        for batch in step.microbatches:
            assert set(buckets[batch.rows].tolist()) == {batch.bucket}
            assert batch.width == lengths[batch.rows].max()
            assert batch.block_tokens == blocks[batch.rows].sum()
            assert batch.padded_tokens == len(batch.rows) * batch.width
            assert batch.cost == batch.padded_tokens + BLOCK_COST * batch.block_tokens + BATCH_COST
            if len(batch.rows) > 1:
                assert batch.padded_tokens <= context_budget
                assert batch.block_tokens <= 900


def test_every_sample_stands_in_one_step() -> None:
    plan = plan_of()
    rows = np.concatenate([batch.rows for step in plan for batch in step.microbatches])
    assert sorted(rows.tolist()) == list(range(1000))
    assert sum(1 for _ in plan) == len(plan) == 16


def test_steps_hold_every_bucket_to_within_two() -> None:
    plan = plan_of(4000, batch_samples=32)
    share = np.bincount(plan._buckets)
    for index in range(len(plan)):
        rows = plan.samples(index)
        held = np.bincount(plan._buckets[rows], minlength=3)
        assert (np.abs(held * 4000 - share * len(rows)) < 2 * 4000).all()


def test_microbatches_go_round_the_buckets() -> None:
    for step in plan_of(2000, batch_samples=512):
        places = np.array([batch.bucket for batch in step.microbatches])
        total = len(places)
        for bucket in range(3):
            seen = np.cumsum(places == bucket)
            assert (np.abs(seen * total - seen[-1] * np.arange(1, total + 1)) < total).all()


def test_the_fingerprints_see_every_argument() -> None:
    plan = plan_of()
    assert plan_of().fingerprint == plan.fingerprint
    assert len(plan.fingerprint) == 32
    other_ids = plan._ids.copy()
    other_ids[999, 1] ^= np.uint64(1)
    for steps_differ, changes in (
        (True, {"ids": other_ids}),
        (True, {"seed": 4}),
        (True, {"epoch": 2}),
        (True, {"batch_samples": 65}),
        (True, {"buckets": plan._buckets // 2}),
        (True, {"lengths": plan._lengths + 1}),
        (False, {"block_tokens": plan._block_tokens + 1}),
        (False, {"context_budget": 2001}),
        (False, {"block_budget": 901}),
    ):
        other = plan_of(**changes)
        assert other.fingerprint != plan.fingerprint
        assert (other.samples_fingerprint != plan.samples_fingerprint) is steps_differ
        if not steps_differ:
            assert other.order.tolist() == plan.order.tolist()


def step_of(costs: list[int]) -> Step:
    row = np.zeros(1, dtype=np.int64)
    return Step(0, tuple(Microbatch(i, row, 0, 1, 0, cost) for i, cost in enumerate(costs)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_workers_get_everything_and_nobody_far_too_much(costs: list[int], workers: int) -> None:
    shares = assign(step_of(costs), workers)
    assert len(shares) == workers
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares), "plan order"
    busiest = max(sum(costs[index] for index in share) for share in shares)
    best = min(
        max(sum(c for c, worker in zip(costs, choice, strict=True) if worker == w) for w in range(workers))
        for choice in product(range(workers), repeat=len(costs))
    )
    assert busiest * 3 * workers <= best * (4 * workers - 1), "Graham's bound: 4/3 - 1/(3 workers)"


def test_ties_go_to_the_earlier_batch_and_the_lower_worker() -> None:
    assert assign(step_of([5, 5, 5, 5, 5]), 2) == [[0, 2, 4], [1, 3]]
    assert assign(step_of([3, 9]), 4) == [[1], [0], [], []]
    with pytest.raises(ValueError, match="workers: got 0"):
        assign(step_of([1]), 0)


def test_arguments_are_checked() -> None:
    options: list[tuple[dict[str, Any], str]] = [
        ({"batch_samples": 0}, "samples of a step: got 0"),
        ({"context_budget": 0}, "context token budget: got 0"),
        ({"block_budget": -1}, "block token budget: got -1"),
    ]
    for changes, message in options:
        with pytest.raises(ConfigError, match=message):
            plan_of(**changes)
    arrays: list[tuple[dict[str, Any], str]] = [
        ({"lengths": np.ones(5, dtype=np.int64)}, "lengths: got"),
        ({"lengths": np.zeros(1000, dtype=np.int64)}, "lengths: got"),
        ({"block_tokens": np.full(1000, -1)}, "block tokens: got"),
    ]
    for changes, message in arrays:
        with pytest.raises(ValueError, match=message):
            plan_of(**changes)
    with pytest.raises(IndexError, match="16 steps"):
        plan_of().samples(16)
    with pytest.raises(IndexError, match="step -1"):
        plan_of().step(-1)


def test_an_empty_plan_has_no_steps() -> None:
    none = np.array([], dtype=np.int64)
    plan = plan_of(ids=np.zeros((0, 2), dtype=np.uint64), lengths=none, buckets=none, block_tokens=none)
    assert list(plan) == []


def test_strata_are_shared_out_and_microbatches_cut_by_bucket() -> None:
    """Two stores in one plan: every step holds each one's share of each bucket, batches hold samples of both."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 300, 1000)
    buckets = lengths // 100
    strata = 3 * (rng.random(1000) < 0.3).astype(np.int64) + buckets
    plan = plan_of(lengths=lengths, buckets=buckets, strata=strata)
    share = np.bincount(strata, minlength=6) / 1000
    mixed = 0
    for step in plan:
        rows = np.concatenate([batch.rows for batch in step.microbatches])
        np.testing.assert_array_equal(np.sort(rows), np.sort(plan.samples(step.index)))
        assert np.abs(np.bincount(strata[rows], minlength=6) - share * len(rows)).max() < 2
        for batch in step.microbatches:
            assert set(buckets[batch.rows]) == {batch.bucket}
            mixed += len(set(strata[batch.rows])) > 1
    assert mixed > len(plan)
    alone = plan_of(lengths=lengths, buckets=buckets)
    assert plan.samples_fingerprint != alone.samples_fingerprint
    np.testing.assert_array_equal(plan_of(lengths=lengths, buckets=buckets, strata=buckets).order, alone.order)
