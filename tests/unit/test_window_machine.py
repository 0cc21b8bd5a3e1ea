"""The in-flight window against a plain list of what is granted and a plain line, in any interleaving."""

from __future__ import annotations

from collections import Counter

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
from dflash_tool.window import WindowClosed, WindowWaits

from .window_kit import Acquire, Stage, report_waits


@pytest.fixture(autouse=True)
def _waiting_calls_report(monkeypatch: pytest.MonkeyPatch) -> None:
    report_waits(monkeypatch)


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
