"""Reading stores that are still being written: wait for samples, or find out that nobody writes any more.

A running `extract` is seen by what it leaves in the store: committed shards, the manifest, the lock. So following is
looking again every second. When the lock's run is gone, everything is looked at once more: it may have finished.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.store.joined import JoinedStore
from dflash_tool.store.layout import CONFIG, HEAD, MANIFEST, SAMPLES
from dflash_tool.store.lock import WriterWatch
from dflash_tool.store.manifest import read_manifest
from dflash_tool.store.reader import HiddenStore
from dflash_tool.wording import counted

Int64s = NDArray[np.int64]

_EVERY = 1.0
"""Seconds between two looks: a shard is committed every minute or two."""
_PATIENCE = 120.0
"""Seconds for an extraction to begin: it hashes the target's weights before it locks the store."""


class WriterGone(StoreError):  # noqa: N818 - says what happened
    """A store is unfinished and no run is writing it."""

    def __init__(self, store: HiddenStore) -> None:
        committed, samples = int((store.located >= 0).sum()), counted(len(store.samples), "sample")
        super().__init__(
            f"the store {store.root} is unfinished ({committed:,} of {samples}) and no run is "
            f"writing it: go on with `dflash extract --config {store.root / CONFIG}`, then, or beside it, run this "
            "training again: it goes on where it stands"
        )


def wait_until_begun(root: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until a running `extract` has prepared the samples and copied the head; return at once if it is complete.

    An `extract` that was started just before, or goes on with a store, takes a while to be seen; who waits longer than
    `_PATIENCE` finds what is there: opening says what is missing.
    """
    watch, waited = WriterWatch(root), 0.0
    while True:
        begun = all((root / name).exists() for name in (MANIFEST, SAMPLES, HEAD))
        alive = watch.alive()
        if begun and (alive or read_manifest(root).complete):
            return
        if not alive:
            if waited >= _PATIENCE:
                return
            waited += _EVERY
        pause(_EVERY)


def check_written(store: HiddenStore) -> None:
    """Raise WriterGone unless the store is complete or a run is writing it."""
    if not store.manifest.complete and not WriterWatch(store.root).alive():
        store.refresh()  # it may have ended just now
        if not store.manifest.complete:
            raise WriterGone(store)


class Follower:
    """Waits for samples of the stores that still grow. From any thread.

    pause: waits a while between two looks, or until the event is set.
    """

    def __init__(
        self, store: JoinedStore, *, pause: Callable[[threading.Event], object] = lambda leave: leave.wait(_EVERY)
    ) -> None:
        self._store, self._pause = store, pause
        self._watches = [WriterWatch(each.root) for each in store.stores]
        self._looking = threading.Lock()

    def here(self, rows: Int64s | None) -> bool:
        """Look whether these rows are all committed or quarantined; None: whether every store is complete."""
        return not self._lacking(rows) or not self._lacking(rows, look=True)

    def wait(self, rows: Int64s | None, leave: threading.Event) -> bool:
        """Wait until `here(rows)`; False if `leave` is set before.

        Raises:
            WriterGone: no run is writing a store that lacks some of them.
            StoreError: a store can't be read any more, or was made anew.
        """
        while not self.here(rows):
            gone = [at for at in self._lacking(rows) if not self._watches[at].alive()]
            if not gone:
                self._pause(leave)
            elif still := [at for at in self._lacking(rows, look=True) if at in gone]:
                raise WriterGone(self._store.stores[still[0]])
            if leave.is_set():
                return False
        return True

    def _lacking(self, rows: Int64s | None, *, look: bool = False) -> list[int]:
        """Which stores are to bring some of the rows yet, after looking again or by what is known."""
        if look:
            with self._looking:
                self._store.refresh()
        if rows is None:
            return [at for at, store in enumerate(self._store.stores) if not store.manifest.complete]
        unsettled = rows[~self._store.settled(rows)]
        return [int(at) for at in np.unique(self._store.samples.store[unsettled])]
