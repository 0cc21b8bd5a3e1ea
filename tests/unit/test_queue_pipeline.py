"""Window and queue together, as the pipelines use them, with real threads that are left to race."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tool.queue import BucketedHSQueue, BucketPolicy, Item, QueueClosed
from dflash_tool.window import InflightWindow

HANG = 10  # seconds until a join counts as a hang


@pytest.fixture(autouse=True, scope="module")
def _switch_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


T = TypeVar("T")


def until_closed(shared: BucketedHSQueue[T]) -> Iterator[Item[T]]:
    while True:
        try:
            yield shared.get()
        except QueueClosed:
            return


class BoomError(Exception):
    """What a failing thread raises."""


class Crew:
    """Threads that start together; the first error of one is told to all through ``abort``."""

    def __init__(self, abort: Callable[[BaseException], None]) -> None:
        self.abort = abort
        self.errors: list[BaseException] = []
        self.roles: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run all roles to their end; a thread that does not end fails the test."""
        barrier = threading.Barrier(len(self.roles))

        def guard(role: Callable[[], None]) -> None:
            barrier.wait(HANG)
            try:
                role()
            except BaseException as error:
                self.errors.append(error)
                self.abort(error)

        threads = [threading.Thread(target=guard, args=(role,), daemon=True) for role in self.roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            self.abort(RuntimeError("the test gives up"))
        assert not stuck, f"deadlock: {stuck}"


@dataclass(frozen=True)
class Plan:
    """A run: batches (bucket, bytes) in plan order, and who does what."""

    batches: Sequence[tuple[int, int]]
    slack: float  # the window holds 1 + slack of the largest batch
    places: int
    targets: int
    consumers: int
    taking: bool
    fail: tuple[str, int, int] | None  # role, which thread of it, at which of its batches
    seed: int

    @property
    def largest(self) -> int:
        return max(nbytes for _, nbytes in self.batches)


plans = st.builds(
    Plan,
    batches=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=30),
    slack=st.sampled_from([0, 0, 0.5, 2, 5]),
    places=st.integers(1, 3),
    targets=st.integers(1, 4),
    consumers=st.integers(1, 4),
    taking=st.booleans(),
    fail=st.none()
    | st.tuples(st.sampled_from(["dispatch", "target", "consumer"]), st.integers(0, 3), st.integers(0, 8)),
    seed=st.integers(0, 2**32),
)


class Run:
    """Dispatcher, targets and consumers of one plan around one window and two queues."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.window = InflightWindow(int(plan.largest * (1 + plan.slack)), plan.places)
        self.todo: BucketedHSQueue[None] = BucketedHSQueue()  # the shared target queue: one bucket, a plain FIFO
        self.states: BucketedHSQueue[str] = BucketedHSQueue()
        self.boom = BoomError(plan.fail)
        self.lock = threading.Lock()
        self.in_flight = self.most = 0  # bytes, counted by the test
        self.used: list[int] = []
        self.targets_left = plan.targets
        rng = random.Random(plan.seed)
        self.owner = [rng.randrange(plan.consumers) for _ in plan.batches]
        self.crew = Crew(self.abort)
        self.crew.roles = [self.dispatch, *(partial(self.target, n) for n in range(plan.targets))]
        consumer = self.drafter if plan.taking else self.sink
        self.crew.roles += [partial(consumer, n) for n in range(plan.consumers)]

    def abort(self, error: BaseException) -> None:
        for part in (self.window, self.todo, self.states):
            part.abort(error)

    def work(self, role: str, number: int) -> Iterator[None]:
        """One batch's worth of work at each ``next``: a random pause, or the failure that the plan wants here."""
        rng = random.Random(f"{self.plan.seed} {role} {number}")
        for done in count():
            if self.plan.fail == (role, number, done):
                raise self.boom
            for _ in range(rng.choice((0, 0, 20, 200))):
                pass
            yield

    def dispatch(self) -> None:
        step = self.work("dispatch", 0)
        for index, (bucket, nbytes) in enumerate(self.plan.batches):
            next(step)
            self.window.acquire(bucket, nbytes)
            with self.lock:
                self.in_flight += nbytes
                self.most = max(self.most, self.in_flight)
            self.todo.put(Item(index, 0, 0, None))
        self.todo.close()

    def target(self, number: int) -> None:
        step = self.work("target", number)
        for index in (item.index for item in until_closed(self.todo)):
            next(step)
            bucket, nbytes = self.plan.batches[index]
            self.states.put(Item(index, bucket, nbytes, f"states of {index}"))
        with self.lock:
            self.targets_left -= 1
            last = self.targets_left == 0
        if last:
            self.states.close()

    def sink(self, number: int) -> None:
        step = self.work("consumer", number)
        for item in until_closed(self.states):
            next(step)
            self.use(item)

    def drafter(self, number: int) -> None:
        step = self.work("consumer", number)
        for index in (index for index, owner in enumerate(self.owner) if owner == number):
            item = self.states.take(index)
            next(step)
            self.use(item)

    def use(self, item: Item[str]) -> None:
        assert item.payload == f"states of {item.index}"
        with self.lock:
            self.in_flight -= item.nbytes
            self.used.append(item.index)
        self.window.release(item.bucket, item.nbytes)


@settings(max_examples=250, deadline=None)
@given(plan=plans)
def test_a_run_ends_with_all_items_or_the_first_error(plan: Plan) -> None:
    run = Run(plan)
    run.crew.run()
    assert len(set(run.used)) == len(run.used)
    assert run.most <= run.window.peak <= run.window.limit_bytes
    if run.crew.errors:
        assert all(error is run.boom for error in run.crew.errors)
    else:
        assert sorted(run.used) == list(range(len(plan.batches)))
        assert run.window.in_flight == run.states.qsize() == 0
        assert run.window.peak >= plan.largest


class Watched(BucketPolicy[int]):
    """The policy, with its bounds looked at after every move: what holds here holds at every instant."""

    def try_put(self, item: Item[int]) -> bool:
        done = super().try_put(item)
        assert self.max_items_per_bucket is None or max(self.bucket_sizes().values()) <= self.max_items_per_bucket
        assert self.max_bytes is None or self.nbytes <= self.max_bytes
        assert done or len(self), "a full queue has something to get"
        return done


@settings(max_examples=120, deadline=None)
@given(
    max_items=st.none() | st.integers(1, 3),
    max_bytes=st.none() | st.integers(9, 20),
    counts=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    getters=st.integers(1, 3),
    takers=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_bounded_by_itself_with_gets_and_takes_mixed(
    max_items: int | None, max_bytes: int | None, counts: list[int], getters: int, takers: int, seed: int
) -> None:
    shared: BucketedHSQueue[int] = BucketedHSQueue(max_items_per_bucket=max_items, max_bytes=max_bytes)
    shared._policy = Watched(max_items_per_bucket=max_items, max_bytes=max_bytes)
    total = sum(counts)
    rng = random.Random(seed)
    items = [Item(index, rng.randrange(3), rng.randrange(10), index) for index in range(total)]
    wanted = rng.sample(range(total), total // 3)
    got: list[list[Item[int]]] = [[] for _ in range(getters)]
    taken: list[Item[int]] = []
    done = threading.Barrier(len(counts), action=shared.close)

    def produce(producer: int) -> None:
        first = sum(counts[:producer])
        for item in items[first : first + counts[producer]]:
            shared.put(item)
        done.wait(HANG)

    def get(getter: int) -> None:
        got[getter].extend(until_closed(shared))

    def take(taker: int) -> None:
        for index in wanted[taker::takers]:
            with suppress(QueueClosed):  # a get had it before this take came
                taken.append(shared.take(index))

    crew = Crew(shared.abort)
    for role, number in ((produce, len(counts)), (get, getters), (take, takers)):
        crew.roles += [partial(role, n) for n in range(number)]
    crew.run()
    assert not crew.errors
    out = [*taken, *(item for its in got for item in its)]
    assert sorted(out, key=lambda item: item.index) == items, "every item out exactly once"
    for one, producer, bucket in product(got, range(len(counts)), range(3)):
        mine = range(sum(counts[:producer]), sum(counts[: producer + 1]))
        seen = [item.index for item in one if item.index in mine and item.bucket == bucket]
        assert seen == sorted(seen), "one producer's items of one bucket reach one getter in order"
    counters = shared.counters()
    assert sum(counters.puts.values()) == sum(counters.gets.values()) == total
    assert (shared.qsize(), shared.nbytes(), shared.bucket_sizes()) == (0, 0, {})
