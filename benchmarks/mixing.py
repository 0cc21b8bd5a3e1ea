"""How evenly the optimizer steps of an epoch mix lengths: every bucket's count, and the spread of tokens a step.

Run: `python benchmarks/mixing.py [--store demo/store]`. The peer is a random order of the same samples, cut into
steps of the same size. Besides the store's lengths: 20,000 log-normal ones (median 245 tokens, sigma 0.8).
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import StepPlan, assign_buckets, choose_edges
from dflash_tool.store.reader import HiddenStore

Int64s = NDArray[np.int64]
BUCKETS = 6
MANY = 1 << 40  # a budget that never binds: microbatches play no part here
EPOCHS = 4
SHUFFLES = 50


def spread(rows: Int64s, lengths: Int64s, step: int) -> float:
    """Measure the standard deviation of the tokens of the whole steps."""
    whole = rows.size // step * step
    return float(lengths[rows[:whole]].reshape(-1, step).sum(1).std())


def measure(ids: NDArray[np.uint64], lengths: Int64s, step: int) -> tuple[float, float, float]:
    """Check that each sample comes once; worst bucket deviation, spread of tokens, and that of random orders."""
    edges = choose_edges(lengths, BUCKETS)
    buckets = assign_buckets(lengths, edges)
    share = np.bincount(buckets, minlength=len(edges)) / lengths.size
    worst, spreads = 0.0, []
    for epoch in range(EPOCHS):
        plan = StepPlan(
            ids=ids, lengths=lengths, buckets=buckets, block_tokens=np.ones_like(lengths), seed=0, epoch=epoch,
            batch_samples=step, context_budget=MANY, block_budget=MANY,
        )  # fmt: skip
        if not np.array_equal(np.sort(plan.order), np.arange(lengths.size)):
            raise SystemExit("a sample is missing or comes twice")
        for index in range(len(plan)):
            rows = plan.samples(index)
            off = np.bincount(buckets[rows], minlength=len(edges)) - share * rows.size
            worst = max(worst, float(np.abs(off).max()))
        spreads.append(spread(plan.order, lengths, step))
    rng = np.random.default_rng(1)
    random = np.mean([spread(rng.permutation(lengths.size), lengths, step) for _ in range(SHUFFLES)])
    return worst, float(np.mean(spreads)), float(random)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path("demo/store"))
    samples = HiddenStore.open(parser.parse_args().store).samples
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(5.5, 0.8, 20_000), 8, 4096).astype(np.int64)
    data = (
        ("the store", samples.ids, samples.lengths.astype(np.int64), (32, 64)),
        ("20,000 log-normal", rng.integers(0, 2**64, (20_000, 2), dtype=np.uint64), drawn, (32, 64, 512)),
    )
    print(f"{BUCKETS} buckets, {EPOCHS} epochs; every sample once an epoch (checked)")
    print(f"{'samples':<20}{'G':>5}{'worst bucket':>14}{'tokens a step':>15}{'spread':>9}{'random':>9}{'ratio':>8}")
    for name, ids, lengths, sizes in data:
        for step in sizes:
            worst, ours, random = measure(ids, lengths, step)
            mean = lengths.mean() * step
            print(f"{name:<20}{step:>5}{worst:>14.2f}{mean:>15,.0f}{ours:>9,.0f}{random:>9,.0f}{ours / random:>8.3f}")
    print("goals: worst bucket below 2 samples, ratio below 0.25")


if __name__ == "__main__":
    main()
