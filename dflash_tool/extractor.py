"""The target side of the pipeline: a prefetcher that hands out batches, and a loop that runs them.

1. `BatchPrefetcher`: planned batches, in plan order; takes each one's predicted bytes and a place of its bucket from
   the in-flight window, pads its token ids, puts it in the shared target queue.
2. `TargetForwardLoop`, one for each target device: takes whatever comes next (a free target never waits for a slow
   one), captures the hidden states, puts one item in the bucketed queue: exactly one for each batch, even if it holds
   no samples.

Whoever gets the item owes the window its `nbytes`. Neither loop knows where the hidden states go.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import Batch
from dflash_tool.queue import BucketedHSQueue, Item, QueueClosed
from dflash_tool.schemas.config import LayerId
from dflash_tool.target import Captured
from dflash_tool.window import InflightWindow


@dataclass(frozen=True, kw_only=True)
class TargetBatch:
    """A batch on its way to a target.

    input_ids: [B, S] int64, padded with zeros on the right; lengths: [B]; keep: [B] bool, samples whose rows are
    wanted (the others are in the store already and only keep the batch's shape).
    """

    batch: Batch
    input_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keep: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """The payload of one queue item.

    samples: rows in samples.arrow of the K kept samples; lengths: [K]; states: layer id -> [T, H], their rows one
    after the other; quarantined: samples of the batch left out because a state was NaN or Inf; real_tokens,
    padded_tokens: what the whole batch cost the target.
    """

    samples: NDArray[np.int64]
    lengths: NDArray[np.int64]
    states: dict[LayerId, NDArray[Any]]
    quarantined: NDArray[np.int64]
    real_tokens: int
    padded_tokens: int


class Target(Protocol):
    """What `capture_rows` needs of a target (`target.TargetModel`; a stub in tests)."""

    def capture(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], keep: NDArray[np.bool_] | None = None
    ) -> Captured:
        """Hidden states of one batch; see `TargetModel.capture`."""
        ...


T = TypeVar("T")
TargetQueue = BucketedHSQueue[TargetBatch]
StateQueue = BucketedHSQueue[HiddenStates]


@dataclass(frozen=True, kw_only=True)
class BatchPrefetcher:
    """Hands planned batches to the targets, as far ahead as the window lets it.

    batches: what is left to do, in plan order; held: bool by sample row, already in the store; tokens: row -> token
    ids [length] int32; row_bytes: bytes of one token's rows over all stored layers.
    """

    batches: Iterable[Batch]
    held: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    tokens: Callable[[int], NDArray[np.int32]]
    row_bytes: int
    window: InflightWindow
    out: TargetQueue

    def run(self) -> None:
        """Dispatch everything, then close the target queue."""
        for batch in self.batches:
            nbytes = batch.padded_tokens * self.row_bytes
            self.window.acquire(batch.bucket, nbytes)
            self.out.put(Item(index=batch.index, bucket=0, nbytes=nbytes, payload=self._pad(batch)))
        self.out.close()

    def _pad(self, batch: Batch) -> TargetBatch:
        input_ids = np.zeros((len(batch.rows), batch.width), np.int64)
        lengths = self.lengths[batch.rows]
        for place, row in enumerate(batch.rows):
            input_ids[place, : lengths[place]] = self.tokens(int(row))
        return TargetBatch(batch=batch, input_ids=input_ids, lengths=lengths, keep=~self.held[batch.rows])


@dataclass(kw_only=True)
class TargetCounters:
    """What one target has done so far; read by others while it runs. Seconds are wall seconds."""

    tokens: int = 0  # real ones
    computing: float = 0.0
    waiting: float = 0.0  # for a batch
    padded_tokens: int = 0
    at_work: tuple[int, float] | None = None  # padded tokens of the batch it is at, and since when
    free_since: float | None = None  # while it waits


@dataclass(frozen=True, kw_only=True)
class TargetForwardLoop(Generic[T]):
    """Runs one target over whatever the shared queue hands it, until that is closed and empty.

    capture: runs the target over a batch; what it returns becomes the item's payload.
    """

    capture: Callable[[TargetBatch], T]
    source: TargetQueue
    out: BucketedHSQueue[T]
    counters: TargetCounters = field(default_factory=TargetCounters)

    def run(self) -> None:
        """Take, capture, put."""
        counters = self.counters
        free_since = counters.free_since = time.monotonic()
        for work in iter_queue(self.source):
            began = time.monotonic()
            counters.free_since = None
            counters.waiting += began - free_since
            counters.at_work = work.payload.batch.padded_tokens, began
            states = self.capture(work.payload)
            ended = time.monotonic()
            counters.at_work = None
            self.out.put(Item(work.index, work.payload.batch.bucket, work.nbytes, states))
            del states  # the queue's alone
            counters.computing += ended - began
            counters.tokens += int(work.payload.lengths.sum())
            counters.padded_tokens += work.payload.batch.padded_tokens
            free_since = counters.free_since = time.monotonic()
        counters.free_since = None


def capture_rows(target: Target, work: TargetBatch) -> HiddenStates:
    """Run a target over a batch: the rows of the kept samples whose states are finite, on the host."""
    captured = target.capture(work.input_ids, work.lengths, work.keep)
    samples, lengths = work.batch.rows[work.keep], work.lengths[work.keep]
    states = captured.states
    if not captured.finite.all():
        rows = np.repeat(captured.finite, lengths)
        states = {layer: values[rows] for layer, values in states.items()}
    return HiddenStates(
        samples=samples[captured.finite],
        lengths=lengths[captured.finite],
        states=states,
        quarantined=samples[~captured.finite],
        real_tokens=int(work.lengths.sum()),
        padded_tokens=work.batch.padded_tokens,
    )


def iter_queue(queue: BucketedHSQueue[T]) -> Iterator[Item[T]]:
    """Items as `get` serves them, until the queue is closed and empty. Raises what `abort` was given."""
    while True:
        try:
            yield queue.get()  # and keep nothing: its memory may be given up while the next one is waited for
        except QueueClosed:
            return
