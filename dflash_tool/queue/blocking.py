"""The threads' side of the queue: one lock, three lines of waiting calls, nothing decided twice.

A call that cannot be served at once stands in a line and sleeps on a gate of its own. Whoever changes the
queue serves the lines before it leaves the lock: it makes the waiting call's move for it, so that nobody
slips in between, and opens that gate alone. Hence no herds, no lost wake-ups, and first come, first served
among gets and among puts.

- A put of the item that a take waits for goes straight to it, and needs no room.
- Puts wait in order of arrival. One whose bucket is full does not hold up other buckets; one that
  lacks nothing but bytes holds up all that came later, so that small items do not starve a big one.

Invariants: a get waits only while the queue is empty, a put only while it is not (so never both); a take of i
waits only while i is neither in the queue nor brought by a waiting put; each item is handed out exactly once.

Cost: one critical section a call, O(waiting puts) when room is made. Only calls that wait read the clock.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from dflash_tool.queue.policy import BucketPolicy, Item, T
from dflash_tool.window import Sleeper
from dflash_tool.wording import counted


class QueueClosed(Exception):  # noqa: N818 - not a fault, and nothing a user should meet
    """The queue is closed: no more puts, and nothing (or not this item) left to get."""


@dataclass(frozen=True, slots=True)
class QueueCounters:
    """What went through a queue up to now. Seconds are summed over threads.

    Attributes:
        puts, gets: items in, items out (by get or take), by bucket.
        put_seconds, get_seconds: waited in all, with waits that still last or ended without an item.
        put_seconds_by_bucket: ended waits by the bucket of the item put.
        get_seconds_by_bucket: ended waits by the bucket of the item finally served.
    """

    puts: dict[int, int]
    gets: dict[int, int]
    put_seconds: float
    get_seconds: float
    put_seconds_by_bucket: dict[int, float]
    get_seconds_by_bucket: dict[int, float]


class _Waiter(Sleeper, Generic[T]):
    """A waiting put, get or take; ended without an error, its ``item`` was put, got or taken."""

    __slots__ = ("item", "since")

    item: Item[T]  # what a put brings; what a get or take was given, unset until then

    def __init__(self, since: float) -> None:
        super().__init__()
        self.since = since


class BucketedHSQueue(Generic[T]):
    """A queue of one FIFO per bucket, between any number of putting, getting and taking threads.

    Bounds: ``max_items_per_bucket`` items in each bucket, ``max_bytes`` bytes in all; None for no bound.
    (Under an ``InflightWindow`` the bounds were taken at dispatch and the queue needs none.) Ctrl-C ends a
    wait of the main thread. Not for signal handlers: one may have interrupted a call that holds the lock.

    Raises:
        ConfigError: a bound below 1.
    """

    def __init__(
        self,
        *,
        max_items_per_bucket: int | None = None,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy: BucketPolicy[T] = BucketPolicy(max_items_per_bucket=max_items_per_bucket, max_bytes=max_bytes)
        self._clock = clock
        self._lock = threading.Lock()
        self._putters: dict[int, _Waiter[T]] = {}  # by item index, oldest first
        self._getters: deque[_Waiter[T]] = deque()
        self._takers: dict[int, _Waiter[T]] = {}  # by the index waited for
        self._closed = False
        self._error: BaseException | None = None
        self._puts: defaultdict[int, int] = defaultdict(int)
        self._gets: defaultdict[int, int] = defaultdict(int)
        self._put_seconds: defaultdict[int, float] = defaultdict(float)
        self._get_seconds: defaultdict[int, float] = defaultdict(float)
        self._seconds_for_nothing = 0.0  # waits of gets and takes that ended without an item

    def put(self, item: Item[T]) -> None:
        """Add ``item``; wait while a bound keeps it out.

        Raises:
            ConfigError: the item alone is larger than the bound in bytes.
            QueueClosed: the queue is closed, before or during the wait; the item is not in it.
            ValueError: an item of this index is in the queue or waits to be put (a bug of the caller).
            BaseException: what ``abort`` was given.
        """
        with self._lock:
            if self._error is not None or self._closed:
                raise self._ending("put")
            if item.index in self._takers:
                self._policy.check(item)
                self._puts[item.bucket] += 1
                self._serve(self._takers.pop(item.index), item)
                return
            if not self._putters and self._policy.try_put(item):
                self._puts[item.bucket] += 1
                if self._getters:
                    self._serve_getters()
                return
            self._policy.check(item)
            if item.index in self._putters:
                raise ValueError(f"hidden-state queue: an item of index {item.index} waits to be put")
            waiter: _Waiter[T] = _Waiter(self._clock())
            waiter.item = item
            self._putters[item.index] = waiter
            self._admit()
        self._sleep(waiter, lambda: self._give_up_put(waiter))

    def get(self) -> Item[T]:
        """Hand out the oldest item of the bucket furthest behind its share; wait while the queue is empty.

        Raises:
            QueueClosed: the queue is closed and empty.
            BaseException: what ``abort`` was given.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            item = self._policy.try_get()
            if item is not None:
                self._gets[item.bucket] += 1
                if self._putters:
                    self._admit()
                return item
            if self._closed:
                raise self._ending("get")
            waiter: _Waiter[T] = _Waiter(self._clock())
            self._getters.append(waiter)
        return self._sleep(waiter, lambda: self._give_up_get(waiter, None))

    def take(self, index: int) -> Item[T]:
        """Hand out the item of this index; wait until it is put. No get can have what a take waits for.

        Raises:
            QueueClosed: the queue is closed and the item is not in it.
            ValueError: another take waits for the same item (a bug of the caller).
            BaseException: what ``abort`` was given.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            item = self._policy.try_take(index)
            if item is None and index in self._putters:
                putter = self._putters.pop(index)
                item = putter.item
                self._end_put(putter)
            if item is not None:
                self._gets[item.bucket] += 1
                if self._putters:
                    self._admit()
                return item
            if self._closed:
                raise self._ending(f"take of item {index}")
            if index in self._takers:
                raise ValueError(f"hidden-state queue: another take waits for item {index}")
            waiter: _Waiter[T] = _Waiter(self._clock())
            self._takers[index] = waiter
        return self._sleep(waiter, lambda: self._give_up_get(waiter, index))

    def close(self) -> None:
        """No more puts. Items that are in can be got and taken; everything else raises ``QueueClosed``."""
        with self._lock:
            self._closed = True
            self._refuse_waiting()

    def abort(self, exc: BaseException) -> None:
        """Make calls that wait and calls that come raise ``exc``, on both sides. The first abort wins."""
        with self._lock:
            if self._error is None:
                self._error = exc
            self._refuse_waiting()

    def qsize(self) -> int:
        """Count the items in the queue."""
        return len(self._policy)

    def bucket_sizes(self) -> dict[int, int]:
        """Count the items in the queue by bucket; buckets without any are left out."""
        with self._lock:
            return self._policy.bucket_sizes()

    def nbytes(self) -> int:
        """Sum the bytes in the queue."""
        return self._policy.nbytes

    def counters(self) -> QueueCounters:
        """Copy what was counted up to now."""
        with self._lock:
            waiting = (*self._putters.values(), *self._getters, *self._takers.values())
            now = self._clock() if waiting else 0.0
            putting = sum(now - waiter.since for waiter in self._putters.values())
            getting = sum(now - waiter.since for waiter in (*self._getters, *self._takers.values()))
            return QueueCounters(
                puts=dict(self._puts),
                gets=dict(self._gets),
                put_seconds=sum(self._put_seconds.values()) + putting,
                get_seconds=sum(self._get_seconds.values()) + self._seconds_for_nothing + getting,
                put_seconds_by_bucket=dict(self._put_seconds),
                get_seconds_by_bucket=dict(self._get_seconds),
            )

    def _sleep(self, waiter: _Waiter[T], give_up: Callable[[], None]) -> Item[T]:
        try:
            waiter.sleep()
        except BaseException:  # Ctrl-C in the main thread: leave no ghost in a line and lose no item
            with self._lock:
                give_up()
            raise
        if waiter.error is not None:
            raise waiter.error
        return waiter.item

    # Everything below runs under the lock.

    def _admit(self) -> None:
        """Room was made, or a put has joined the line: let in what fits, oldest first."""
        for waiter in list(self._putters.values()):
            if self._policy.try_put(waiter.item):
                del self._putters[waiter.item.index]
                self._end_put(waiter)
            elif self._policy.has_place(waiter.item.bucket):
                return  # it lacks bytes: nobody passes it

    def _serve_getters(self) -> None:
        while self._getters and (item := self._policy.try_get()) is not None:
            self._serve(self._getters.popleft(), item)

    def _serve(self, waiter: _Waiter[T], item: Item[T]) -> None:
        waiter.item = item
        self._gets[item.bucket] += 1
        self._get_seconds[item.bucket] += self._clock() - waiter.since
        waiter.end()

    def _end_put(self, waiter: _Waiter[T], error: BaseException | None = None) -> None:
        self._puts[waiter.item.bucket] += error is None
        self._put_seconds[waiter.item.bucket] += self._clock() - waiter.since
        waiter.end(error)

    def _end_get(self, waiter: _Waiter[T], error: BaseException | None = None) -> None:
        self._seconds_for_nothing += self._clock() - waiter.since
        waiter.end(error)

    def _refuse_waiting(self) -> None:
        for waiter in self._putters.values():
            self._end_put(waiter, self._ending("put"))
        for waiter in self._getters:
            self._end_get(waiter, self._ending("get"))
        for index, waiter in self._takers.items():
            self._end_get(waiter, self._ending(f"take of item {index}"))
        self._putters.clear()
        self._getters.clear()
        self._takers.clear()

    def _ending(self, call: str) -> BaseException:
        if self._error is not None:
            return self._error
        left = f"{counted(len(self._policy), 'item')} left" if len(self._policy) else "nothing left"
        return QueueClosed(f"hidden-state queue: {call} on a closed queue ({left})")

    def _give_up_put(self, waiter: _Waiter[T]) -> None:
        if waiter.done:  # the item is in, as if the interrupt had come just after the put
            return
        del self._putters[waiter.item.index]
        self._put_seconds[waiter.item.bucket] += self._clock() - waiter.since
        self._admit()  # it may have held up others

    def _give_up_get(self, waiter: _Waiter[T], index: int | None) -> None:
        if waiter.done and waiter.error is None:  # served but never woke: to the next in line, or back
            item = waiter.item
            self._gets[item.bucket] -= 1
            if item.index in self._takers:
                self._serve(self._takers.pop(item.index), item)
            else:
                self._policy.restore(item)
                self._serve_getters()
        elif not waiter.done:
            self._seconds_for_nothing += self._clock() - waiter.since
            if index is None:
                self._getters.remove(waiter)
            else:
                del self._takers[index]
