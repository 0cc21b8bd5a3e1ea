"""The in-flight window: byte credits and places that bound what is between dispatch and use.

The dispatcher acquires a batch's predicted bytes and one place of its bucket *before* the batch goes to a
target; the sink releases both once the rows are on disk or the gradient is taken. Acquires are served
strictly in the order they came: a small batch never overtakes a big one, so a big one cannot starve.

Invariants, at every instant: bytes in flight <= ``limit_bytes``; batches of a bucket in flight <= ``places``.
No deadlock as long as acquires are made in the order of the plan and what was acquired is released some day:
the earliest batch that is not used yet is in flight or at the head of the line.

Cost: one short critical section a call; a release wakes exactly those whose turn it has made. The clock is
read only while somebody waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_tool.errors import ConfigError

_GIB = 1 << 30
_SIGNAL_CHECK_SECONDS = 0.5


class WindowClosed(Exception):  # noqa: N818 - not a fault, and nothing a user should meet
    """The window is closed: nothing more is dispatched."""


@dataclass(frozen=True, slots=True)
class WindowWaits:
    """Seconds that acquires have waited so far, summed over the waiting threads, by what the line stood for.

    A moment in which the head of the line lacks both counts as ``bytes``.
    """

    bytes: float
    places: float


class Sleeper:
    """One call that waits in a line until somebody ends it, with an error or without.

    A signal that arrives just before the thread blocks does not wake it (CPython notices it at the next
    bytecode): so a sleep looks up every ``_SIGNAL_CHECK_SECONDS``, or a Ctrl-C could be lost for good.
    """

    __slots__ = ("_gate", "done", "error")

    def __init__(self) -> None:
        self._gate = threading.Lock()  # shut while the call waits
        self._gate.acquire()
        self.done = False
        self.error: BaseException | None = None

    def sleep(self) -> None:
        """Sleep until the end; Ctrl-C in the main thread raises here."""
        while not self._gate.acquire(timeout=_SIGNAL_CHECK_SECONDS):
            pass

    def end(self, error: BaseException | None = None) -> None:
        """Wake it up. To be called once."""
        self.error = error
        self.done = True
        self._gate.release()


class _Ticket(Sleeper):
    """A waiting acquire; ended without an error, it has got what it wants."""

    __slots__ = ("bucket", "nbytes")

    def __init__(self, bucket: int, nbytes: int) -> None:
        super().__init__()
        self.bucket = bucket
        self.nbytes = nbytes


class InflightWindow:
    """At most ``limit_bytes`` bytes in flight, and at most ``places`` batches of each bucket.

    Thread-safe. Ctrl-C ends a wait of the main thread. Not for signal handlers: one may have interrupted a
    call that holds the lock.

    Raises:
        ConfigError: ``limit_bytes`` or ``places`` is below 1.
    """

    def __init__(self, limit_bytes: int, places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        if limit_bytes < 1:
            raise ConfigError(f"in-flight window: limit of {limit_bytes} bytes, needs >= 1 (--inflight-gib)")
        if places < 1:
            raise ConfigError(f"in-flight window: {places} places a bucket, needs >= 1 (--hs-queue-depth)")
        self.limit_bytes = limit_bytes
        self.places = places
        self._clock = clock
        self._lock = threading.Lock()
        self._line: deque[_Ticket] = deque()
        self._in_flight = 0
        self._peak = 0
        self._bytes_by_bucket: dict[int, int] = {}
        self._places_by_bucket: dict[int, int] = {}
        self._waited_bytes = 0.0
        self._waited_places = 0.0
        self._booked_until = 0.0  # clock reading up to which the waits of the line are in the two sums
        self._closed = False
        self._error: BaseException | None = None

    def acquire(self, bucket: int, nbytes: int) -> None:
        """Take ``nbytes`` bytes and a place of ``bucket``; wait for both, and for this call's turn.

        Raises:
            ConfigError: ``nbytes`` is more than the window holds; raised at once.
            WindowClosed: the window is closed, before or during the wait.
            BaseException: what ``abort`` was given.
        """
        if nbytes < 0:
            raise ValueError(f"in-flight window: acquire of {nbytes} bytes for bucket {bucket}")
        if nbytes > self.limit_bytes:
            raise ConfigError(
                f"in-flight window: a batch of bucket {bucket} needs {nbytes} bytes ({nbytes / _GIB:.3f} GiB)"
                f" in flight, but the window holds at most {self.limit_bytes} bytes"
                f" ({self.limit_bytes / _GIB:.3f} GiB);"
                " use a larger --inflight-gib or a smaller --batch-tokens"
            )
        with self._lock:
            ending = self._ending()
            if ending is not None:
                raise ending
            if not self._line and self._lacks(bucket, nbytes) is None:
                self._grant(bucket, nbytes)
                return
            self._book_waits()
            if not self._line:
                self._booked_until = self._clock()
            ticket = _Ticket(bucket, nbytes)
            self._line.append(ticket)
        try:
            ticket.sleep()
        except BaseException:  # Ctrl-C in the main thread: leave the line, or hand the grant on
            with self._lock:
                self._withdraw(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error

    def release(self, bucket: int, nbytes: int) -> None:
        """Give back what one ``acquire(bucket, nbytes)`` took. Never waits; goes on after ``close``.

        Raises:
            ValueError: that much is not in flight for this bucket (a bug of the caller; nothing is changed).
        """
        with self._lock:
            self._return(bucket, nbytes)

    def close(self) -> None:
        """Make acquires that wait and acquires that come raise ``WindowClosed``. Releases go on."""
        with self._lock:
            self._closed = True
            self._refuse_line()

    def abort(self, exc: BaseException) -> None:
        """Make acquires that wait and acquires that come raise ``exc``. The first abort wins."""
        with self._lock:
            if self._error is None:
                self._error = exc
            self._refuse_line()

    @property
    def in_flight(self) -> int:
        """Bytes in flight now."""
        return self._in_flight

    @property
    def peak(self) -> int:
        """The most bytes that were ever in flight at once."""
        return self._peak

    def in_flight_by_bucket(self) -> dict[int, int]:
        """Sum the bytes in flight now by bucket; buckets without any are left out."""
        with self._lock:
            return dict(self._bytes_by_bucket)

    def places_used(self) -> dict[int, int]:
        """Count the batches in flight now by bucket; buckets without any are left out."""
        with self._lock:
            return dict(self._places_by_bucket)

    def waits(self) -> WindowWaits:
        """Tell the seconds waited for bytes and for places up to now, waits that still last included."""
        with self._lock:
            self._book_waits()
            return WindowWaits(bytes=self._waited_bytes, places=self._waited_places)

    # Everything below runs under the lock.

    def _lacks(self, bucket: int, nbytes: int) -> str | None:
        if self._in_flight + nbytes > self.limit_bytes:
            return "bytes"
        if self._places_by_bucket.get(bucket, 0) >= self.places:
            return "places"
        return None

    def _grant(self, bucket: int, nbytes: int) -> None:
        self._in_flight += nbytes
        self._peak = max(self._peak, self._in_flight)
        self._bytes_by_bucket[bucket] = self._bytes_by_bucket.get(bucket, 0) + nbytes
        self._places_by_bucket[bucket] = self._places_by_bucket.get(bucket, 0) + 1

    def _return(self, bucket: int, nbytes: int) -> None:
        used, held = self._places_by_bucket.get(bucket, 0), self._bytes_by_bucket.get(bucket, 0)
        if used == 0 or not 0 <= nbytes <= held or (used == 1 and nbytes != held):
            raise ValueError(
                f"in-flight window: release of {nbytes} bytes of bucket {bucket}, which has {held} bytes in"
                f" {used} batches in flight; each acquire is released once, with the same bytes"
            )
        self._book_waits()
        self._in_flight -= nbytes
        if used == 1:
            del self._places_by_bucket[bucket], self._bytes_by_bucket[bucket]
        else:
            self._places_by_bucket[bucket] = used - 1
            self._bytes_by_bucket[bucket] = held - nbytes
        self._serve_line()

    def _serve_line(self) -> None:
        while self._line and self._lacks(self._line[0].bucket, self._line[0].nbytes) is None:
            ticket = self._line.popleft()
            self._grant(ticket.bucket, ticket.nbytes)
            ticket.end()

    def _refuse_line(self) -> None:
        self._book_waits()
        while self._line:
            self._line.popleft().end(self._ending())

    def _withdraw(self, ticket: _Ticket) -> None:
        if not ticket.done:
            self._book_waits()
            self._line.remove(ticket)
            self._serve_line()
        elif ticket.error is None:
            self._return(ticket.bucket, ticket.nbytes)

    def _book_waits(self) -> None:
        """Add the time since the last booking to what the head of the line lacks. Before every change."""
        if not self._line:
            return
        head, now = self._line[0], self._clock()
        seconds = (now - self._booked_until) * len(self._line)
        if self._lacks(head.bucket, head.nbytes) == "bytes":
            self._waited_bytes += seconds
        else:
            self._waited_places += seconds
        self._booked_until = now

    def _ending(self) -> BaseException | None:
        if self._error is None and self._closed:
            return WindowClosed("in-flight window: closed, nothing more can be dispatched")
        return self._error


def default_limit() -> int:
    """A quarter of the memory that is free for new work, divided by the processes on this host."""
    return _available_memory() // 4 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _available_memory() -> int:
    """Bytes that can be had without swapping, within the container's limit if there is one."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        return max(1, min(available, limit))
    except (OSError, ValueError):  # no such group, or "max"
        return available
