"""Reads batches ahead of their consumer: a few threads, one ring of memory, two queues in plan order.

There is no dispatcher: a free thread draws the next *samples*, about 4 MiB, under a lock; the one that draws the
first of a batch takes the batch's memory and waits for it there (the others wait for the lock: there is nothing
else to do). So all threads work on the batch that is needed next, even if the ring holds only one. Whoever finishes
a batch's last sample puts it into the queue, from which the consumer takes it by number.

No deadlock: batches take memory in the order in which they are consumed, and no put ever waits.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.buckets import Microbatch
from dflash_tool.loader.batch import MixedBatch
from dflash_tool.loader.reader import SampleReader
from dflash_tool.loader.ring import Region, Ring, aligned
from dflash_tool.queue import BucketedHSQueue, Item, QueueClosed
from dflash_tool.schemas.config import StoreDtype
from dflash_tool.store.reader import Located

Int64s = NDArray[np.int64]

_TORCH_DTYPE: dict[StoreDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_ID_BYTES, _MASK_BYTES = 8, 1
_DRAWN_BYTES = 4 << 20


class LoaderClosed(Exception):  # noqa: N818 - not a fault, and nothing a user should meet
    """The loader was closed, or its iteration dropped, before the step was read to its end."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """An optimizer step to be read.

    rows: int64 `[G]`, sample rows of the whole step in the order of the epoch; microbatches: those of this rank, in
    plan order, with sample rows in `rows`; drafters: which local drafter takes each; fingerprint: the plan's
    `samples_fingerprint`.
    """

    epoch: int
    index: int
    rows: Int64s
    microbatches: tuple[Microbatch, ...]
    drafters: tuple[int, ...]
    fingerprint: str


def batch_bytes(padded_tokens: int, row_bytes: int) -> int:
    """Bytes of a batch in the ring: token ids, hidden states, mask. `row_bytes`: of one token over its layers."""
    return aligned(aligned(_ID_BYTES * padded_tokens) + row_bytes * padded_tokens + _MASK_BYTES * padded_tokens)


class Prefetch:
    """Reads `steps` ahead, from `start` to `close`. The consumer takes everything in order.

    `waited`, `peak_bytes`: the consumer's seconds and the ring's bytes so far. `close` must be called in the end.
    """

    def __init__(
        self, steps: Iterator[PlannedStep], reader: SampleReader, *, memory: NDArray[np.uint8], threads: int
    ) -> None:
        self._reader = reader
        self._ring = Ring(memory)
        self._steps: BucketedHSQueue[PlannedStep] = BucketedHSQueue()
        self._batches: BucketedHSQueue[MixedBatch] = BucketedHSQueue()
        self._work = self._microbatches(steps)
        self._drawing = threading.Lock()
        self._loading: _Loading | None = None
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"loader-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def take_step(self, number: int) -> PlannedStep | None:
        """Wait for the next step: they are numbered from 0. None after the last one.

        Raises:
            LoaderClosed: `close` was called.
            BaseException: the first error of a thread, or what `abort` was given.
        """
        try:
            return self._steps.take(number).payload
        except QueueClosed:
            return None

    def take_batch(self, number: int) -> MixedBatch:
        """Wait for the next batch: they are numbered from 0 over all steps. Raises as `take_step` does."""
        return self._batches.take(number).payload

    def abort(self, error: BaseException) -> None:
        """Stop reading and let the consumer's takes raise `error`. The first call wins."""
        self._stopping = True
        self._steps.abort(error)
        self._batches.abort(error)
        self._ring.window.abort(error)

    def close(self) -> None:
        """Stop reading and wait for the threads to end, each after the sample at hand. Again: does nothing."""
        self.abort(LoaderClosed())
        for thread in self._threads:
            if thread.ident is not None:  # started
                thread.join()

    def waited(self) -> float:
        """Seconds the consumer has waited so far."""
        return self._steps.counters().get_seconds + self._batches.counters().get_seconds

    def peak_bytes(self) -> int:
        """The most bytes that were in flight at once."""
        return self._ring.window.peak

    # Everything below runs in the reading threads.

    def _run(self) -> None:
        try:
            while (drawn := self._draw()) is not None:
                loading, places = drawn
                if loading.read(places, self._reader):
                    batch = loading.batch(self._reader, self._ring)
                    self._batches.put(Item(loading.number, batch.bucket, 0, batch))
        except BaseException as error:  # handed to the consumer, whatever it is
            self.abort(error)

    def _draw(self) -> "tuple[_Loading, range] | None":
        """The next samples to read: their batch and their places there. None when there is nothing left to do."""
        with self._drawing:
            while not self._stopping:
                if self._loading is not None and self._loading.undrawn:
                    return self._loading, self._loading.draw()
                planned = next(self._work, None)
                if planned is None:
                    return None
                number, microbatch, samples = planned
                region = self._ring.take(
                    microbatch.bucket, batch_bytes(microbatch.padded_tokens, self._reader.row_bytes)
                )
                self._loading = _Loading(number, microbatch, samples, region, self._reader)
        return None

    def _microbatches(self, steps: Iterator[PlannedStep]) -> Iterator[tuple[int, Microbatch, list[Located]]]:
        """All microbatches, numbered, with where their samples are: found for a whole step, as long as it is quick."""
        number = 0
        for place, step in enumerate(steps):
            self._steps.put(Item(place, 0, 0, step))
            located = [[self._reader.store.locate(row) for row in batch.rows.tolist()] for batch in step.microbatches]
            for microbatch, samples in zip(step.microbatches, located, strict=True):
                yield number, microbatch, samples
                number += 1
        self._steps.close()


class _Loading:
    """A batch that is being read: its memory, and how many samples are still to draw and to read."""

    def __init__(
        self, number: int, microbatch: Microbatch, samples: list[Located], region: Region, reader: SampleReader
    ) -> None:
        self.number = number
        self._microbatch, self._samples, self._region = microbatch, samples, region
        self._rows: list[int] = microbatch.rows.tolist()
        count, width = len(samples), microbatch.width
        store, tokens = reader.store, microbatch.padded_tokens
        start = aligned(_ID_BYTES * tokens)
        end = start + reader.row_bytes * tokens
        memory = region.memory
        self._input_ids = memory[: _ID_BYTES * tokens].view(np.int64).reshape(count, width)
        states = memory[start:end].view(store.dtype)
        self._states = states.reshape(len(reader.layers), count, width, store.width)
        self._loss_mask = memory[end : end + tokens].reshape(count, width)
        self._row_bytes = store.width * store.dtype.itemsize
        self._layers = [
            (layer, of_all.data.cast("B")) for layer, of_all in zip(reader.layers, self._states, strict=True)
        ]
        self._lock = threading.Lock()
        self._at_once = max(1, _DRAWN_BYTES // (reader.row_bytes * width))
        self.undrawn = self._unread = count

    def draw(self) -> range:
        """The places of samples that nobody reads yet, the longest. Needs the drawing lock."""
        end = self.undrawn
        self.undrawn = max(0, end - self._at_once)
        return range(self.undrawn, end)

    def read(self, places: range, reader: SampleReader) -> bool:
        """Read samples into their places; returns whether those were the last ones of the batch."""
        width = self._microbatch.width
        for place in places:
            sample = self._samples[place]
            begin = place * width * self._row_bytes
            end = begin + sample.length * self._row_bytes
            reader.read(self._rows[place], sample, {layer: view[begin:end] for layer, view in self._layers})
            if sample.length < width:
                self._states[:, place, sample.length :] = 0
        with self._lock:
            self._unread -= len(places)
            return self._unread == 0

    def batch(self, reader: SampleReader, ring: Ring) -> MixedBatch:
        """The whole batch as tensors, once everything is read."""
        samples, rows, region = reader.store.samples, self._microbatch.rows, self._region
        self._input_ids[:], self._loss_mask[:] = 0, 0
        for row, input_ids, loss_mask in zip(self._rows, self._input_ids, self._loss_mask, strict=True):
            tokens = samples.tokens(row)
            input_ids[: len(tokens)], loss_mask[: len(tokens)] = tokens, samples.mask(row)
        states = torch.from_numpy(self._states)
        return MixedBatch(
            index_in_step=self._microbatch.index_in_step,
            bucket=self._microbatch.bucket,
            rows=rows,
            sample_ids=samples.ids[rows],
            copies=samples.copies[rows],
            lengths=torch.from_numpy(samples.lengths[rows].astype(np.int64)),
            input_ids=torch.from_numpy(self._input_ids),
            loss_mask=torch.from_numpy(self._loss_mask),
            states=states.view(_TORCH_DTYPE[reader.store.manifest.store_dtype]),
            on_release=lambda: ring.give_back(region),
        )
