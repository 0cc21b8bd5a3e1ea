"""`MixingLoader`: a store (or several as one) and its plans -> optimizer steps, resumable at any step.

    for step in loader:             # from state_dict() on, over all epochs
        for batch in step:          # this rank's microbatches, in plan order
            inputs = batch.to(device, torch.float32)
            ...
        optimizer.step()
        save(loader.state_dict())   # this step is consumed: its last batch has been used

Asking for the next batch (or for the end of the step) gives the memory of the last one back; so does
`batch.release()`. Several drafters of one process iterate over `step.shares`, each in a thread of its own. Which
samples a step holds is the plan's word alone: threads, window, drafters, ranks and microbatch budgets don't enter.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import Microbatch, StepPlan, assign
from dflash_tool.errors import ConfigError, DataError, StoreError
from dflash_tool.loader.batch import MixedBatch
from dflash_tool.loader.prefetch import LoaderClosed, PlannedStep, Prefetch, batch_bytes
from dflash_tool.loader.reader import SampleReader, VerifyReads
from dflash_tool.loader.ring import ring_memory
from dflash_tool.loader.source import BatchSource, SourceOf
from dflash_tool.loader.step import LoadedStep, LoaderCounters
from dflash_tool.store.follow import Follower
from dflash_tool.store.joined import AnyStore

Int64s = NDArray[np.int64]


class MixingLoader:
    """Iterates over optimizer steps, reading ahead with `threads` threads within `window_bytes` bytes.

    A context manager; `close` (or leaving an iteration) joins the threads. One consumer, one iteration at a time.

    Args:
        store: opened; its samples in `rows` must be committed or quarantined (then they are left out where they
            stand), unless there is a `follower`.
        rows: int64 `[M]`, sample rows that are trained on; row i of a plan is sample row `rows[i]`.
        plan_of: the plan of an epoch, a pure function (see `epoch_plans`); called in a reading thread.
        layers: aux layer ids, strictly ascending, any of the store's.
        epochs: how many there are in all.
        max_steps: that are taken over all epochs, if fewer; no step beyond is read.
        window_bytes: the most bytes of batches that are being read, wait or are in use. Page-locked at once if `pin`.
        threads: that read, at least 1.
        verify: hold rows against their hash the first time they are read, always or never.
        pin: page-locked memory, for CUDA.
        rank, world: of the processes that train together, all with as many drafters.
        drafters: local ones; number d of this rank has `assign(step, world * drafters)[rank * drafters + d]`.
        source_of: where batches come from, if not from the store, of which then only the samples are used.
        follower: of `store`, if it is still being written: each step waits until all its samples are there.

    Raises:
        ConfigError: a layer that the store lacks; a window too small for the largest microbatch the budget allows;
            `threads` or `epochs` below 1.
        DataError: no rows.
        ValueError: wrong `layers`, `verify`, `rank`, `drafters`.
    """

    def __init__(
        self,
        store: AnyStore,
        rows: Int64s,
        plan_of: Callable[[int], StepPlan],
        *,
        layers: tuple[int, ...],
        epochs: int,
        max_steps: int | None = None,
        window_bytes: int,
        threads: int,
        verify: VerifyReads,
        pin: bool = False,
        rank: int = 0,
        world: int = 1,
        drafters: int = 1,
        source_of: SourceOf | None = None,
        follower: Follower | None = None,
    ) -> None:
        if len(rows) == 0:
            raise DataError(f"the store {store.root} has no sample to train on: extract more, or hold out less")
        for name, value in (("loader threads", threads), ("--epochs", epochs)):
            if value < 1:
                raise ConfigError(f"{name}: got {value}, allowed 1 or more")
        if not 0 <= rank < world or drafters < 1:
            raise ValueError(f"rank {rank} of {world}, {drafters} drafters")
        self._reader = SampleReader(store, layers, verify)
        self._rows, self._epochs = rows, epochs
        self._plan_of = lru_cache(maxsize=1)(plan_of)  # where an iteration starts, it has just been asked for
        self._window_bytes, self._threads, self._pin = window_bytes, threads, pin
        self._rank, self._world, self._drafters = rank, world, drafters
        self._source_of = source_of
        self._ending = threading.Lock()
        self._follower = follower
        plan = self._plan_of(0)
        self._check_window(plan, int(store.samples.lengths[rows].max()))
        self._epoch_steps = len(plan)
        self._total_steps = min(epochs * len(plan), max_steps or epochs * len(plan))
        self._position = (0, 0, plan.samples_fingerprint)  # epoch, steps of it that are consumed, plan
        self._prefetch: BatchSource | None = None
        self._memory: NDArray[np.uint8] | None = None  # made once: a second iteration uses it again
        self._error: BaseException | None = None
        self._last: BaseException | None = None
        self._leave = threading.Event()
        self._ended = LoaderCounters(waited=0.0, bytes_read=0, samples_read=0, samples_checked=0, peak_bytes=0)

    def __iter__(self) -> Iterator[LoadedStep]:
        """Yield the steps that are not consumed yet. Each must be read to its end before the next is asked for.

        Batches of an iteration before this one lose their memory.

        Raises (here or from a step): StoreError for a sample that is missing, damaged or changed, naming sample, shard
        and rows; WriterGone, after the last step that can be had, where a growing store stopped growing; RuntimeError
        if a step wasn't read to its end; LoaderClosed after `close`; what `abort` or `end_early` was given.
        """
        self.close()
        epoch, done, _ = self._position
        self._leave = threading.Event()
        source_of = self._source_of or self._read_ahead
        prefetch = self._prefetch = source_of(self._steps(epoch, done), self._reader.layers)
        batch_number = step_number = 0
        try:
            if self._error is not None:
                raise self._error
            prefetch.start()
            while (planned := prefetch.take_step(step_number)) is not None:
                yield LoadedStep(planned, self._shares(prefetch, planned, batch_number), self.abort)
                if self._position != _after(planned):
                    raise RuntimeError(f"step {planned.index} of epoch {planned.epoch} wasn't read to its end")
                batch_number += len(planned.microbatches)
                step_number += 1
            if self._last is not None:
                raise self._last
        finally:
            self._end(prefetch)

    def state_dict(self) -> dict[str, Any]:
        """Say what is consumed: `step` steps of epoch `epoch`, of the plan with this `samples_fingerprint`."""
        epoch, step, fingerprint = self._position
        return {"epoch": epoch, "step": step, "samples_fingerprint": fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on (or back) to where `state_dict` was taken; a running iteration ends. All or nothing.

        Raises:
            ConfigError: the state isn't one of these plans, with the two fingerprints; or out of their range.
        """
        epoch, step, fingerprint = state["epoch"], state["step"], state["samples_fingerprint"]
        if not 0 <= epoch < self._epochs:
            raise ConfigError(
                f"the checkpoint stands in epoch {epoch} (counted from 0), this run has {self._epochs}: "
                "give more --epochs"
            )
        plan = self._plan_of(epoch)
        if fingerprint != plan.samples_fingerprint:
            raise ConfigError(
                f"the checkpoint stands in epoch {epoch} of another plan of steps: samples fingerprint {fingerprint}, "
                f"here {plan.samples_fingerprint} of {len(self._rows)} training samples, seed {plan.seed}, "
                f"--batch-samples {plan.batch_samples}. The store's samples or buckets, --val-fraction, --val-samples, "
                "--seed or --batch-samples differ: use those of the checkpoint, or another --out"
            )
        if not 0 <= step <= len(plan):
            raise ConfigError(f"the checkpoint stands at step {step}, epoch {epoch} has {len(plan)}: it is damaged")
        self.close()
        self._position = (epoch, step, fingerprint)

    def counters(self) -> LoaderCounters:
        """Tell what was done so far, over all iterations."""
        prefetch, reader = self._prefetch, self._reader
        return replace(
            self._ended,
            waited=self._ended.waited + (prefetch.waited() if prefetch else 0.0),
            peak_bytes=max(self._ended.peak_bytes, prefetch.peak_bytes() if prefetch else 0),
            bytes_read=reader.bytes_read,
            samples_read=reader.samples_read,
            samples_checked=reader.samples_checked,
        )

    def abort(self, error: BaseException) -> None:
        """Let the iteration, and any that is begun later, raise `error`, even while it waits. From any thread."""
        self._error = self._error or error
        prefetch = self._prefetch
        if prefetch is not None:
            prefetch.abort(self._error)

    def end_early(self, error: BaseException) -> None:
        """Read no step beyond those at hand; once they are consumed, the iteration raises `error`. From any thread."""
        self._last = self._last or error
        self._leave.set()

    def wait_for(self, rows: Int64s) -> None:
        """Wait until these samples of growing stores are committed or quarantined too; during an iteration.

        Raises what `end_early` was given; StoreError if nobody writes the store any more.
        """
        if self._follower is not None and not self._follower.wait(rows, self._leave):
            raise self._last or LoaderClosed()

    def close(self) -> None:
        """End a running iteration and join its threads. The loader can be iterated again."""
        if self._prefetch is not None:
            self._end(self._prefetch)

    def __enter__(self) -> "MixingLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self, steps: Iterator[PlannedStep], _layers: tuple[int, ...]) -> Prefetch:
        """The source of batches that a store is."""
        if self._memory is None:
            self._memory = ring_memory(self._window_bytes, pin=self._pin)
        return Prefetch(steps, self._reader, memory=self._memory, threads=self._threads)

    def _end(self, prefetch: BatchSource) -> None:
        self._leave.set()
        prefetch.close()
        with self._ending:
            if self._prefetch is prefetch:
                self._ended = self.counters()
                self._prefetch = None

    def _steps(self, epoch: int, done: int) -> Iterator[PlannedStep]:
        """Plan the steps still to do, one at a time. Runs in the reading threads."""
        for number in range(epoch * self._epoch_steps + done, self._total_steps):
            current, index = divmod(number, self._epoch_steps)
            plan = self._plan_of(current)
            rows = self._rows[plan.samples(index)]
            if not self._arrived(rows, current):
                return
            step = plan.step(index)
            first = self._rank * self._drafters
            shares = assign(step, self._world * self._drafters)[first : first + self._drafters]
            drafter_of = sorted((place, drafter) for drafter, share in enumerate(shares) for place in share)
            mine = ((self._of_rows(step.microbatches[place]), drafter) for place, drafter in drafter_of)
            filled = [(batch, drafter) for batch, drafter in mine if batch is not None]
            yield PlannedStep(
                epoch=current,
                index=index,
                rows=rows[~self._reader.store.holes(rows)],
                microbatches=tuple(batch for batch, _ in filled),
                drafters=tuple(drafter for _, drafter in filled),
                fingerprint=plan.samples_fingerprint,
            )

    def _arrived(self, rows: Int64s, epoch: int) -> bool:
        """Wait for a step's samples; later epochs wait for whole stores. False where the iteration is to end."""
        if self._last is not None:
            return False
        if self._follower is None:
            return True
        try:
            return self._follower.wait(rows if epoch == 0 else None, self._leave)
        except StoreError as error:
            self._last = error
            return False

    def _of_rows(self, planned: Microbatch) -> Microbatch | None:
        """A microbatch of sample rows, without quarantined samples; None if nothing is left."""
        store, rows = self._reader.store, self._rows[planned.rows]
        rows = rows[~store.holes(rows)]
        return replace(planned, rows=rows, width=int(store.samples.lengths[rows[-1]])) if rows.size else None

    def _shares(self, prefetch: BatchSource, planned: PlannedStep, first: int) -> list[Iterator[MixedBatch]]:
        """Each drafter's batches, numbered from `first`. Once all are read to their ends, the step is consumed."""
        unread, lock = self._drafters, threading.Lock()

        def read_one() -> None:
            nonlocal unread
            with lock:
                unread -= 1
                if not unread:
                    self._position = _after(planned)

        numbers: list[list[int]] = [[] for _ in range(self._drafters)]
        for number, drafter in enumerate(planned.drafters, first):
            numbers[drafter].append(number)
        return [self._batches(prefetch, share, read_one) for share in numbers]

    def _batches(
        self, prefetch: BatchSource, numbers: Sequence[int], at_end: Callable[[], None]
    ) -> Iterator[MixedBatch]:
        for number in numbers:
            try:
                batch = prefetch.take_batch(number)
            except BaseException:
                self._end(prefetch)
                raise
            try:
                yield batch
            finally:
                batch.release()
        at_end()

    def _check_window(self, plan: StepPlan, longest: int) -> None:
        """Refuse a window that the largest batch might not fit into: in hours it would be too late."""
        tokens = max(longest, min(plan.context_budget, plan.batch_samples * longest))
        needed = batch_bytes(tokens, self._reader.row_bytes)
        if needed > self._window_bytes:
            raise ConfigError(
                f"the loader's window of {self._window_bytes:,} bytes is smaller than a microbatch can be: {tokens:,} "
                f"tokens of {self._reader.row_bytes:,} bytes, {needed:,} bytes in all (longest sample {longest:,} "
                f"tokens, budget {plan.context_budget:,}); use a larger --inflight-gib or a smaller --microbatch-tokens"
            )


def _after(step: PlannedStep) -> tuple[int, int, str]:
    """The position once a step is consumed."""
    return step.epoch, step.index + 1, step.fingerprint
