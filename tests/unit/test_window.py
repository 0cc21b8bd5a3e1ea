"""The in-flight window, promise by promise."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from dflash_tool.errors import ConfigError
from dflash_tool.window import InflightWindow, Sleeper, WindowClosed, WindowWaits

from .window_kit import HANG, Stage, report_waits


@pytest.fixture(autouse=True)
def _waiting_calls_report(monkeypatch: pytest.MonkeyPatch) -> None:
    report_waits(monkeypatch)


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
