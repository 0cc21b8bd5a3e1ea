"""What `MixingLoader` hands out: an optimizer step, and what it took to read so far."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dflash_tool.loader.batch import MixedBatch
from dflash_tool.loader.prefetch import PlannedStep


@dataclass(frozen=True, kw_only=True)
class LoaderCounters:
    """What a loader has done so far.

    waited: seconds that the consumer waited for data; bytes_read: of hidden states; samples_checked: reads whose rows
    were held against their hash; peak_bytes: the most that was in flight at once.
    """

    waited: float
    bytes_read: int
    samples_read: int
    samples_checked: int
    peak_bytes: int


class LoadedStep:
    """One optimizer step. Iterating, once, yields the batches of this rank: none where it has no work.

    epoch, index: its place; rows: int64 `[G]`, sample rows of the whole step (all ranks) in the order of the epoch.
    shares: the batches of each local drafter in plan order, for a thread each.
    """

    def __init__(
        self, planned: PlannedStep, shares: Sequence[Iterator[MixedBatch]], abort: Callable[[BaseException], None]
    ) -> None:
        self.epoch, self.index, self.rows = planned.epoch, planned.index, planned.rows
        self.shares = tuple(shares)
        self._abort = abort
        self._count = len(planned.microbatches)

    def __len__(self) -> int:
        """Count the microbatches of this rank."""
        return self._count

    def abort(self, error: BaseException) -> None:
        """Let all shares raise `error`, even while they wait. From any thread."""
        self._abort(error)

    def __iter__(self) -> Iterator[MixedBatch]:
        (only,) = self.shares
        return only
