"""What planning costs and what the plan saves: seconds, padding and the worst deviation of a mixture.

Run: `python benchmarks/plan.py [--samples 1000000]`. Lengths are log-normal (median 220 tokens, sigma 0.9,
clipped to 16..4096), as chats are. Peers: batches of 8 in dataset order, and merging the buckets by
(r + 0.5)/n.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import (
    StepPlan,
    assign_buckets,
    choose_edges,
    epoch_order,
    extraction_batches,
    interleave,
    padding_share,
)

Int64s = NDArray[np.int64]
Result = TypeVar("Result")

BUCKETS = 6
STEP_BUDGET = 8192
MANY = 1 << 40  # a block budget that never binds


def timed(name: str, work: Callable[[], Result]) -> tuple[Result, float]:
    """Do `work` once and print its seconds."""
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    print(f"  {name:<44}{seconds:>8.2f} s")
    return result, seconds


def deviation(places: Int64s, counts: Int64s) -> tuple[float, float]:
    """Find the worst prefix and the worst window of an order, in samples away from a bucket's share."""
    total = places.size
    prefix = window = 0
    for bucket in np.flatnonzero(counts):
        ahead = np.cumsum(places == bucket) * total - counts[bucket] * np.arange(1, total + 1)
        top, bottom = max(0, int(ahead.max())), min(0, int(ahead.min()))
        prefix, window = max(prefix, top, -bottom), max(window, top - bottom)
    return prefix / total, window / total


def naive(counts: Int64s) -> Int64s:
    """Merge the buckets by (r + 0.5)/n, the obvious way."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner[np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n]), kind="stable")]


def step_padding(plan: StepPlan, lengths: Int64s, steps: int) -> tuple[float, float]:
    """Measure padding and microbatches of a step, over the first `steps` steps."""
    held = [plan.step(index).microbatches for index in range(min(steps, len(plan)))]
    padded = sum(batch.padded_tokens for step in held for batch in step)
    real = sum(int(lengths[batch.rows].sum()) for step in held for batch in step)
    return 1 - real / padded, sum(map(len, held)) / len(held)


def uncut_padding(plan: StepPlan, lengths: Int64s, buckets: Int64s, steps: int) -> float:
    """Measure padding of the first steps if only bucket edges and the budget cut them."""
    padded = real = 0
    for index in range(min(steps, len(plan))):
        rows = plan.samples(index)
        for bucket in range(BUCKETS):
            group = np.sort(lengths[rows[buckets[rows] == bucket]])
            real += int(group.sum())
            while group.size:
                size = max(1, STEP_BUDGET // int(group[-1]))
                padded += group[-size:].size * int(group[-1])
                group = group[:-size]
    return 1 - real / padded


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--orders", type=int, default=2000, help="random bucket counts tried for the worst deviation")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    count = options.samples
    lengths = np.clip(rng.lognormal(np.log(220), 0.9, count), 16, 4096).astype(np.int64)
    ids = rng.integers(0, 2**64, (count, 2), dtype=np.uint64)

    print(f"Planning {count:,} samples, {lengths.sum():,} tokens, {BUCKETS} buckets")
    edges, t_edges = timed("edges", lambda: choose_edges(lengths, BUCKETS))
    buckets, t_assign = timed("bucket of each sample", lambda: assign_buckets(lengths, edges))
    order, t_order = timed("order of an epoch", lambda: epoch_order(ids, buckets, seed=0, epoch=0))
    small, t_small = timed(
        "extraction batches, 2,048 tokens",
        lambda: extraction_batches(order, lengths, buckets, batch_tokens=2048),
    )
    large, t_large = timed(
        "extraction batches, 32,768 tokens",
        lambda: extraction_batches(order, lengths, buckets, batch_tokens=32_768),
    )

    def plan_of(batch_samples: int) -> StepPlan:
        return StepPlan(
            ids=ids, lengths=lengths, buckets=buckets, block_tokens=np.minimum(lengths // 2, 512) * 16,
            seed=0, epoch=0, batch_samples=batch_samples, context_budget=STEP_BUDGET, block_budget=MANY,
        )  # fmt: skip

    plan, t_plan = timed("step plan, G = 512 (its order again)", lambda: plan_of(512))
    _, t_step = timed("its first step", lambda: plan.step(0))
    total = t_edges + t_assign + t_order + t_small + t_large + t_plan + t_step
    print(f"  {'all of it':<44}{total:>8.2f} s   (goal: below 5 s)")
    wide = rng.integers(1, 131_073, count)
    timed("edges, 131,072 distinct lengths, K = 6", lambda: choose_edges(wide, 6))
    timed("edges, 131,072 distinct lengths, K = 24", lambda: choose_edges(wide, 24))

    whole = lengths[: count // 8 * 8].reshape(-1, 8)
    print(f"\nPadding, share of the computed tokens (edges {', '.join(map(str, edges))})")
    print(f"  {'batches of 8 in dataset order':<44}{1 - whole.sum() / (8 * whole.max(axis=1)).sum():>8.2%}")
    for name, batches in (("2,048", small), ("32,768", large)):
        mean = lengths.sum() / len(batches)
        share = padding_share(batches, lengths)
        print(f"  {f'extraction at {name} tokens':<44}{share:>8.2%}   {mean:,.0f} real tokens a batch")
    for size in (64, 512):
        of_size = plan_of(size)
        steps = max(1, 51_200 // size)
        share, microbatches = step_padding(of_size, lengths, steps)
        plain = uncut_padding(of_size, lengths, buckets, steps)
        print(
            f"  {f'steps of {size} samples, {STEP_BUDGET:,} tokens':<44}{share:>8.2%}   "
            f"{microbatches:.1f} microbatches a step; cut by edge and budget alone {plain:.2%}"
        )

    print(f"\nWorst deviation from a bucket's share, in samples ({options.orders} random orders)")
    worst = np.zeros((2, 2))
    for _ in range(options.orders):
        counts = np.exp(rng.uniform(0, rng.uniform(1, 9), rng.integers(1, 17))).astype(np.int64)
        places = interleave(counts, seed=int(rng.integers(1000)), epoch=int(rng.integers(100)))
        worst = np.maximum(worst, [deviation(places, counts), deviation(naive(counts), counts)])
    ours = deviation(interleave(np.bincount(buckets), seed=0, epoch=0), np.bincount(buckets))
    print(f"  {'':<44}{'prefix':>9}{'window':>9}")
    print(f"  {'the plan above':<44}{ours[0]:>9.5f}{ours[1]:>9.5f}")
    print(f"  {'random orders (promised: below 1 and 2)':<44}{worst[0, 0]:>9.5f}{worst[0, 1]:>9.5f}")
    print(f"  {'the same, merged by (r + 0.5)/n':<44}{worst[1, 0]:>9.5f}{worst[1, 1]:>9.5f}")


if __name__ == "__main__":
    main()
