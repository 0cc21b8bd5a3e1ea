"""The queue's threads' side. No sleeps: a hook in the gate reports the moment a call has begun to wait."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dflash_tool.errors import ConfigError
from dflash_tool.queue import BucketedHSQueue, Item, QueueClosed, blocking

HANG = 10  # seconds until a wait of the test itself counts as a hang


class Call(threading.Thread):
    """One call in a thread of its own; ``outcome`` is what it returned or raised."""

    def __init__(self, stage: Stage, act: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.stage, self.act = stage, act
        self.state = "running"
        self.outcome: Any = None
        self.waiter: Any = None
        self.interrupted = False  # its sleep is going to raise, as Ctrl-C does
        self.may_give_up = threading.Event()
        self.may_give_up.set()

    def run(self) -> None:
        try:
            self.outcome = self.act()
        except BaseException as error:
            self.outcome = error
        self.stage.events.put((self, "ended"))


class Stage:
    """Starts calls and knows, from their own reports, which of them wait and which have ended."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[Call, str]] = queue.SimpleQueue()
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def start(self, act: Callable[[], Any]) -> Call:
        """Start a call and return once it waits or has ended."""
        call = Call(self, act)
        call.start()
        while call.state == "running":
            self.next_report()
        return call

    def ended(self, *calls: Call) -> list[Any]:
        """Wait until these have ended (nobody else may have to do anything for it); their outcomes."""
        while any(call.state != "ended" for call in calls):
            self.next_report()
        for call in calls:
            call.join(HANG)
            assert not call.is_alive()
        return [call.outcome for call in calls]

    def next_report(self) -> None:
        call, state = self.events.get(timeout=HANG)  # queue.Empty: a call hangs that should have gone on
        call.state = state


def report_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hook the gate that waiting calls sleep on: a ``Call`` says so before it sleeps, and raises if interrupted."""
    sleep = blocking._Waiter.sleep

    def report_and_sleep(waiter: blocking._Waiter[Any]) -> None:
        call = threading.current_thread()
        if isinstance(call, Call) and not waiter.done:
            call.waiter = waiter
            call.stage.events.put((call, "waits"))
        sleep(waiter)
        if isinstance(call, Call) and call.interrupted:
            assert call.may_give_up.wait(HANG)
            raise KeyboardInterrupt

    monkeypatch.setattr(blocking._Waiter, "sleep", report_and_sleep)


@pytest.fixture(autouse=True)
def _waiting_calls_report(monkeypatch: pytest.MonkeyPatch) -> None:
    report_waits(monkeypatch)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def item(index: int, bucket: int = 0, nbytes: int = 1) -> Item[str]:
    return Item(index, bucket, nbytes, f"states {index}")


def test_a_put_for_a_taker_leaves_the_getters_wake_up_alone(stage: Stage) -> None:
    shared: BucketedHSQueue[str] = BucketedHSQueue()
    getter = stage.start(shared.get)
    taker = stage.start(lambda: shared.take(7))
    other_taker = stage.start(lambda: shared.take(8))
    shared.put(item(7))
    assert stage.ended(taker) == [item(7)]
    assert getter.state == other_taker.state == "waits"
    shared.put(item(1))
    assert stage.ended(getter) == [item(1)]
    shared.put(item(8))
    assert stage.ended(other_taker) == [item(8)]


def test_an_item_that_a_take_waits_for_needs_no_room(stage: Stage) -> None:
    full: BucketedHSQueue[str] = BucketedHSQueue(max_items_per_bucket=1)
    full.put(item(5))
    taker = stage.start(lambda: full.take(2))
    full.put(item(2))  # does not wait
    assert stage.ended(taker) == [item(2)]
    putter = stage.start(lambda: full.put(item(3)))
    assert putter.state == "waits"
    assert full.take(3) == item(3)  # the other way round: straight from the put that waits
    assert stage.ended(putter) == [None]
    assert full.get() == item(5)


def test_a_full_bucket_does_not_hold_up_the_others_and_small_items_do_not_starve_a_big_one(
    stage: Stage,
) -> None:
    both: BucketedHSQueue[str] = BucketedHSQueue(max_items_per_bucket=2, max_bytes=10)
    both.put(item(0, bucket=0, nbytes=2))
    both.put(item(1, bucket=0, nbytes=2))
    third = stage.start(lambda: both.put(item(2, bucket=0, nbytes=1)))
    both.put(item(3, bucket=1, nbytes=2))  # passes the put that waits for bucket 0
    big = stage.start(lambda: both.put(item(4, bucket=2, nbytes=9)))
    small = stage.start(lambda: both.put(item(5, bucket=3, nbytes=1)))
    assert (third.state, big.state, small.state) == ("waits", "waits", "waits")
    assert both.get().index == 0
    assert stage.ended(third) == [None]  # a place in bucket 0 is free; 5 bytes are in
    assert [both.get().index, both.get().index] == [3, 1]
    assert stage.ended(big) == [None]
    assert small.state == "waits"
    both.get()
    assert stage.ended(small) == [None]


def test_close_refuses_puts_that_wait_and_lets_gets_drain(stage: Stage) -> None:
    closing: BucketedHSQueue[str] = BucketedHSQueue(max_items_per_bucket=2)
    for index, bucket in enumerate([0, 1, 0, 1]):
        closing.put(item(index, bucket))
    putter = stage.start(lambda: closing.put(item(9, 0)))
    taker = stage.start(lambda: closing.take(9_000))
    closing.close()
    closing.close()
    (refused,), (missed,) = stage.ended(putter), stage.ended(taker)
    assert isinstance(refused, QueueClosed)
    assert isinstance(missed, QueueClosed)
    assert "take of item 9000 on a closed queue (4 items left)" in str(missed)
    with pytest.raises(QueueClosed):
        closing.put(item(10))
    assert closing.take(2) == item(2, 0)
    assert [closing.get().index for _ in range(3)] == [0, 1, 3]
    with pytest.raises(QueueClosed, match="get on a closed queue \\(nothing left\\)"):
        closing.get()
    with pytest.raises(QueueClosed):
        closing.take(2)


def test_abort_reaches_every_waiter_and_beats_close(stage: Stage) -> None:
    stuck: BucketedHSQueue[str] = BucketedHSQueue(max_items_per_bucket=1)
    stuck.put(item(0))
    waiters = [
        *(stage.start(partial(stuck.put, item(i))) for i in (1, 2, 3)),
        *(stage.start(partial(stuck.take, i)) for i in (10, 11)),
    ]
    empty: BucketedHSQueue[str] = BucketedHSQueue()
    getters = [stage.start(empty.get) for _ in range(3)]
    boom = ValueError("first")
    for shared in (stuck, empty):
        shared.abort(boom)
        shared.abort(ValueError("second"))
        shared.close()
    assert all(outcome is boom for outcome in stage.ended(*waiters, *getters))
    with pytest.raises(ValueError, match="first"):
        stuck.get()
    drained: BucketedHSQueue[str] = BucketedHSQueue()
    drained.put(item(0))
    drained.close()
    drained.abort(boom)
    with pytest.raises(ValueError, match="first"):
        drained.get()


def test_bugs_of_the_caller_and_items_too_large_are_refused(stage: Stage) -> None:
    bounded: BucketedHSQueue[str] = BucketedHSQueue(max_bytes=10)
    with pytest.raises(ConfigError, match=r"item 4 of bucket 1 has 11 bytes.*at most 10 bytes"):
        bounded.put(item(4, 1, nbytes=11))
    bounded.put(item(0, nbytes=8))
    with pytest.raises(ValueError, match="index 0 is in the queue already"):
        bounded.put(item(0))
    putter = stage.start(lambda: bounded.put(item(1, nbytes=5)))
    with pytest.raises(ValueError, match="index 1 waits to be put"):
        bounded.put(item(1))
    with pytest.raises(ConfigError):  # refused at once, not when its turn comes
        bounded.put(item(2, nbytes=11))
    taker = stage.start(lambda: bounded.take(6))
    with pytest.raises(ValueError, match="another take waits for item 6"):
        bounded.take(6)
    with pytest.raises(ConfigError):
        bounded.put(item(6, nbytes=11))
    bounded.put(item(6))
    bounded.get()
    stage.ended(putter, taker)


def test_waits_are_counted_by_side_and_bucket() -> None:
    stage = Stage()
    timed: BucketedHSQueue[str] = BucketedHSQueue(max_items_per_bucket=1, clock=stage.clock)
    getter, taker = stage.start(timed.get), stage.start(lambda: timed.take(5))
    stage.now = 3
    assert timed.counters().get_seconds == 6  # waits that still last are in the sum ...
    assert timed.counters().get_seconds_by_bucket == {}  # ... but of no bucket yet
    timed.put(item(0, bucket=2))
    stage.ended(getter)
    stage.now = 10
    timed.put(item(5, bucket=1))
    stage.ended(taker)
    timed.put(item(6, bucket=1))
    putter = stage.start(lambda: timed.put(item(7, bucket=1)))
    stage.now = 14
    timed.get()
    stage.ended(putter)
    counters = timed.counters()
    assert counters.puts == {2: 1, 1: 3}
    assert counters.gets == {2: 1, 1: 2}
    assert counters.get_seconds_by_bucket == {2: 3, 1: 10}
    assert counters.put_seconds_by_bucket == {1: 4}
    assert (counters.put_seconds, counters.get_seconds) == (4, 13)


@pytest.mark.parametrize("call", ["get", "take"])
def test_an_item_served_to_an_interrupted_call_is_not_lost(stage: Stage, call: str) -> None:
    """The wake-up and Ctrl-C meet: the call was served, but raises before it can return the item."""
    shared: BucketedHSQueue[str] = BucketedHSQueue()
    doomed = stage.start(shared.get if call == "get" else lambda: shared.take(0))
    doomed.interrupted = True
    shared.put(item(0))
    assert isinstance(stage.ended(doomed)[0], KeyboardInterrupt)
    assert shared.counters().gets == {0: 0}
    assert shared.get() == item(0)

    doomed = stage.start(shared.get if call == "get" else lambda: shared.take(1))
    next_in_line = stage.start(shared.get)
    doomed.interrupted = True
    shared.put(item(1))
    assert stage.ended(doomed, next_in_line)[1] == item(1)

    doomed = stage.start(shared.get if call == "get" else lambda: shared.take(2))
    doomed.interrupted = True
    doomed.may_give_up.clear()
    shared.put(item(2))
    taker = stage.start(lambda: shared.take(2))
    other = stage.start(shared.get)
    doomed.may_give_up.set()
    assert stage.ended(doomed, taker)[1] == item(2)
    shared.put(item(3))
    assert stage.ended(other) == [item(3)]
    assert sum(shared.counters().gets.values()) == 4


@pytest.fixture
def _default_sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_sigint")
@pytest.mark.parametrize("call", ["put", "get", "take"])
def test_ctrl_c_ends_a_wait_of_the_main_thread(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    about_to_wait = threading.Event()
    sleep = blocking._Waiter.sleep
    main = threading.main_thread()
    assert main.ident is not None

    def announce_and_sleep(waiter: blocking._Waiter[Any]) -> None:
        about_to_wait.set()
        sleep(waiter)

    def press() -> None:
        assert about_to_wait.wait(HANG)
        signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]

    monkeypatch.setattr(blocking._Waiter, "sleep", announce_and_sleep)
    shared: BucketedHSQueue[str] = BucketedHSQueue(max_items_per_bucket=1)
    if call == "put":
        shared.put(item(0))
    act: dict[str, Callable[[], Any]] = {
        "put": lambda: shared.put(item(1)),
        "get": shared.get,
        "take": lambda: shared.take(1),
    }
    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        act[call]()
    presser.join(HANG)
    assert not presser.is_alive()
    if call == "put":
        assert shared.get() == item(0)
    shared.put(item(1))  # nobody's ghost waits for it
    assert shared.get() == item(1)
