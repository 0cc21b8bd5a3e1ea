"""`DrafterGroup`: the drafters of one process. Each takes the gradients of its share of a step in a thread of its own.

Gradients are summed into the first drafter's buffer, in the order of the drafters; there the optimizer steps; then the
weights are copied to the other devices. Shares are fixed in the plan, each drafter adds its microbatches in plan order:
same devices, same bits. The first error of a drafter aborts the step, which wakes those that wait for a batch.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.loader import MixedBatch
from dflash_tool.trainer.replica import Replica, ShareWork, Sums
from dflash_tool.trainer.timing import Clock


class TrainStep(Protocol):
    """One optimizer step, wherever its batches come from."""

    @property
    def epoch(self) -> int:
        """Anchors are drawn anew in each."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """The step's samples over all ranks: named if it goes wrong."""

    @property
    def shares(self) -> Sequence[Iterable[MixedBatch]]:
        """The batches of each local drafter, for a thread each."""

    def abort(self, error: BaseException, /) -> None:
        """Let every share raise an error, even while it waits."""


class DrafterGroup:
    """One or more drafters of equal weights. A context manager: it ends its threads."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        others = dict.fromkeys(replica.model for replica in replicas)
        self.model, *self._copies = others
        count = len(self.replicas)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="drafter") if count > 1 else None
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Count the drafters."""
        return len(self.replicas)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of each drafter."""
        return tuple(replica.model.device for replica in self.replicas)

    @property
    def halvings(self) -> int:
        """How many microbatches did not fit and were cut in two."""
        return sum(replica.halvings for replica in self.replicas)

    @property
    def sums(self) -> Sums:
        """The newest step's gradients and numerator, summed over this group's drafters."""
        return self.replicas[0].sums

    def add_up(self, step: TrainStep) -> list[ShareWork]:
        """Sum the step's gradients into `sums`; returns what each drafter did. Raises the first error of any."""
        clock = Clock()
        jobs = list(zip(self.replicas, step.shares, strict=True))
        if self._pool is None:
            works = [replica.add_up(share, epoch=step.epoch) for replica, share in jobs]
        else:
            futures = [self._pool.submit(self._guarded, replica, share, step) for replica, share in jobs]
            wait(futures)
            if self._error is not None:
                raise self._error
            works = [work for future in futures if (work := future.result()) is not None]
        for replica in self.replicas[1:]:
            self.sums.flat.add_(replica.sums.flat.to(self.sums.flat.device))
        clock.spent("all")
        for work in works:  # what is left of the time, it waited for the others
            work.seconds["drafters"] = max(0.0, clock.seconds["all"] - sum(work.seconds.values()))
        return works

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Give the first drafter's weights to the others."""
        for model in self._copies:
            torch._foreach_copy_(list(model.parameters()), list(self.model.parameters()))

    def _guarded(self, replica: Replica, share: Iterable[MixedBatch], step: TrainStep) -> ShareWork | None:
        device = replica.model.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return replica.add_up(share, epoch=step.epoch)
        except BaseException as error:  # raised in the caller's thread, whatever it is
            with self._lock:
                self._error = self._error or error
            step.abort(self._error)
            return None

    def __enter__(self) -> "DrafterGroup":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
