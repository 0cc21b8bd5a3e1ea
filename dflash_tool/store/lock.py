"""One run a store: `lock.json` names who writes, and is taken over once that run is surely gone.

The holder touches the file every few seconds. Whether it lives is told, on the same machine (boot id and pid
namespace), by its pid and the start time of that process, so that a reused pid fools nobody; on another
machine by the age of the last touch. Ages compare two times of the same file server (the lock's and a fresh
file's), so clocks that differ do no harm.

On one machine, newcomers are kept apart by `flock` on the store's folder. Across machines creation is
exclusive, and a take-over moves the old file aside and looks at what it got; should two still cross there,
the loser's next heartbeat finds another name in the file, and `check` raises.

Readers take no lock: `run_at_work` and, for those that wait, `WriterWatch` tell them whether what they find
unfinished is still in the making.
"""

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from dflash_tool.errors import StoreError
from dflash_tool.store.files import TEMP_PREFIX, disk_errors, write_all

LOCK = "lock.json"
STALE_AFTER = 60.0
"""Seconds without a sign of life after which another machine's lock counts as dead."""
_UNKNOWN = "a run that can't be told from its lock file"
_LIMIT_BYTES = 1 << 16


class Holder(NamedTuple):
    """Who holds a lock."""

    run_id: str
    host: str
    machine: str  # boot id and pid namespace: the same iff pids mean the same processes
    pid: int
    started: str  # the process's start time in the kernel's ticks
    since: str

    def __str__(self) -> str:
        return f"run {self.run_id} on {self.host}, pid {self.pid}, since {self.since}"


class RunLock:
    """The right to write to a store, as a context manager; raises `StoreError` where another run has it."""

    def __init__(self, root: Path, *, stale_after: float = STALE_AFTER, beat_every: float = 5.0) -> None:
        self.path = root / LOCK
        self.lost = False
        self._root = root
        self._stale_after = stale_after
        self._beat_every = beat_every
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.holder = Holder(
            run_id=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            started=process_start(os.getpid()) or "",
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def acquire(self) -> None:
        """Take the lock, and keep it alive from a thread. Raises `StoreError` if a living run holds it."""
        with disk_errors(self.path, "lock the store with"):
            self._root.mkdir(parents=True, exist_ok=True)
            with _newcomers_apart(self._root):
                while not self._create():
                    self._remove_dead()
        self._thread = threading.Thread(target=self._keep_alive, name="store-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back, if it is still ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if os.getpid() != self.holder.pid:
            return
        with suppress(OSError), _newcomers_apart(self._root):
            if _holder_of(_read(self.path)) == self.holder:
                self.path.unlink()

    def beat(self) -> None:
        """One sign of life; sets `lost` if the lock has become another's. Disk errors are passed over."""
        with suppress(OSError):
            if _holder_of(_read(self.path)) == self.holder:
                os.utime(self.path)
            else:
                self.lost = True

    def check(self) -> None:
        """Raise `StoreError` if another run has taken the lock, as after a long suspension."""
        if self.lost:
            raise StoreError(
                f"the lock {self.path} of this run is gone or has been taken over (was this machine asleep "
                f"for more than {self._stale_after:.0f} s?); it stops: run the same command again to go on"
            )

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep_alive(self) -> None:
        while not self.lost and not self._stop.wait(self._beat_every):
            self.beat()

    def _create(self) -> bool:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            write_all(fd, memoryview(json.dumps(self.holder._asdict(), indent=2).encode()))
        finally:
            os.close(fd)
        return True

    def _remove_dead(self) -> None:
        """Remove the lock that is there, if its run is dead; else raise."""
        try:
            content = _read(self.path)
            age = self._age()
        except FileNotFoundError:
            return  # released just now
        holder = _holder_of(content)
        if _alive(holder, age, self._stale_after):
            raise StoreError(self._refusal(holder, age))
        aside = self._root / f"{TEMP_PREFIX}lock-{self.holder.run_id}"
        with suppress(FileNotFoundError):
            self.path.rename(aside)
            if _read(aside) != content:  # a newcomer from another machine was faster: its lock goes back
                with suppress(FileExistsError):
                    os.link(aside, self.path)
            aside.unlink()

    def _age(self) -> float:
        """Seconds since the last heartbeat, by the clock of the file server."""
        probe = self._root / f"{TEMP_PREFIX}lock-{self.holder.run_id}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - self.path.stat().st_mtime

    def _refusal(self, holder: Holder | None, age: float) -> str:
        how = f"its lock is taken over {self._stale_after:.0f} s after its last sign of life, if it died"
        if _is_here(holder):
            how = "its lock is taken over as soon as it has ended"
        return (
            f"the store {self._root} is being written by {holder or _UNKNOWN} (last sign of life {max(0.0, age):.0f} s "
            f"ago); wait until it ends, or stop it: {how}"
        )


def run_at_work(root: Path) -> str | None:
    """Who is writing to a store, in words; None if nobody is. Nothing is written.

    So the age of another machine's last sign of life is told by the clock of this one.
    """
    try:
        content = _read(root / LOCK)
        age = time.time() - (root / LOCK).stat().st_mtime
    except OSError:
        return None
    holder = _holder_of(content)
    return str(holder or _UNKNOWN) if _alive(holder, age, STALE_AFTER) else None


class WriterWatch:
    """Tells again and again whether some run is writing a store; nothing is written.

    Who can watch needs no clock of another machine: a run there is alive until its lock has stood still for
    `STALE_AFTER` seconds.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = root / LOCK
        self._clock = clock
        self._seen: tuple[bytes, int] | None = None
        self._since = 0.0

    def alive(self) -> bool:
        """Whether a lock is there and its run lives, as far as can be told."""
        try:
            sign = _read(self._path), self._path.stat().st_mtime_ns
        except OSError:
            return False
        if sign != self._seen:
            self._seen, self._since = sign, self._clock()
        return _alive(_holder_of(sign[0]), self._clock() - self._since, STALE_AFTER)


def machine_id() -> str:
    """Boot id and pid namespace; empty where the system doesn't tell (then only heartbeats count)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Start time of a living process in ticks since boot (proc(5): field 22 of stat); None if it is gone."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


@contextmanager
def _newcomers_apart(root: Path) -> Iterator[None]:
    """Hold `flock` on the store's folder; where the file system has none for folders, go on without."""
    fd = os.open(root, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(fd, _LIMIT_BYTES)
    finally:
        os.close(fd)


def _is_here(holder: Holder | None) -> bool:
    """Whether the pid of a holder means a process of this machine."""
    return holder is not None and holder.machine != "" and holder.machine == machine_id()


def _alive(holder: Holder | None, age: float, stale_after: float) -> bool:
    if holder is not None and _is_here(holder):
        return process_start(holder.pid) == holder.started
    return age < stale_after


def _holder_of(content: bytes) -> Holder | None:
    try:
        fields = json.loads(content)
        holder = Holder(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    whole = isinstance(holder.pid, int) and all(isinstance(v, str) for k, v in fields.items() if k != "pid")
    return holder if whole else None
