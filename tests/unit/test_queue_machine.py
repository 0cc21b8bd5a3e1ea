"""The blocking queue against a naive model, one call at a time, each call in a thread of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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

from dflash_tool.queue import BucketedHSQueue, Item, QueueClosed

from .test_queue import Call, Stage, item, report_waits


@pytest.fixture(autouse=True)
def _waiting_calls_report(monkeypatch: pytest.MonkeyPatch) -> None:
    report_waits(monkeypatch)


class QueueMachine(RuleBasedStateMachine):
    """Every call in its own thread. The model says after each step which calls must have ended, and how.

    A lost wake-up shows as a call that does not end, a swallowed or wrong one as a call that ended otherwise.
    """

    @initialize(max_items=st.none() | st.integers(1, 2), max_bytes=st.none() | st.integers(5, 12))
    def begin(self, max_items: int | None, max_bytes: int | None) -> None:
        self.stage = Stage()
        self.queue: BucketedHSQueue[str] = BucketedHSQueue(
            max_items_per_bucket=max_items, max_bytes=max_bytes, clock=self.stage.clock
        )
        self.max_items, self.max_bytes = max_items, max_bytes
        self.items: list[Item[str]] = []
        self.putting: list[tuple[Item[str], Call]] = []
        self.getting: list[Call] = []
        self.taking: list[tuple[int, Call]] = []
        self.behind_since: dict[int, int] = {}
        self.moment = self.next_index = self.steps = 0
        self.puts: Counter[int] = Counter()
        self.gets: Counter[int] = Counter()
        self.put_seconds = self.get_seconds = 0.0
        self.due: list[tuple[Call, Any]] = []  # calls that must have ended, with what
        self.closed = False

    # The model: naive, one move at a time, until nothing moves.

    def call(self, act: Callable[[], Any]) -> Call:
        self.steps += 1
        return self.stage.start(act)

    def settle(self) -> None:
        while self.move():
            pass
        outcomes = self.stage.ended(*(call for call, _ in self.due))
        for outcome, (_, expected) in zip(outcomes, self.due, strict=True):
            if isinstance(expected, type):
                assert isinstance(outcome, expected)
            else:
                assert outcome is expected
        self.due.clear()
        assert self.stage.events.empty()
        for call in self.waiting():
            assert call.state == "waits"

    def waiting(self) -> list[Call]:
        return [*(c for _, c in self.putting), *self.getting, *(c for _, c in self.taking)]

    def move(self) -> bool:  # noqa: C901 - one move of each kind
        for entry in self.putting:
            for want in self.taking:
                if entry[0].index == want[0]:
                    self.putting.remove(entry)
                    self.taking.remove(want)
                    self.was_put(*entry)
                    self.was_got(entry[0], want[1])
                    return True
        for new, call in self.putting:
            if self.max_items is not None and self.sizes()[new.bucket] >= self.max_items:
                continue
            if self.max_bytes is not None and sum(i.nbytes for i in self.items) + new.nbytes > self.max_bytes:
                break
            self.putting.remove((new, call))
            self.items.append(new)
            self.moment += 1
            self.behind_since.setdefault(new.bucket, self.moment)
            self.was_put(new, call)
            return True
        for want in self.taking:
            for old in self.items:
                if old.index == want[0]:
                    self.taking.remove(want)
                    self.items.remove(old)
                    self.was_got(old, want[1])
                    return True
        if self.getting and self.items:
            bucket = min(self.sizes(), key=lambda b: self.behind_since[b])
            old = next(i for i in self.items if i.bucket == bucket)
            self.moment += 1
            self.behind_since[bucket] = self.moment
            self.items.remove(old)
            self.was_got(old, self.getting.pop(0))
            return True
        if self.closed:
            self.due += [(call, QueueClosed) for call in self.waiting()]
            self.putting, self.getting, self.taking = [], [], []
        return False

    def sizes(self) -> Counter[int]:
        return Counter(i.bucket for i in self.items)

    def was_put(self, new: Item[str], call: Call) -> None:
        self.puts[new.bucket] += 1
        self.due.append((call, None))

    def was_got(self, old: Item[str], call: Call) -> None:
        self.gets[old.bucket] += 1
        self.due.append((call, old))

    # What happens.

    @rule(bucket=st.integers(0, 2), nbytes=st.integers(0, 5), wanted=st.booleans())
    def put(self, bucket: int, nbytes: int, *, wanted: bool) -> None:
        index = self.next_index
        if wanted and self.taking:
            index = self.taking[0][0]
        self.next_index = max(self.next_index, index) + 1
        new = item(index, bucket, nbytes)
        call = self.call(lambda: self.queue.put(new))
        if self.closed:
            self.due.append((call, QueueClosed))
        else:
            self.putting.append((new, call))
        self.settle()

    @rule(bucket=st.integers(0, 2), nbytes=st.lists(st.integers(0, 5), min_size=2, max_size=4))
    def put_some(self, bucket: int, nbytes: list[int]) -> None:
        for size in nbytes:
            self.put(bucket, size, wanted=False)

    @rule()
    def get(self) -> None:
        self.getting.append(self.call(self.queue.get))
        self.settle()

    @precondition(lambda self: self.items)
    @rule(choice=st.integers(0, 20))
    def take_what_is_there(self, choice: int) -> None:
        self.take(self.items[choice % len(self.items)].index)

    @rule(ahead=st.integers(-3, 3))
    def take_what_may_come(self, ahead: int) -> None:
        self.take(max(0, self.next_index + ahead))

    def take(self, index: int) -> None:
        call = self.call(lambda: self.queue.take(index))
        if any(index == other for other, _ in self.taking):
            self.due.append((call, ValueError))
        else:
            self.taking.append((index, call))
        self.settle()

    @rule(seconds=st.integers(1, 100))
    def time_passes(self, seconds: int) -> None:
        self.stage.now += seconds
        self.put_seconds += seconds * len(self.putting)
        self.get_seconds += seconds * (len(self.getting) + len(self.taking))

    @precondition(lambda self: self.waiting())
    @rule(choice=st.integers(0, 20))
    def interrupt(self, choice: int) -> None:
        """As Ctrl-C does: the sleep of a waiting call raises."""
        call = self.waiting()[choice % len(self.waiting())]
        self.putting = [entry for entry in self.putting if entry[1] is not call]
        self.taking = [entry for entry in self.taking if entry[1] is not call]
        self.getting = [other for other in self.getting if other is not call]
        call.interrupted = True
        call.waiter._gate.release()
        self.due.append((call, KeyboardInterrupt))
        self.settle()

    @precondition(lambda self: self.steps > 15)
    @rule()
    def close(self) -> None:
        self.queue.close()
        self.closed = True
        self.settle()

    @invariant()
    def agrees(self) -> None:
        assert self.queue.qsize() == len(self.items)
        assert self.queue.bucket_sizes() == dict(self.sizes())
        assert self.queue.nbytes() == sum(i.nbytes for i in self.items)
        assert self.max_items is None or all(n <= self.max_items for n in self.sizes().values())
        assert self.max_bytes is None or self.queue.nbytes() <= self.max_bytes
        assert not (self.putting and not self.items), "a full queue has something to get"
        counters = self.queue.counters()
        assert +Counter(counters.puts) == self.puts
        assert +Counter(counters.gets) == self.gets
        assert counters.put_seconds == self.put_seconds
        assert counters.get_seconds == self.get_seconds

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        boom = RuntimeError("boom")
        self.queue.abort(boom)
        self.queue.abort(RuntimeError("second"))
        assert all(outcome is boom for outcome in self.stage.ended(*self.waiting()))
        for act in (lambda: self.queue.put(item(10_000)), self.queue.get, lambda: self.queue.take(10_001)):
            with pytest.raises(RuntimeError) as caught:
                act()
            assert caught.value is boom


def test_every_interleaving_of_calls_ends_as_the_model_says() -> None:
    run_state_machine_as_test(QueueMachine, settings=settings(max_examples=100, stateful_step_count=50, deadline=None))
