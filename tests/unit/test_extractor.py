"""Prefetcher and target loop with stub targets: what is in flight, who is served, what an item holds."""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_tool.buckets import assign_buckets, choose_edges, epoch_order, extraction_batches
from dflash_tool.extractor import BatchPrefetcher, StateQueue, TargetForwardLoop, TargetQueue, capture_rows, iter_queue
from dflash_tool.target import Captured
from dflash_tool.window import InflightWindow

ROW_BYTES = 8
LAYER = 3


class StubTarget:
    """Its hidden state of a token is (token id, its position); tokens of `spoiled` samples give NaN."""

    def __init__(self, *, spoiled: int = -1, before: Callable[[], None] = lambda: None) -> None:
        self.spoiled = spoiled
        self.before = before

    def capture(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], keep: NDArray[np.bool_] | None = None
    ) -> Captured:
        self.before()
        assert keep is not None
        kept = np.flatnonzero(keep)
        rows = [np.stack([input_ids[b, :n], np.arange(n)], 1) for b, n in zip(kept, lengths[kept], strict=True)]
        states = np.concatenate([*rows, np.empty((0, 2))]).astype(np.float32)
        finite = np.array([not (input_ids[b, : lengths[b]] == self.spoiled).any() for b in kept], np.bool_)
        return Captured(states={LAYER: states}, finite=finite)


class Ledger(InflightWindow):
    """The window, and beside it an account of our own: what was handed out and not yet given back."""

    def __init__(self, limit_bytes: int, places: int) -> None:
        super().__init__(limit_bytes, places)
        self.changed = threading.Condition()
        self.open: list[tuple[int, int]] = []
        self.acquired = 0
        self.most = 0

    def acquire(self, bucket: int, nbytes: int) -> None:
        super().acquire(bucket, nbytes)
        with self.changed:
            self.open.append((bucket, nbytes))
            self.acquired += 1
            self.most = max(self.most, sum(size for _, size in self.open))
            self.changed.notify_all()

    def release(self, bucket: int, nbytes: int) -> None:
        with self.changed:
            self.open.remove((bucket, nbytes))
        super().release(bucket, nbytes)

    def would_block(self, bucket: int, nbytes: int) -> bool:
        used = sum(size for _, size in self.open)
        return used + nbytes > self.limit_bytes or [b for b, _ in self.open].count(bucket) >= self.places


def _plan(samples: int = 300) -> tuple[NDArray[np.int64], list]:
    rng = np.random.default_rng(1)
    lengths = np.minimum(90, 2 + rng.lognormal(3, 0.7, samples)).astype(np.int64)
    buckets = assign_buckets(lengths, choose_edges(lengths, 4))
    ids = rng.integers(0, 2**63, (samples, 2)).astype(np.uint64)
    order = epoch_order(ids, buckets, seed=0, epoch=0)
    return lengths, extraction_batches(order, lengths, buckets, batch_tokens=200)


def _tokens(row: int, lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return (np.arange(lengths[row]) + 1000 * row).astype(np.int32)


def _start(*runs: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    return threads


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("slow", ["writer", "target"])
@pytest.mark.parametrize(("limit_batches", "places"), [(1, 9), (3, 9), (100, 1), (5, 2)])
def test_in_flight_never_passes_the_window(slow: str, limit_batches: int, places: int) -> None:
    """The slow side moves only once the other one has gone as far ahead as the window lets it."""
    lengths, batches = _plan()
    largest = max(batch.padded_tokens for batch in batches) * ROW_BYTES
    window = Ledger(limit_batches * largest, places)
    targets, states = TargetQueue(), StateQueue()

    def wait_until_the_prefetcher_is_stopped() -> None:
        with window.changed:

            def stopped() -> bool:
                following = batches[window.acquired : window.acquired + 1]
                return not following or window.would_block(following[0].bucket, following[0].padded_tokens * ROW_BYTES)

            assert window.changed.wait_for(stopped, timeout=60)

    target = StubTarget(before=wait_until_the_prefetcher_is_stopped if slow == "target" else lambda: None)
    prefetcher = BatchPrefetcher(
        batches=batches, held=np.zeros(len(lengths), np.bool_), lengths=lengths,
        tokens=lambda row: _tokens(row, lengths), row_bytes=ROW_BYTES, window=window, out=targets,
    )  # fmt: skip
    loop = TargetForwardLoop(capture=partial(capture_rows, target), source=targets, out=states)
    threads = _start(prefetcher.run, lambda: (loop.run(), states.close()))
    seen: list[int] = []
    for item in iter_queue(states):
        if slow == "writer":
            wait_until_the_prefetcher_is_stopped()
        assert sum(size for _, size in window.open) <= window.limit_bytes
        seen += item.payload.samples.tolist()
        window.release(item.bucket, item.nbytes)
    _join(threads)
    assert sorted(seen) == list(range(len(lengths)))
    assert window.most <= window.peak <= window.limit_bytes  # the ledger hears of an acquire a moment later
    assert window.in_flight == 0
    if limit_batches > 1 or slow == "writer":
        assert window.most > largest / 2


def test_items_hold_the_rows_of_their_samples() -> None:
    """Held samples stay out, spoiled ones are named; every batch gives one item."""
    lengths, batches = _plan(80)
    held = np.arange(80) % 3 == 0
    window = InflightWindow(10**9, 1000)
    targets, states = TargetQueue(), StateQueue()
    prefetcher = BatchPrefetcher(
        batches=batches, held=held, lengths=lengths, tokens=lambda row: _tokens(row, lengths),
        row_bytes=ROW_BYTES, window=window, out=targets,
    )  # fmt: skip
    prefetcher.run()
    TargetForwardLoop(capture=partial(capture_rows, StubTarget(spoiled=7000)), source=targets, out=states).run()
    states.close()
    items = list(iter_queue(states))
    assert sorted(item.index for item in items) == [batch.index for batch in sorted(batches, key=lambda b: b.index)]
    widths = {batch.index: len(batch.rows) * lengths[batch.rows].max() for batch in batches}  # padding is in flight too
    assert {item.index: item.nbytes for item in items} == {i: tokens * ROW_BYTES for i, tokens in widths.items()}
    assert window.in_flight == sum(widths.values()) * ROW_BYTES > lengths.sum() * ROW_BYTES
    quarantined = np.concatenate([item.payload.quarantined for item in items])
    assert quarantined.tolist() == [7]
    for item in items:
        start = 0
        for sample, length in zip(item.payload.samples, item.payload.lengths, strict=True):
            assert not held[sample]
            rows = item.payload.states[LAYER][start : start + length]
            np.testing.assert_array_equal(rows[:, 0], _tokens(sample, lengths))
            np.testing.assert_array_equal(rows[:, 1], np.arange(length))
            start += length
        assert start == len(item.payload.states[LAYER])
    stored = np.concatenate([item.payload.samples for item in items])
    assert sorted(stored.tolist()) == [row for row in range(80) if not held[row] and row != 7]
