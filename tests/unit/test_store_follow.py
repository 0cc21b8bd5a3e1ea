"""Following stores that grow, one event after another: each look is a step of the test, nothing sleeps."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_tool.errors import StoreError
from dflash_tool.store.follow import Follower, WriterGone, check_written, wait_until_begun
from dflash_tool.store.joined import JoinedStore
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import write_manifest
from dflash_tool.store.reader import HiddenStore
from tests.store_kit import MadeStore, make_store, make_writer


class Growing:
    """A store of three samples, of which the last is missing; `follower` does the next of `events` at each wait."""

    def __init__(self, root: Path) -> None:
        self.made: MadeStore = make_store(root, [5, 6, 7], complete=False)
        self.store = HiddenStore.open(root)
        self.lock = RunLock(root)
        self.lock.acquire()
        self.events: Iterator[Callable[[], None]] = iter([])
        self.follower = Follower(JoinedStore([self.store], [1.0], seed=0), pause=lambda _leave: next(self.events)())

    def commit(self) -> None:
        writer = make_writer(self.made.root, self.made.manifest)
        writer.append(0, [self.made.samples.sample_id(2)], [7], self.made.rows[2])
        writer.commit_all()

    def quarantine(self) -> None:
        self._write(quarantined=(self.made.samples.sample_id(2).hex(),))

    def complete(self) -> None:
        self._write(complete=True)

    def make_anew(self) -> None:
        self._write(seed=7)

    def _write(self, **changes: object) -> None:
        write_manifest(self.made.root, self.made.manifest.model_copy(update=changes))


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    store = Growing(tmp_path)
    yield store
    store.lock.release()


LEAVE = threading.Event()  # never set
ALL = np.arange(3)


@pytest.mark.parametrize("how", ["commit", "quarantine", "complete"])
def test_waits_until_the_sample_is_settled(growing: Growing, how: str) -> None:
    seen: list[bool] = []

    def nothing() -> None:
        seen.append(growing.follower.here(ALL))

    growing.events = iter([nothing, nothing, getattr(growing, how)])
    assert growing.follower.wait(np.arange(2), LEAVE)  # these are there
    assert growing.follower.wait(ALL, LEAVE)
    assert seen == [False, False]
    assert growing.store.holes(ALL).any() == (how == "quarantine")


def test_whole_stores_are_waited_for(growing: Growing) -> None:
    growing.events = iter([growing.commit, lambda: None, growing.complete])
    assert growing.follower.wait(None, LEAVE)
    assert growing.store.manifest.complete


def test_nobody_writes_any_more(growing: Growing) -> None:
    growing.events = iter([lambda: None, growing.lock.release])
    with pytest.raises(WriterGone, match=r"2 of 3 samples\) and no run .*dflash extract --config .*/extract.yaml"):
        growing.follower.wait(ALL, LEAVE)
    assert growing.follower.wait(np.arange(2), LEAVE)  # what is there can be had
    with pytest.raises(WriterGone):
        check_written(growing.store)
    growing.complete()
    check_written(growing.store)


def test_a_run_that_ends_well_between_two_looks(growing: Growing) -> None:
    """The lock is gone, but by now everything is there."""
    alive = growing.follower._watches[0].alive

    def finished_just_now() -> bool:
        answer = alive()
        if not answer:
            growing.commit()
            growing.complete()
        return answer

    growing.follower._watches[0].alive = finished_just_now  # type: ignore[method-assign]
    growing.events = iter([growing.lock.release])
    assert growing.follower.wait(ALL, LEAVE)


def test_left_while_waiting(growing: Growing) -> None:
    leave = threading.Event()
    growing.events = iter([lambda: None, leave.set])
    assert not growing.follower.wait(ALL, leave)


def test_another_store_in_its_place(growing: Growing) -> None:
    growing.events = iter([growing.make_anew])
    with pytest.raises(StoreError, match="made anew"):
        growing.follower.wait(ALL, LEAVE)


def test_an_extraction_that_has_just_begun_is_waited_for(tmp_path: Path) -> None:
    """Samples, manifest and head come one after another."""
    make_store(tmp_path / "whole", [5, 6, 7])
    root = tmp_path / "store"
    names = iter(["samples.arrow", "manifest.json", "head"])
    with RunLock(root):
        wait_until_begun(
            root, pause=lambda _: (tmp_path / "whole" / (name := next(names))).rename(root / name) and None
        )
    assert next(names, None) is None
    wait_until_begun(tmp_path / "store", pause=lambda _: pytest.fail("it is complete"))


def test_an_extraction_about_to_begin_is_waited_for(tmp_path: Path) -> None:
    """It goes on with an unfinished store, and takes its lock after a while; nobody is waited for for ever."""
    root = tmp_path / "store"
    make_store(root, [5, 6, 7], complete=False)
    (root / "head").mkdir(exist_ok=True)
    lock = RunLock(root)
    pauses = iter([lambda: None, lock.acquire])
    wait_until_begun(root, pause=lambda _: next(pauses)())
    assert next(pauses, None) is None
    lock.release()
    seconds: list[float] = []
    wait_until_begun(root, pause=seconds.append)
    wait_until_begun(tmp_path / "nothing", pause=seconds.append)
    assert sum(seconds) == 2 * 120
