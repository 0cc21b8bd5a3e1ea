"""`--tee STORE`: what passes in the first epoch goes to a store as well, so that later runs need no target.

A thread of its own writes, in the order in which drafters take, from the batch's own memory: that returns to the window
once it is both trained on and written. Before a checkpoint everything written is committed, so whatever a killed run
takes again is already held or passes again.
"""

import threading
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash_tool.extractor import iter_queue
from dflash_tool.loader import MixedBatch
from dflash_tool.queue import BucketedHSQueue, Item
from dflash_tool.schemas.config import LayerId
from dflash_tool.store.samples import Samples
from dflash_tool.store.writer import ShardWriter
from dflash_tool.target.capture import to_numpy

_Work = tuple[Callable[[], None], Callable[[], None]]  # what to do, whom to tell afterwards


class Tee:
    """Writes batches to a store; a context manager: leaving it commits what was written.

    held: bool `[N]`, samples that are in the store. A failure to write is raised by the next `write` or `commit`.
    """

    def __init__(self, writer: ShardWriter, samples: Samples, held: NDArray[np.bool_]) -> None:
        self._writer, self._samples, self._held = writer, samples, held.copy()
        self._queue: BucketedHSQueue[_Work] = BucketedHSQueue()
        self._numbers = count()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tee", daemon=True)

    def write(
        self,
        batch: MixedBatch,
        layers: Sequence[LayerId],
        fetch: Callable[[], Tensor],
        quarantined: NDArray[np.int64],
        done: Callable[[], None],
    ) -> None:
        """Write the samples of a batch that the store lacks; `done` is called once their memory is not needed any more.

        fetch: the states `[n, B, S, H]` of all stored layers, in the order of `layers`, on the host. quarantined: rows
        of samples.arrow that the batch lacks.
        """
        self._put((lambda: self._append(batch, layers, to_numpy(fetch()), quarantined), done))

    def commit(self) -> None:
        """Commit everything that was given to `write`; whole on disk when this returns."""
        committed = threading.Event()
        self._put((self._writer.commit_all, committed.set))
        committed.wait()
        self._check()

    def __enter__(self) -> "Tee":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.close()
        self._thread.join()
        if kind is None:
            self._check()

    def _put(self, work: _Work) -> None:
        self._check()
        self._queue.put(Item(next(self._numbers), 0, 0, work))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # Everything below runs in the tee's thread.

    def _run(self) -> None:
        for item in iter_queue(self._queue):
            work, done = item.payload
            self._try(work)
            del item, work  # their memory, before it is counted as free
            done()
        self._try(self._writer.commit_all)
        self._writer.abandon()

    def _try(self, work: Callable[[], None]) -> None:
        """After a failure nothing more is written; whoever waits is told all the same."""
        if self._error is None:
            try:
                work()
            except BaseException as error:  # raised where the batches come from
                self._error = error

    def _append(
        self,
        batch: MixedBatch,
        layers: Sequence[LayerId],
        states: NDArray[np.generic],
        quarantined: NDArray[np.int64],
    ) -> None:
        self._writer.quarantine(batch.bucket, [self._samples.sample_id(row) for row in quarantined.tolist()])
        for place, (row, length) in enumerate(zip(batch.rows.tolist(), batch.lengths.tolist(), strict=True)):
            if not self._held[row]:
                rows = {layer: states[number, place, :length] for number, layer in enumerate(layers)}
                self._writer.append(batch.bucket, [self._samples.sample_id(row)], [length], rows)
                self._held[row] = True
        self._writer.commit_due()


def when_all_have(parties: int, action: Callable[[], None]) -> Callable[[], None]:
    """A function that does `action` once that many parties have called it, from any threads."""
    left, lock = parties, threading.Lock()

    def arrive() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            action()

    return arrive
