"""Processes of one `torchrun` group that share the work of a run: who goes first, who draws the next batch.

The group's key-value store (c10d) is all they need: one counter that ranks add to gives each batch to exactly one of
them, whoever is free (work stealing across machines), and a few keys tell who is ready, done or refused. A rank that
dies takes the group down, as torchrun does: the others get SIGTERM.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from dflash_tool.errors import DflashError

T = TypeVar("T")
_LOOK_AGAIN_SECONDS = 0.1


class GroupStore(Protocol):
    """What is used of a c10d store (torch.distributed.Store)."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, amount: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


class Ranks:
    """This process's place in its group; a process started alone is a group of one and needs no store."""

    def __init__(self, rank: int = 0, world: int = 1, store: GroupStore | None = None) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._alone = itertools.count()

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
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                self._store.set("first", json.dumps(str(error) or type(error).__name__))
                raise
            self._store.set("first", json.dumps(None))
            return result
        refused = json.loads(self._wait_for("first"))
        if refused is not None:
            raise DflashError("rank 0 could not begin; its message says why")
        return None

    def barrier(self) -> None:
        """Wait until every rank has come here; used once a run."""
        if self._store is not None and self._store.add("waiting", 1) == self.world:
            self._store.set("together", "yes")
        elif self._store is not None:
            self._wait_for("together")

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
            time.sleep(_LOOK_AGAIN_SECONDS)
        return self._store.get(key).decode()

    def _draw(self) -> int:
        return next(self._alone) if self._store is None else self._store.add("next batch", 1) - 1
