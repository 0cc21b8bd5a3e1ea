"""Batches for drafters straight from the targets: what `loader.Prefetch` makes of a store, without one.

    planned steps ─> gate ─> BatchPrefetcher ─> target queue ─> TargetForwardLoop x T ─> BucketedHSQueue ─> take_batch
                  (steps ahead) (bytes, places)                                                               │
                                      ^                                                                       │
                                      └──────────────── InflightWindow <── release <── MixedBatch <───────────┘

A target's batch is a drafter's microbatch. Bytes and a place are taken in plan order before a batch goes to a target,
and given back when its gradient is taken; so the earliest batch that is not used yet is always in flight or next in
line, and no put waits. Drafters take by number, in plan order, so a run repeats itself to the bit.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.buckets import Batch, Microbatch
from dflash_tool.errors import TargetError
from dflash_tool.extractor import BatchPrefetcher, TargetBatch, TargetForwardLoop, TargetQueue
from dflash_tool.loader import LoaderClosed, MixedBatch, PlannedStep
from dflash_tool.pipeline.targets import start_targets, start_thread
from dflash_tool.pipeline.tee import Tee, when_all_have
from dflash_tool.queue import BucketedHSQueue, Item, QueueClosed
from dflash_tool.schemas.config import LayerId
from dflash_tool.store.samples import Samples
from dflash_tool.target import PaddedStates, Way, way
from dflash_tool.window import InflightWindow

Int64s = NDArray[np.int64]
_LOOK_SECONDS = 1.0
HANG_SECONDS = 600.0


class LiveTarget(Protocol):
    """What a live run needs of a target (`target.TargetModel`; a stub in tests)."""

    device: torch.device

    def capture_padded(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], layers: Sequence[LayerId], to: Way
    ) -> PaddedStates:
        """Hidden states of one batch, on their way; see `TargetModel.capture_padded`."""
        ...


@dataclass(frozen=True)
class _Planned:
    """A batch that is dispatched and not taken yet. device: of the drafter that will take it."""

    epoch: int
    microbatch: Microbatch
    device: torch.device


@dataclass(kw_only=True)
class LiveFeed:
    """What makes batches in a live run; called by the loader for a source of the steps that are left.

    layers: what the targets capture; drafters: the device of each, where its batches go; row_bytes: of one token over
    all layers; steps_ahead: steps that may be dispatched and unfinished; on_quarantine: told the rows of samples with
    NaN or Inf states, may raise; tee: gets what passes in the first epoch; hang_seconds: after which a target that is
    at one batch is given up; source: the newest one.
    """

    targets: Mapping[str, LiveTarget]
    samples: Samples
    layers: tuple[LayerId, ...]
    drafters: tuple[torch.device, ...]
    row_bytes: int
    limit_bytes: int
    places: int
    steps_ahead: int
    on_quarantine: Callable[[Int64s], None]
    tee: Tee | None = None
    hang_seconds: float = HANG_SECONDS
    source: "LiveSource | None" = None

    def __call__(self, steps: Iterator[PlannedStep], layers: tuple[int, ...]) -> "LiveSource":
        """Batches of these steps with these of the captured layers."""
        self.source = LiveSource(self, steps, layers)
        return self.source


class LiveSource:
    """Batches of planned steps from a feed's targets: a `loader.BatchSource`."""

    def __init__(self, feed: LiveFeed, steps: Iterator[PlannedStep], layers: tuple[int, ...]) -> None:
        self.window = InflightWindow(feed.limit_bytes, feed.places)
        self.gate = InflightWindow(feed.steps_ahead, feed.steps_ahead)  # a step counts 1
        self.states: BucketedHSQueue[PaddedStates] = BucketedHSQueue()
        self._steps: BucketedHSQueue[PlannedStep] = BucketedHSQueue()
        self._batches: TargetQueue = TargetQueue()
        self._feed = feed
        self._order = (*layers, *(layer for layer in feed.layers if layer not in layers))
        self._shown = len(layers)
        self._planned: dict[int, _Planned] = {}
        self.loops = {
            name: TargetForwardLoop(capture=self._capture(target), source=self._batches, out=self.states)
            for name, target in feed.targets.items()
        }
        self._prefetcher = BatchPrefetcher(
            batches=self._dispatched(steps),
            held=np.zeros(len(feed.samples), np.bool_),
            lengths=feed.samples.lengths.astype(np.int64),
            tokens=feed.samples.tokens,
            row_bytes=feed.row_bytes,
            window=self.window,
            out=self._batches,
        )
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def start(self) -> None:
        """Start prefetcher, targets and watchdog."""
        self._threads = [
            start_thread("prefetcher", self._prefetcher.run, self.abort),
            *start_targets(self.loops, self.states, self.abort),
            start_thread("watchdog", self._watch, self.abort),
        ]

    def take_step(self, number: int) -> PlannedStep | None:
        """See `BatchSource`. Asking for a step finishes the one before, and lets another be dispatched."""
        if number:
            self.gate.release(0, 1)
        try:
            return self._steps.take(number).payload
        except QueueClosed:
            return None

    def take_batch(self, number: int) -> MixedBatch:
        """See `BatchSource`. Samples that were quarantined are left out."""
        item = self.states.take(number)
        return self._batch(self._planned.pop(number), item)

    def abort(self, error: BaseException) -> None:
        """See `BatchSource`."""
        self._over.set()
        for part in (self.window, self.gate, self._steps, self._batches, self.states):
            part.abort(error)

    def close(self) -> None:
        """End the threads. One that hangs in its target is left behind: it dies with the process."""
        self.abort(LoaderClosed())
        hanging = {name for name, _, _ in self._hanging()}
        for thread in self._threads:
            if thread.name not in hanging:
                thread.join()

    def waited(self) -> float:
        """See `BatchSource`."""
        return self._steps.counters().get_seconds + self.states.counters().get_seconds

    def peak_bytes(self) -> int:
        """See `BatchSource`."""
        return self.window.peak

    def _dispatched(self, steps: Iterator[PlannedStep]) -> Iterator[Batch]:
        """The targets' batches, no more than `steps_ahead` steps ahead. Runs in the prefetcher's thread."""
        number = 0
        for place, step in enumerate(steps):
            self.gate.acquire(0, 1)
            self._steps.put(Item(place, 0, 0, step))
            for microbatch, drafter in zip(step.microbatches, step.drafters, strict=True):
                self._planned[number] = _Planned(step.epoch, microbatch, self._feed.drafters[drafter])
                yield Batch(number, microbatch.rows, microbatch.bucket, microbatch.width)
                number += 1
        self._steps.close()

    def _capture(self, target: LiveTarget) -> Callable[[TargetBatch], PaddedStates]:
        """What a target does with a batch: its states go to the device of the drafter that will take them."""
        ways = {device: way(target.device, device) for device in self._feed.drafters}

        def capture(work: TargetBatch) -> PaddedStates:
            planned = self._planned[work.batch.index]
            return target.capture_padded(work.input_ids, work.lengths, self._order, ways[planned.device])

        return capture

    def _batch(self, planned: _Planned, item: Item[PaddedStates]) -> MixedBatch:
        """An item as a drafter takes it, without the samples that were quarantined."""
        samples, microbatch, sent = self._feed.samples, planned.microbatch, item.payload
        rows, quarantined = microbatch.rows[sent.finite], microbatch.rows[~sent.finite]
        if quarantined.size:
            self._feed.on_quarantine(quarantined)
        lengths = samples.lengths[rows].astype(np.int64)
        shape = sent.states.shape[1:3]
        input_ids, loss_mask = np.zeros(shape, np.int64), np.zeros(shape, np.uint8)
        for place, row in enumerate(rows.tolist()):
            input_ids[place, : lengths[place]] = samples.tokens(row)
            loss_mask[place, : lengths[place]] = samples.mask(row)
        tee = self._feed.tee if planned.epoch == 0 else None
        release = when_all_have(1 if tee is None else 2, partial(self.window.release, item.bucket, item.nbytes))
        batch = MixedBatch(
            index_in_step=microbatch.index_in_step,
            bucket=item.bucket,
            rows=rows,
            sample_ids=samples.ids[rows],
            copies=samples.copies[rows],
            lengths=torch.from_numpy(lengths),
            input_ids=torch.from_numpy(input_ids),
            loss_mask=torch.from_numpy(loss_mask),
            states=sent.states[: self._shown],
            arrival=sent.arrival,
            on_release=release,
        )
        if tee is not None:
            tee.write(batch, self._order, sent.arrival.fetch, quarantined, release)
        return batch

    def _hanging(self) -> list[tuple[str, int, float]]:
        """Targets that have been at one batch for too long: name, its tokens, seconds."""
        now = time.monotonic()
        at_work = ((name, loop.counters.at_work) for name, loop in self.loops.items())
        return [
            (name, work[0], now - work[1])
            for name, work in at_work
            if work is not None and now - work[1] > self._feed.hang_seconds
        ]

    def _watch(self) -> None:
        """Stop the run if a target hangs."""
        while not self._over.wait(min(_LOOK_SECONDS, self._feed.hang_seconds)):
            for name, tokens, seconds in self._hanging():
                raise TargetError(
                    f"{name} has been at one batch of {tokens:,} tokens for {seconds:.0f} s: it hangs. Look at that "
                    "device, then run the same command to go on"
                )
