"""The ring against a ledger of its own: regions never overlap, the limit holds, whatever the order of returns."""

import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tool.errors import ConfigError
from dflash_tool.loader.ring import Region, Ring, ring_memory
from dflash_tool.window import WindowClosed


def ring_of(limit: int) -> Ring:
    return Ring(ring_memory(limit, pin=False))


def span(region: Region) -> tuple[int, int]:
    """Its first address and the one behind it."""
    start = region.memory.__array_interface__["data"][0]
    return start, start + region.memory.nbytes


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1000, 3000))
def test_any_sizes_in_any_order_of_returns(data: st.DataObject, sizes: list[int], limit: int) -> None:
    ring = ring_of(limit + 64)
    low, high = span(Region(ring._memory, 0, 0))
    held: list[Region] = []
    lock, arrived = threading.Lock(), threading.Semaphore(0)

    def take_all() -> None:
        for size in sizes:
            region = ring.take(size % 3, size)
            with lock:
                assert region.memory.nbytes == size
                spans = sorted(map(span, [*held, region]))
                assert spans[0][0] >= low
                assert spans[-1][1] <= high
                assert all(before[1] <= after[0] for before, after in pairwise(spans))
                held.append(region)
            arrived.release()

    errors: list[Exception] = []

    def work() -> None:
        try:
            take_all()
        except Exception as error:
            errors.append(error)
            arrived.release()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in sizes:  # wait for one more, return one of those held: the taker is ahead, never stuck
            arrived.acquire()
            with lock:
                if errors:
                    break
                region = held.pop(data.draw(st.integers(0, len(held) - 1)) if data.draw(st.booleans()) else 0)
                ring.give_back(region)
    finally:
        ring.window.close()
        thread.join()
    assert not errors, errors
    assert ring.window.in_flight == 0
    assert ring.window.peak <= ring.window.limit_bytes <= limit + 64


def test_a_batch_as_large_as_the_ring() -> None:
    ring = ring_of(256)
    for _ in range(3):
        region = ring.take(0, 256)
        region.memory[:] = 1
        ring.give_back(region)
        ring.give_back(ring.take(0, 64))  # the head is in the middle now
    with pytest.raises(ConfigError, match="window"):
        ring.take(0, 257)


def test_returned_early_is_not_free_early() -> None:
    ring = ring_of(3 * 64)
    first, second, third = (ring.take(0, 64) for _ in range(3))
    ring.give_back(second)
    assert ring.window.in_flight == 3 * 64  # what comes next would start where `first` is
    ring.give_back(first)
    assert ring.window.in_flight == 64
    again = ring.take(0, 64)
    assert span(again) == span(first)
    ring.give_back(third)
    ring.give_back(again)
    assert ring.window.in_flight == 0


def test_closed_while_waiting() -> None:
    ring = ring_of(64)
    region = ring.take(0, 64)
    ring.window.close()
    with pytest.raises(WindowClosed):
        ring.take(0, 64)
    ring.give_back(region)
    assert ring.window.in_flight == 0


def test_too_small() -> None:
    with pytest.raises(ConfigError):
        ring_of(63)
