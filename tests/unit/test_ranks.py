"""Ranks over an in-process c10d store: who goes first, each item drawn once, reports gathered."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from dflash_tool.errors import DflashError, StoreError
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
