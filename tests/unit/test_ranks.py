"""Ranks over an in-process c10d store: who goes first, each item drawn once, meetings, failures, deaths."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from dflash_tool import ranks as module
from dflash_tool.errors import DflashError, Interrupted, StoreError
from dflash_tool.ranks import Ranks


def _run(world: int, body: Callable[[Ranks], Any]) -> list[Any]:
    """Run `body` on `world` ranks, each in a thread; results or the errors they raised, by rank."""
    store = HashStore()
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = body(Ranks(rank, world, store))
        except DflashError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("world", [1, 2, 5])
def test_each_item_is_drawn_once_and_in_order(world: int) -> None:
    shares = _run(world, lambda ranks: list(ranks.share(range(200))))
    assert sorted(item for share in shares for item in share) == list(range(200))
    assert all(share == sorted(share) for share in shares)


def test_a_rank_that_is_held_up_leaves_its_share_to_the_others() -> None:
    others_done = threading.Event()

    def body(ranks: Ranks) -> list[int]:
        drawn = []
        for item in ranks.share(range(50)):
            drawn.append(item)
            if ranks.rank == 0:
                assert others_done.wait(60)
        if ranks.rank > 0:
            others_done.set()
        return drawn

    slow, fast = _run(2, body)
    assert len(slow) <= 1
    assert len(fast) >= 49


def test_rank_zero_goes_first() -> None:
    begun: list[int] = []

    def body(ranks: Ranks) -> list[int]:
        mine = ranks.first(lambda: begun.append(ranks.rank) or "opened")
        assert mine == ("opened" if ranks.rank == 0 else None)
        return list(begun)

    assert _run(3, body) == [[0], [0], [0]]


def test_what_rank_zero_refuses_ends_everybody() -> None:
    def refuse() -> None:
        raise StoreError("other settings")

    first, *others = _run(3, lambda ranks: ranks.first(refuse))
    assert str(first) == "other settings"
    assert all("rank 0 could not begin" in str(error) for error in others)


@pytest.mark.parametrize("world", [1, 3])
def test_reports_reach_rank_zero_and_nobody_leaves_before(world: int) -> None:
    finished = threading.Event()

    def body(ranks: Ranks) -> list[dict[str, Any]]:
        reports = ranks.gather({"rank": ranks.rank, "rows": [ranks.rank] * 2})
        if ranks.rank == 0:
            finished.set()
            ranks.finish()
        assert finished.is_set()
        return reports

    first, *others = _run(world, body)
    assert first == [{"rank": rank, "rows": [rank] * 2} for rank in range(world)]
    assert others == [[]] * (world - 1)


def test_barrier() -> None:
    arrived: list[int] = []

    def body(ranks: Ranks) -> int:
        arrived.append(ranks.rank)
        ranks.barrier()
        return len(arrived)

    assert _run(4, body) == [4, 4, 4, 4]


@pytest.mark.parametrize("world", [1, 3])
def test_everyone_gets_all_reports_by_rank(world: int) -> None:
    def body(ranks: Ranks) -> list[list[Any]]:
        with ranks.alive():
            return [ranks.everyone(f"step {step}", [ranks.rank, step, 0.1 + step]) for step in range(5)]

    expected = [[[rank, step, 0.1 + step] for rank in range(world)] for step in range(5)]
    assert _run(world, body) == [expected] * world


def test_a_meeting_leaves_nothing_behind_but_the_newest() -> None:
    store = HashStore()
    ranks = [Ranks(rank, 2, store) for rank in range(2)]
    for step in range(3):
        store.set(f"step {step}/1", "null")
        ranks[0].everyone(f"step {step}", None)
    assert [store.check([f"step {step}/0"]) for step in range(3)] == [False, False, True]


def test_a_rank_that_fails_tells_the_others_why() -> None:
    waiting = threading.Barrier(3)

    def body(ranks: Ranks) -> None:
        with ranks.alive():
            waiting.wait(60)
            if ranks.rank == 1:
                raise StoreError("row 7 is damaged")
            ranks.everyone("step 0", None)

    first, failed, third = _run(3, body)
    assert str(failed) == "row 7 is damaged"
    assert str(first) == str(third) == "rank 1 stopped: row 7 is damaged"


def test_a_signal_that_follows_from_a_failure_shows_the_failure() -> None:
    """torchrun sends SIGTERM to the others as soon as a rank has ended; wherever that finds them."""
    failing = threading.Event()

    def body(ranks: Ranks) -> None:
        with ranks.alive():
            if ranks.rank == 1:
                failing.set()
                raise StoreError("row 7 is damaged")
            assert failing.wait(60)
            while not ranks.store.check(["failed"]):  # type: ignore[union-attr]
                pass
            raise Interrupted("stopped by SIGTERM.", 15)

    first, failed = _run(2, body)
    assert str(failed) == "row 7 is damaged"
    assert str(first) == "rank 1 stopped: row 7 is damaged"


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_a_rank_that_is_gone_is_named(asked_to_stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 never beats. Whoever was asked to stop (torchrun kills it soon) waits less long."""
    monkeypatch.setattr(module, "_DEAD_WHEN_STOPPING" if asked_to_stop else "_DEAD_SECONDS", 0.2)
    ranks = Ranks(0, 2, HashStore())
    stop = [Interrupted("stopped by SIGTERM.", 15)] if asked_to_stop else []
    with pytest.raises(DflashError, match=r"rank 1 has given no sign of life .* run the same command"):
        ranks.everyone("step 4", None, stop=stop)


def test_one_that_lives_but_does_not_come_is_waited_for_until_there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LATE_WHEN_STOPPING", 0.5)
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.01)
    store = HashStore()
    with Ranks(1, 2, store).alive(), pytest.raises(DflashError, match="rank 1 did not come to step 4"):
        Ranks(0, 2, store).everyone("step 4", None, stop=[Interrupted("stopped by SIGTERM.", 15)])


def test_a_store_that_is_gone_is_said() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    with pytest.raises(DflashError, match=r"store can.t be reached any more .connection reset"):
        Ranks(0, 2, Gone()).everyone("step 0", None)
