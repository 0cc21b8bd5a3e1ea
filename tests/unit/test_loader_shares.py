"""Several drafters of one process and several ranks: each gets its own share of a step, and an error wakes them all."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_tool.buckets import assign
from dflash_tool.loader import MixedBatch
from dflash_tool.store.reader import HiddenStore

from .loader_kit import WINDOW, Watched, loader_of, no_threads_left, plans_of


@pytest.mark.parametrize(("world", "drafters"), [(1, 2), (2, 1), (2, 3), (1, 9)])
def test_every_drafter_of_every_rank_gets_its_share(store: HiddenStore, world: int, drafters: int) -> None:
    """By `assign`, in plan order, each in a thread of its own, through a ring of hardly more than a microbatch."""
    plan = plans_of(store.samples, np.arange(len(store.samples)))(0)
    got: dict[tuple[int, int, int], list[list[int]]] = {}

    def read(rank: int, drafter: int, index: int, share: Iterator[MixedBatch]) -> None:
        got[index, rank, drafter] = [batch.rows.tolist() for batch in share]

    for rank in range(world):
        with loader_of(store, window_bytes=WINDOW // 2, rank=rank, world=world, drafters=drafters) as loader:
            for step in loader:
                before = loader.state_dict()
                threads = [
                    threading.Thread(target=read, args=(rank, drafter, step.index, share), daemon=True)
                    for drafter, share in enumerate(step.shares)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                    assert not thread.is_alive()
                assert before["step"] == step.index  # consumed only when every share is
                assert loader.state_dict()["step"] == step.index + 1
    for step in plan:
        for worker, share in enumerate(assign(step, world * drafters)):
            expected = [step.microbatches[place].rows.tolist() for place in share]
            assert got[step.index, worker // drafters, worker % drafters] == expected


def test_an_abort_wakes_every_drafter(store: HiddenStore) -> None:
    reached = threading.Barrier(3)
    raised: list[BaseException] = []

    def read(share: Iterator[MixedBatch]) -> None:
        try:
            reached.wait(60)
            for _ in share:
                pass
        except RuntimeError as error:
            raised.append(error)

    hold, error = threading.Event(), RuntimeError("a drafter failed")

    def before_read(row: int, out: dict[Any, NDArray[Any]]) -> None:
        assert hold.wait(60)

    with Watched.open(store.root) as watched:
        assert isinstance(watched, Watched)
        watched.before_read = before_read
        with loader_of(watched, drafters=2) as loader:
            steps = iter(loader)
            step = next(steps)
            threads = [threading.Thread(target=read, args=(share,), daemon=True) for share in step.shares]
            for thread in threads:
                thread.start()
            reached.wait(60)
            step.abort(error)
            hold.set()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            assert raised == [error, error]
    assert no_threads_left()
