"""The in-flight window. No sleeps: a hook in the gate reports the moment an acquire has begun to wait."""

from __future__ import annotations

import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dflash_tool.errors import ConfigError
from dflash_tool.window import InflightWindow, Sleeper, WindowClosed, WindowWaits

HANG = 10  # seconds until a wait of the test itself counts as a hang


class Acquire(threading.Thread):
    """One acquire in a thread of its own; ``outcome`` is what it raised, None if it was granted."""

    def __init__(self, stage: Stage, bucket: int, nbytes: int) -> None:
        super().__init__(daemon=True)
        self.stage, self.bucket, self.nbytes = stage, bucket, nbytes
        self.state = "running"
        self.outcome: BaseException | None = None
        self.interrupted = False
        self.sleeper: Any = None

    def run(self) -> None:
        try:
            self.stage.window.acquire(self.bucket, self.nbytes)
        except BaseException as error:
            self.outcome = error
        self.stage.events.put((self, "ended"))


class Stage:
    """A window, and the acquires on it, which report by themselves that they wait or have ended."""

    def __init__(self, limit_bytes: int, places: int) -> None:
        self.events: queue.SimpleQueue[tuple[Acquire, str]] = queue.SimpleQueue()
        self.now = 0.0
        self.window = InflightWindow(limit_bytes, places, clock=lambda: self.now)

    def acquire(self, bucket: int, nbytes: int) -> Acquire:
        """Start an acquire and return once it waits or has ended."""
        call = Acquire(self, bucket, nbytes)
        call.start()
        while call.state == "running":
            self.next_report()
        return call

    def ended(self, *calls: Acquire) -> list[BaseException | None]:
        """Wait until these have ended (nobody else may have to do anything for it); their outcomes."""
        while any(call.state != "ended" for call in calls):
            self.next_report()
        for call in calls:
            call.join(HANG)
            assert not call.is_alive()
        return [call.outcome for call in calls]

    def next_report(self) -> None:
        call, state = self.events.get(timeout=HANG)  # queue.Empty: an acquire hangs that should have gone on
        call.state = state


@pytest.fixture(autouse=True)
def _waiting_calls_report(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = Sleeper.sleep

    def report_and_sleep(sleeper: Sleeper) -> None:
        call = threading.current_thread()
        if isinstance(call, Acquire) and not sleeper.done:
            call.sleeper = sleeper
            call.stage.events.put((call, "waits"))
        sleep(sleeper)
        if isinstance(call, Acquire) and call.interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sleeper, "sleep", report_and_sleep)


class WindowMachine(RuleBasedStateMachine):
    """Acquires in threads of their own against a plain list of what is granted and a plain line."""

    @initialize(limit=st.integers(1, 20), places=st.integers(1, 3))
    def begin(self, limit: int, places: int) -> None:
        self.limit, self.places = limit, places
        self.stage = Stage(limit, places)
        self.window = self.stage.window
        self.granted: list[tuple[int, int]] = []
        self.line: list[Acquire] = []
        self.peak = self.steps = 0
        self.waited = {"bytes": 0.0, "places": 0.0}
        self.closed = False
        self.due: list[tuple[Acquire, type[BaseException] | None]] = []

    def lacks(self, bucket: int, nbytes: int) -> str | None:
        if sum(n for _, n in self.granted) + nbytes > self.limit:
            return "bytes"
        return "places" if sum(b == bucket for b, _ in self.granted) >= self.places else None

    def settle(self) -> None:
        while self.line and self.lacks(self.line[0].bucket, self.line[0].nbytes) is None:
            call = self.line.pop(0)
            self.granted.append((call.bucket, call.nbytes))
            self.peak = max(self.peak, sum(n for _, n in self.granted))
            self.due.append((call, None))
        for outcome, (_, kind) in zip(self.stage.ended(*(call for call, _ in self.due)), self.due, strict=True):
            assert outcome is None if kind is None else isinstance(outcome, kind)
        self.due.clear()
        assert self.stage.events.empty()
        assert all(call.state == "waits" for call in self.line)

    @rule(bucket=st.integers(0, 2), tenths=st.integers(0, 11))
    def acquire(self, bucket: int, tenths: int) -> None:
        self.steps += 1
        nbytes = -(-self.limit * tenths // 10)
        call = self.stage.acquire(bucket, nbytes)
        if nbytes > self.limit:
            self.due.append((call, ConfigError))
        elif self.closed:
            self.due.append((call, WindowClosed))
        else:
            self.line.append(call)
        self.settle()

    @precondition(lambda self: self.granted)
    @rule(choice=st.integers(0, 20))
    def release(self, choice: int) -> None:
        self.window.release(*self.granted.pop(choice % len(self.granted)))
        self.settle()

    @rule(bucket=st.integers(0, 2))
    def release_too_much(self, bucket: int) -> None:
        held = sum(n for b, n in self.granted if b == bucket)
        with pytest.raises(ValueError, match=f"release of {held + 1} bytes of bucket {bucket}"):
            self.window.release(bucket, held + 1)

    @rule(seconds=st.integers(1, 100))
    def time_passes(self, seconds: int) -> None:
        self.stage.now += seconds
        if self.line:
            kind = self.lacks(self.line[0].bucket, self.line[0].nbytes)
            assert kind is not None
            self.waited[kind] += seconds * len(self.line)

    @precondition(lambda self: self.line)
    @rule(choice=st.integers(0, 20))
    def interrupt(self, choice: int) -> None:
        """As Ctrl-C does: the sleep of a waiting acquire raises."""
        call = self.line.pop(choice % len(self.line))
        call.interrupted = True
        call.sleeper._gate.release()
        self.due.append((call, KeyboardInterrupt))
        self.settle()

    @precondition(lambda self: self.steps > 15)
    @rule()
    def close(self) -> None:
        self.window.close()
        self.closed = True
        self.due += [(call, WindowClosed) for call in self.line]
        self.line.clear()
        self.settle()

    @invariant()
    def agrees(self) -> None:
        by_bucket: Counter[int] = Counter()
        for bucket, nbytes in self.granted:
            by_bucket[bucket] += nbytes
        assert self.window.in_flight == sum(by_bucket.values()) <= self.limit
        assert self.window.in_flight_by_bucket() == by_bucket
        assert self.window.places_used() == Counter(bucket for bucket, _ in self.granted)
        assert all(used <= self.places for used in self.window.places_used().values())
        assert self.window.peak == self.peak
        assert self.window.waits() == WindowWaits(**self.waited)

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        boom = RuntimeError("boom")
        self.window.abort(boom)
        self.window.abort(RuntimeError("second"))
        assert all(outcome is boom for outcome in self.stage.ended(*self.line))
        for bucket, nbytes in self.granted:
            self.window.release(bucket, nbytes)  # what was in flight may still be given back
        assert self.window.in_flight == 0


def test_every_interleaving_ends_as_the_model_says() -> None:
    run_state_machine_as_test(WindowMachine, settings=settings(max_examples=80, stateful_step_count=50, deadline=None))


def test_a_batch_larger_than_the_window_is_refused_at_once_with_both_sizes() -> None:
    window = InflightWindow(1000, 2)
    window.acquire(0, 1000)
    with pytest.raises(ConfigError) as caught:
        window.acquire(3, 1001)
    for part in ("bucket 3", "1001 bytes", "1000 bytes", "larger --inflight-gib", "smaller --batch-tokens"):
        assert part in str(caught.value)
    assert window.in_flight == window.peak == 1000


@pytest.mark.parametrize(
    ("limit", "places", "option"), [(0, 1, "--inflight-gib"), (-1, 1, "--inflight-gib"), (1, 0, "--hs-queue-depth")]
)
def test_a_window_without_room_is_refused(limit: int, places: int, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        InflightWindow(limit, places)


def test_a_stream_of_small_acquires_does_not_starve_a_big_one() -> None:
    stage = Stage(10, 100)
    small = [stage.acquire(0, 1) for _ in range(10)]
    stage.ended(*small)
    big = stage.acquire(1, 10)
    later = [stage.acquire(0, 1) for _ in range(5)]
    for left in range(10, 0, -1):
        assert big.state == "waits"
        assert stage.window.in_flight == left  # room is kept: none of the later ones slips in
        stage.window.release(0, 1)
    assert stage.ended(big) == [None]
    assert all(call.state == "waits" for call in later)
    stage.window.release(1, 10)
    assert stage.ended(*later) == [None] * 5
    assert stage.window.peak == 10


def test_waits_for_bytes_and_for_places_are_counted_apart() -> None:
    stage = Stage(10, 1)
    assert stage.window.waits() == WindowWaits(bytes=0, places=0)
    stage.window.acquire(0, 4)
    stage.window.acquire(1, 4)
    stage.now = 100  # nobody waits
    place = stage.acquire(0, 2)
    stage.now = 103
    assert stage.window.waits() == WindowWaits(bytes=0, places=3)  # it still waits
    behind = stage.acquire(2, 3)  # waits for what the head of the line waits for
    stage.now = 105
    stage.window.release(0, 4)
    stage.ended(place)
    stage.ended(behind)
    assert stage.window.waits() == WindowWaits(bytes=0, places=7)
    big = stage.acquire(3, 10)
    stage.now = 110
    stage.window.release(0, 2)
    stage.now = 111
    stage.window.release(2, 3)
    stage.window.release(1, 4)
    stage.ended(big)
    assert stage.window.waits() == WindowWaits(bytes=6, places=7)


def test_a_clock_is_not_read_unless_somebody_waits() -> None:
    def clock() -> float:
        raise AssertionError

    window = InflightWindow(2, 2, clock=clock)
    window.acquire(0, 1)
    window.acquire(0, 1)
    window.release(0, 1)
    assert window.waits() == WindowWaits(bytes=0, places=0)


def test_releases_that_do_not_match_change_nothing() -> None:
    window = InflightWindow(100, 2)
    window.acquire(0, 10)
    for bucket, nbytes in ((1, 10), (0, 11), (0, 9), (0, -1)):
        with pytest.raises(ValueError, match="each acquire is released once, with the same bytes"):
            window.release(bucket, nbytes)
    with pytest.raises(ValueError, match="acquire of -1 bytes"):
        window.acquire(0, -1)
    assert (window.in_flight, window.places_used()) == (10, {0: 1})
    window.release(0, 10)
    with pytest.raises(ValueError, match="has 0 bytes in 0 batches"):
        window.release(0, 0)


def test_close_wakes_the_line_and_abort_beats_close() -> None:
    stage = Stage(1, 1)
    stage.window.acquire(0, 1)
    waiting = [stage.acquire(0, 1) for _ in range(3)]
    stage.window.close()
    assert all(isinstance(outcome, WindowClosed) for outcome in stage.ended(*waiting))
    with pytest.raises(WindowClosed):
        stage.window.acquire(0, 0)
    stage.window.release(0, 1)
    boom = ValueError("boom")
    stage.window.abort(boom)
    stage.window.close()
    with pytest.raises(ValueError, match="boom"):
        stage.window.acquire(0, 1)


def test_an_interrupted_acquire_does_not_hold_up_those_behind_it() -> None:
    stage = Stage(10, 5)
    stage.window.acquire(0, 5)
    big, small, too_big = stage.acquire(0, 10), stage.acquire(1, 2), stage.acquire(1, 4)
    big.interrupted = True
    big.sleeper._gate.release()
    assert isinstance(stage.ended(big)[0], KeyboardInterrupt)
    assert stage.ended(small) == [None]
    assert too_big.state == "waits"
    stage.window.release(0, 5)
    assert stage.ended(too_big) == [None]


def test_a_grant_to_an_interrupted_acquire_goes_to_the_next_in_line() -> None:
    """The wake-up and Ctrl-C meet: the acquire was granted, but raises before it returns."""
    stage = Stage(10, 5)
    stage.window.acquire(0, 10)
    doomed, next_in_line = stage.acquire(0, 10), stage.acquire(0, 9)
    doomed.interrupted = True
    stage.window.release(0, 10)
    first, second = stage.ended(doomed, next_in_line)
    assert isinstance(first, KeyboardInterrupt)
    assert second is None
    assert stage.window.in_flight == 9


@pytest.fixture
def _default_sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_sigint")
def test_ctrl_c_ends_a_wait_of_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    about_to_wait = threading.Event()
    sleep: Callable[[Sleeper], None] = Sleeper.sleep
    main = threading.main_thread().ident
    assert main is not None

    def announce_and_sleep(sleeper: Sleeper) -> None:
        about_to_wait.set()
        sleep(sleeper)

    def press() -> None:
        assert about_to_wait.wait(HANG)
        signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(Sleeper, "sleep", announce_and_sleep)
    window = InflightWindow(1, 2)
    window.acquire(0, 1)
    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        window.acquire(0, 1)
    presser.join(HANG)
    assert not presser.is_alive()
    window.release(0, 1)
    window.acquire(0, 1)  # no ghost in the line
