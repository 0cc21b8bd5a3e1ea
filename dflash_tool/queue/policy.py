"""What the queue decides, without locks, clocks or threads: bounds, first in first out, whose turn it is.

One FIFO per bucket. ``try_get`` serves the bucket that is furthest behind: among those that hold items, the
one whose last turn (or, before its first turn, whose first item) is longest ago.

Invariants: items leave a bucket by ``try_get`` in the order they entered; no item leaves twice; the bounds
hold after every call; a refused put means that there is something to get; between two turns of a bucket that
holds items, every other bucket has at most one turn.

Cost: O(1) a put and a take, O(buckets) a get.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_tool.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """One batch of hidden states on its way. ``payload`` is never looked into.

    Attributes:
        index: its place in the plan; unique among the items that are in one queue.
        bucket: its length bucket.
        nbytes: what it counts against a bound in bytes.
        payload: tensors, a handle, a reference: whatever the two sides agree on.
    """

    index: int
    bucket: int
    nbytes: int
    payload: T


class BucketPolicy(Generic[T]):
    """The state of the queue and its rules. Not thread-safe: the caller holds a lock.

    Args:
        max_items_per_bucket: bound for each bucket in items, None for none.
        max_bytes: bound for all items together in bytes, None for none.

    Raises:
        ConfigError: a bound below 1.
    """

    def __init__(self, *, max_items_per_bucket: int | None = None, max_bytes: int | None = None) -> None:
        for name, bound in (("max_items_per_bucket", max_items_per_bucket), ("max_bytes", max_bytes)):
            if bound is not None and bound < 1:
                raise ConfigError(f"hidden-state queue: {name} is {bound}, needs at least 1 (None: no bound)")
        self.max_items_per_bucket = max_items_per_bucket
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._fifos: dict[int, OrderedDict[int, Item[T]]] = {}  # buckets that hold items
        self._bucket_of: dict[int, int] = {}  # by item index
        self._rotation: OrderedDict[int, None] = OrderedDict()  # all buckets seen, furthest behind first

    def __len__(self) -> int:
        return len(self._bucket_of)

    def bucket_sizes(self) -> dict[int, int]:
        """Count the items by bucket; buckets without any are left out."""
        return {bucket: len(fifo) for bucket, fifo in self._fifos.items()}

    def check(self, item: Item[T]) -> None:
        """Refuse an item that could never be put.

        Raises:
            ConfigError: it alone is larger than the bound in bytes.
            ValueError: negative bytes, or an item of this index is in the queue.
        """
        if self.max_bytes is not None and item.nbytes > self.max_bytes:
            raise ConfigError(
                f"hidden-state queue: item {item.index} of bucket {item.bucket} has {item.nbytes} bytes, but"
                f" the queue holds at most {self.max_bytes} bytes in all;"
                " use a larger bound or a smaller --batch-tokens"
            )
        if item.nbytes < 0:
            raise ValueError(f"hidden-state queue: item {item.index} has {item.nbytes} bytes")
        if item.index in self._bucket_of:
            raise ValueError(f"hidden-state queue: an item of index {item.index} is in the queue already")

    def has_place(self, bucket: int) -> bool:
        """Say whether the bound in items lets one more into ``bucket`` now."""
        return self.max_items_per_bucket is None or len(self._fifos.get(bucket, ())) < self.max_items_per_bucket

    def try_put(self, item: Item[T]) -> bool:
        """Add ``item`` at the end of its bucket if the bounds allow it now. Raises what ``check`` raises."""
        self.check(item)
        if not self.has_place(item.bucket):
            return False
        if self.max_bytes is not None and self.nbytes + item.nbytes > self.max_bytes:
            return False
        self._insert(item)
        return True

    def try_get(self) -> Item[T] | None:
        """Hand out the oldest item of the bucket that is furthest behind, or None if the queue is empty."""
        if not self._fifos:
            return None
        for bucket in self._rotation:
            if bucket in self._fifos:
                break
        self._rotation.move_to_end(bucket)
        _, item = self._fifos[bucket].popitem(last=False)
        self._forget(item)
        return item

    def try_take(self, index: int) -> Item[T] | None:
        """Hand out the item of this index, or None if it is not here. Counts as no bucket's turn."""
        bucket = self._bucket_of.get(index)
        if bucket is None:
            return None
        item = self._fifos[bucket].pop(index)
        self._forget(item)
        return item

    def restore(self, item: Item[T]) -> None:
        """Put an item that was handed out but never arrived back to the head of its bucket, bounds or not."""
        self._insert(item)
        self._fifos[item.bucket].move_to_end(item.index, last=False)

    def _insert(self, item: Item[T]) -> None:
        bucket = item.bucket
        fifo = self._fifos.get(bucket)
        if fifo is None:
            fifo = self._fifos[bucket] = OrderedDict()
            self._rotation.setdefault(bucket, None)
        fifo[item.index] = item
        self._bucket_of[item.index] = bucket
        self.nbytes += item.nbytes

    def _forget(self, item: Item[T]) -> None:
        if not self._fifos[item.bucket]:
            del self._fifos[item.bucket]
        del self._bucket_of[item.index]
        self.nbytes -= item.nbytes
