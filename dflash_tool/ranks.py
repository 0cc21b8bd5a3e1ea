"""Processes of one `torchrun` group that share the work of a run: who goes first, who draws the next batch.

The group's key-value store (c10d) is all they need: one counter that ranks add to gives each batch to exactly one of
them, whoever is free (work stealing across machines), and a few keys tell who is ready, done or refused. A rank that
dies takes the group down, as torchrun does: the others get SIGTERM.

Ranks that take every step together meet in `everyone`, which never waits for one that won't come: a rank that fails
says why, and one that dies stops beating (`alive`).
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from dflash_tool.errors import DflashError, Interrupted

T = TypeVar("T")
_LOOK_AGAIN_SECONDS = 0.1
_LEAVE_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_DEAD_SECONDS = 45.0
# A rank that was asked to stop (torchrun kills it 30 s later) waits less long for those that don't come any more.
_DEAD_WHEN_STOPPING, _LATE_WHEN_STOPPING = 8.0, 25.0


class GroupStore(Protocol):
    """What is used of a c10d store (torch.distributed.Store)."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, amount: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def multi_get(self, keys: list[str]) -> list[bytes]: ...  # noqa: D102
    def delete_key(self, key: str) -> bool: ...  # noqa: D102


class Ranks:
    """This process's place in its group; a process started alone is a group of one and needs no store."""

    def __init__(self, rank: int = 0, world: int = 1, store: GroupStore | None = None) -> None:
        self.rank = rank
        self.world = world
        self.store = self._store = store
        self._told: str | None = None  # our key of the newest meeting
        self._alone = itertools.count()
        self._firsts = itertools.count()

    @classmethod
    def join(cls) -> "Ranks":
        """Join the group that torchrun's environment names, or be alone. DflashError if it can't be reached."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415 - a single process never needs it

        try:
            store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=5)))
        except (RuntimeError, ValueError) as error:
            raise DflashError(f"can't join the group of WORLD_SIZE {os.environ['WORLD_SIZE']}: {error}") from error
        return cls(rank, world, store)

    def first(self, work: Callable[[], T]) -> T | None:
        """Rank 0 does `work` and gives back its result; the others wait until it has, and get None.

        Where rank 0 fails the others raise a DflashError that says so.
        """
        if self._store is None:
            return work()
        key = f"first {next(self._firsts)}"
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                self._store.set(key, json.dumps(str(error) or type(error).__name__))
                raise
            self._store.set(key, json.dumps(None))
            return result
        refused = json.loads(self._wait_for(key))
        if refused is not None:
            raise DflashError("rank 0 could not begin; its message says why")
        return None

    def barrier(self) -> None:
        """Wait until every rank has come here; used once a run."""
        if self._store is not None and self._store.add("waiting", 1) == self.world:
            self._store.set("together", "yes")
        elif self._store is not None:
            self._wait_for("together")

    def everyone(self, name: str, report: Any, *, stop: Sequence[BaseException] = ()) -> list[Any]:
        """Meet: every rank hands in a report (plain JSON values) and gets all of them, by rank.

        name: of the meeting, the same on every rank, another one each time. stop: not empty once this rank was asked
        to stop. Raises DflashError if a rank has failed, with its reason, or is gone.
        """
        if self._store is None:
            return [report]
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        try:
            self._store.set(keys[self.rank], json.dumps(report))
            watch = _Watch(self._store, keys, self.rank)
            while not self._store.check(keys):
                watch.look(stop)
            reports = [json.loads(each) for each in self._store.multi_get(keys)]
            if self._told is not None:  # all have come here, so nobody needs the meeting before
                self._store.delete_key(self._told)
        except RuntimeError as error:
            raise DflashError(f"the group's store can't be reached any more ({error}): its process is gone") from error
        self._told = keys[self.rank]
        return reports

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Let the others know that this rank lives, while the body runs; if it raises, why."""
        if self._store is None:
            yield
            return
        store, done = self._store, threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # the store is gone: the next meeting says so
                while not done.wait(_BEAT_SECONDS):
                    store.add(f"beats/{self.rank}", 1)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError, Interrupted):
                self._leave(store, error)
            if isinstance(error, Interrupted):
                _raise_failure(store)  # what torchrun's signal is a consequence of
            raise
        finally:
            done.set()
            thread.join(_BEAT_SECONDS)  # no longer: the store may be gone

    def _leave(self, store: GroupStore, error: BaseException) -> None:
        """Say why this rank ends, unless another has, and stay until all are leaving: torchrun then ends the rest."""
        reason = json.dumps([self.rank, str(error) or type(error).__name__])
        if isinstance(error, Interrupted):
            store.set("interrupted", reason)
        elif store.add("failures", 1) == 1:
            store.set("failed", reason)
        store.add("leaving", 1)
        until = time.monotonic() + _LEAVE_SECONDS
        while store.add("leaving", 0) < self.world and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_SECONDS)

    def share(self, work: Sequence[T]) -> Iterator[T]:
        """The items that this rank draws; together the ranks draw each item once, in order."""
        while (place := self._draw()) < len(work):
            yield work[place]

    def gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank hands in its report when it is done; rank 0 waits for them all, the others get an empty list."""
        if self._store is None:
            return [report]
        self._store.set(f"done/{self.rank}", json.dumps(report))
        if self.rank > 0:
            self._wait_for("finished")
            return []
        return [json.loads(self._wait_for(f"done/{rank}")) for rank in range(self.world)]

    def finish(self) -> None:
        """Rank 0 lets the others go (the store that they wait on may live in its process)."""
        if self._store is not None and self.rank == 0:
            self._store.set("finished", "yes")

    def _wait_for(self, key: str) -> str:
        """The value of a key once it is there; looks again and again, so that a signal gets through."""
        assert self._store is not None
        while not self._store.check([key]):
            _raise_failure(self._store, "failed", "interrupted")
            time.sleep(_LOOK_AGAIN_SECONDS)
        return self._store.get(key).decode()

    def _draw(self) -> int:
        return next(self._alone) if self._store is None else self._store.add("next batch", 1) - 1


class _Watch:
    """Waits for ranks that haven't come to a meeting, as long as there is hope."""

    def __init__(self, store: GroupStore, keys: Sequence[str], own: int) -> None:
        self._store, self._keys, self._own = store, keys, own
        self._began = self._looked = time.monotonic()
        self._stop_seen: float | None = None
        self._beats: dict[int, tuple[int, float]] = {}

    def look(self, stop: Sequence[BaseException]) -> None:
        """Wait a moment, a tenth of what was waited so far; now and then see whether the others will come at all."""
        now = time.monotonic()
        time.sleep(min(_LOOK_AGAIN_SECONDS / 2, 1e-4 + (now - self._began) / 10))
        if now - self._looked < _LOOK_AGAIN_SECONDS:
            return
        self._looked = now
        _raise_failure(self._store, "failed", "interrupted")
        if stop and self._stop_seen is None:
            self._stop_seen = now
        for rank, key in enumerate(self._keys):
            if rank != self._own and not self._store.check([key]):
                self._check(rank, now, key.rpartition("/")[0])

    def _check(self, rank: int, now: float, meeting: str) -> None:
        beats = self._store.add(f"beats/{rank}", 0)
        seen, since = self._beats.get(rank, (-1, now))
        if beats != seen:
            self._beats[rank] = (beats, since := now)
        again = "run the same command to go on"
        if now - since > (_DEAD_SECONDS if self._stop_seen is None else _DEAD_WHEN_STOPPING):
            raise DflashError(f"rank {rank} has given no sign of life for {now - since:.0f} s: it is gone; {again}")
        if self._stop_seen is not None and now - self._stop_seen > _LATE_WHEN_STOPPING:
            raise DflashError(
                f"rank {rank} did not come to {meeting} within {now - self._stop_seen:.0f} s of the signal to stop; "
                f"{again}"
            )


def _raise_failure(store: GroupStore, *keys: str) -> None:
    """Raise what a rank has left under one of these keys; by default what is an error."""
    for key in keys or ("failed",):
        if store.check([key]):
            rank, reason = json.loads(store.get(key))
            raise DflashError(f"rank {rank} stopped: {reason}")
