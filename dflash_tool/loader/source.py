"""What `MixingLoader` needs of whoever makes its batches: `Prefetch` reads them from a store, targets make them."""

from collections.abc import Callable, Iterator
from typing import Protocol

from dflash_tool.loader.batch import MixedBatch
from dflash_tool.loader.prefetch import PlannedStep


class BatchSource(Protocol):
    """Makes the batches of planned steps ahead of their use, in plan order, from `start` to `close`."""

    def start(self) -> None:
        """Start the threads."""

    def take_step(self, number: int) -> PlannedStep | None:
        """Wait for the next step: they are numbered from 0, and asked for once the one before is consumed.

        None after the last one. Raises LoaderClosed after `close`, a thread's first error, or what `abort` was given.
        """

    def take_batch(self, number: int) -> MixedBatch:
        """Wait for a batch: they are numbered from 0 over all steps. Raises as `take_step` does."""

    def abort(self, error: BaseException) -> None:
        """Stop, and let takes raise `error`. The first call wins."""

    def close(self) -> None:
        """Stop and wait for the threads to end. Again: does nothing."""

    def waited(self) -> float:
        """Seconds that takes have waited so far."""

    def peak_bytes(self) -> int:
        """The most bytes that were in flight at once."""


SourceOf = Callable[[Iterator[PlannedStep], tuple[int, ...]], BatchSource]
"""From steps still to do and the layers that batches are to hold, strictly ascending, to a source of their batches."""
