"""Step plans: which samples an optimizer step holds, and the microbatches it is computed in.

Step s holds the samples `order[s*G : (s+1)*G]` of the epoch's order; nothing is dropped, the last step is
smaller. The order alone gives every step its fair mixture of buckets (see `order`). Inside a step:

1. group by bucket, sort by length;
2. cut each group into microbatches by a dynamic program over the sorted lengths: the least padded context
   tokens plus `BATCH_COST` for each microbatch, none above the context budget or the block budget (a sample
   above one by itself is a microbatch of its own), none across a bucket edge;
3. let the microbatches go round the buckets, interleaved as the samples are.

Drafters get their microbatches by `assign`, which depends on nothing but the plan. A plan is a pure function
of its arguments; making one costs the order, the rest is computed step by step when asked for. A sample that
is quarantined later leaves a hole: rows are just numbers here, nothing is planned again.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from dflash_tool.buckets.batches import BATCH_COST
from dflash_tool.buckets.keys import hash_words
from dflash_tool.buckets.level import level_steps
from dflash_tool.buckets.order import epoch_order, merge_buckets
from dflash_tool.errors import ConfigError

Int64s = NDArray[np.int64]

BLOCK_COST = 10
"""Compute of a block slot in context tokens: it goes through every matrix of every drafter layer and the
head, a context token only through `fc`, K and V."""

_FORMAT = 2  # part of the fingerprint: raise it when the same arguments give another plan


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One drafter forward and backward: `rows` of one bucket, padded to `width`.

    Attributes:
        index_in_step: its place in the step.
        rows: int64 `[B]`, sample rows by ascending length.
        bucket: of all its samples.
        width: tokens of its longest sample.
        block_tokens: predicted block slots of its samples together.
        cost: predicted compute, in context tokens: padded tokens, blocks and the fixed cost of a batch.
    """

    index_in_step: int
    rows: Int64s
    bucket: int
    width: int
    block_tokens: int
    cost: int

    @property
    def padded_tokens(self) -> int:
        """Context tokens computed: rows x width."""
        return int(self.rows.size) * self.width


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: its place in the epoch and its microbatches in plan order."""

    index: int
    microbatches: tuple[Microbatch, ...]


class StepPlan:
    """The optimizer steps of one epoch.

    Args:
        ids: uint64 `[N, 2]`, sample ids.
        lengths: int64 `[N]`, context tokens of each sample, at least 1.
        buckets: int64 `[N]`, bucket of each sample.
        block_tokens: int64 `[N]`, predicted block slots of each sample (anchors x block size), at least 0.
        seed: of the run.
        epoch: counted from 0.
        batch_samples: G, samples of a step.
        context_budget: the most padded context tokens of a microbatch.
        block_budget: the most block slots of a microbatch.
        strata: int64 `[N]`, what every step holds its share of; by default the buckets. Microbatches are cut by bucket.

    Raises:
        ConfigError: `batch_samples` or a budget is below 1.
        ValueError: the arrays differ in length, or hold numbers out of range.
    """

    def __init__(
        self,
        *,
        ids: NDArray[np.uint64],
        lengths: Int64s,
        buckets: Int64s,
        block_tokens: Int64s,
        seed: int,
        epoch: int,
        batch_samples: int,
        context_budget: int,
        block_budget: int,
        strata: Int64s | None = None,
    ) -> None:
        for name, value, remedy in (
            ("samples of a step", batch_samples, "the default is 512"),
            ("context token budget", context_budget, "give at least the tokens of an ordinary sample"),
            ("block token budget", block_budget, "give at least anchors x block size of an ordinary sample"),
        ):
            if value < 1:
                raise ConfigError(f"{name}: got {value}, allowed 1 or more; {remedy}")
        for name, column, least in (("lengths", lengths, 1), ("block tokens", block_tokens, 0)):
            if column.shape != (len(ids),) or (column.size and column.min() < least):
                raise ValueError(f"{name}: got {list(column.shape)} for {len(ids)} ids, each must be >= {least}")
        shared = buckets if strata is None else strata
        order = epoch_order(ids, shared, seed=seed, epoch=epoch)
        self.order = level_steps(order, lengths, shared, batch_samples=batch_samples)
        self.seed, self.epoch = seed, epoch
        self.batch_samples = batch_samples
        self.context_budget, self.block_budget = context_budget, block_budget
        self._ids, self._lengths, self._buckets, self._block_tokens = ids, lengths, buckets, block_tokens
        self._strata = strata

    def __len__(self) -> int:
        """Count the steps of the epoch."""
        return (self.order.size + self.batch_samples - 1) // self.batch_samples

    def __iter__(self) -> Iterator[Step]:
        return (self.step(index) for index in range(len(self)))

    def samples(self, index: int) -> Int64s:
        """Return the rows of step `index` in the order of the epoch, int64 `[G]` (fewer in the last)."""
        if not 0 <= index < len(self):
            raise IndexError(f"step {index}: the plan has {len(self)} steps, counted from 0")
        return self.order[index * self.batch_samples : (index + 1) * self.batch_samples]

    def step(self, index: int) -> Step:
        """Compute step `index`: each sample of `samples(index)` stands in exactly one microbatch."""
        rows = self.samples(index)
        rows = rows[np.lexsort((rows, self._lengths[rows], self._buckets[rows]))]
        lengths, buckets, block_tokens = self._lengths[rows], self._buckets[rows], self._block_tokens[rows]
        edges = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), rows.size]
        spans: list[tuple[int, int]] = []
        for start, end in pairwise(edges):
            ends = cut_group(
                lengths[start:end],
                block_tokens[start:end],
                context_budget=self.context_budget,
                block_budget=self.block_budget,
            )
            spans.extend(pairwise([start, *(start + each for each in ends)]))
        places = merge_buckets(
            np.arange(len(spans), dtype=np.uint64),
            buckets[[start for start, _ in spans]],
            seed=hash_words(self.seed, self.epoch),
            epoch=index,
        )
        microbatches = []
        for at, i in enumerate(places.tolist()):
            start, end = spans[i]
            width, blocks = int(lengths[end - 1]), int(block_tokens[start:end].sum())
            cost = (end - start) * width + BLOCK_COST * blocks + BATCH_COST
            microbatches.append(Microbatch(at, rows[start:end], int(buckets[start]), width, blocks, cost))
        return Step(index, tuple(microbatches))

    @cached_property
    def samples_fingerprint(self) -> str:
        """Hash all that decides which samples each step holds (xxh3, 128 bits, hex).

        A run can be resumed while this is the same, whatever its budgets, ranks or workers.
        """
        settings = f"{_FORMAT} {self.seed} {self.epoch} {self.batch_samples} {len(self._ids)}"
        digest = xxhash.xxh3_128(f"dflash steps {settings}".encode())
        digest.update(np.ascontiguousarray(self._ids, dtype="<u8").data)
        digest.update(np.ascontiguousarray(self._lengths, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self._buckets, dtype="<i8").data)
        if self._strata is not None:
            digest.update(np.ascontiguousarray(self._strata, dtype="<i8").data)
        return digest.hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """Hash all that decides the plan, the microbatches included (xxh3, 128 bits, hex)."""
        budgets = f"{self.context_budget} {self.block_budget} {BATCH_COST} {BLOCK_COST}"
        digest = xxhash.xxh3_128(f"dflash microbatches {self.samples_fingerprint} {budgets}".encode())
        digest.update(np.ascontiguousarray(self._block_tokens, dtype="<i8").data)
        return digest.hexdigest()


def cut_group(lengths: Int64s, block_tokens: Int64s, *, context_budget: int, block_budget: int) -> list[int]:
    """Cut samples sorted by length into microbatches at the least cost.

    `least[j]`, the least cost of the first j samples, is the minimum of `least[i] + (j-i) * lengths[j-1] +
    BATCH_COST` over the i that keep samples i..j-1 within both budgets. Those only move up with j, and so does the
    best of them: what i + 1 saves over i, a `lengths[j-1]`, only grows.

    Args:
        lengths: int64 `[n]`, ascending, n >= 1.
        block_tokens: int64 `[n]`.
        context_budget: the most padded tokens of a microbatch of two or more samples.
        block_budget: the most block tokens of such a microbatch.

    Returns:
        Where each microbatch ends, ascending; the last is n.
    """
    count = int(lengths.size)
    widths = lengths.tolist()
    blocks = [0, *accumulate(block_tokens.tolist())]
    least = [0]
    begins = [0]
    first = 0
    for j in range(1, count + 1):
        width = widths[j - 1]
        while first < j - 1 and ((j - first) * width > context_budget or blocks[j] - blocks[first] > block_budget):
            first += 1
        # A longer batch has the larger multiple of `width`: minimise least[i] - i * width.
        best = max(first, begins[-1])
        lowest = least[best] - best * width
        for i in range(best + 1, j):
            candidate = least[i] - i * width
            if candidate < lowest:
                best, lowest = i, candidate
        least.append(lowest + j * width + BATCH_COST)
        begins.append(best)
    ends = []
    end = count
    while end:
        ends.append(end)
        end = begins[end]
    return ends[::-1]


def assign(step: Step, workers: int) -> list[list[int]]:
    """Give a step's microbatches to workers: the costliest first, each to the worker with the least so far.

    (Graham's LPT rule, 1969: the busiest worker has at most 4/3 - 1/(3 workers) of the best possible.) Ties
    go to the earlier microbatch and to the lower worker.

    Args:
        step: what to share out.
        workers: how many there are, at least 1. With more workers than microbatches some get none.

    Returns:
        For each worker the `index_in_step` of its microbatches, in plan order.

    Raises:
        ValueError: `workers` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers: got {workers}, expected 1 or more")
    load = [(0, worker) for worker in range(workers)]
    shares: list[list[int]] = [[] for _ in range(workers)]
    for batch in sorted(step.microbatches, key=lambda batch: (-batch.cost, batch.index_in_step)):
        cost, worker = load[0]
        heapq.heapreplace(load, (cost + batch.cost, worker))
        shares[worker].append(batch.index_in_step)
    return [sorted(share) for share in shares]
