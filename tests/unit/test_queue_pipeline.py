"""Window and queue together, as the pipelines use them, with real threads that are left to race."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_tool.queue import BucketedHSQueue, BucketPolicy, Item, QueueClosed
from dflash_tool.window import InflightWindow

HANG = 20  # seconds until a join counts as a hang


@pytest.fixture(autouse=True, scope="module")
def _switch_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Boom(Exception):
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


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans)
def test_a_run_ends_with_all_items_or_the_first_error(plan: Plan) -> None:
    largest = max(nbytes for _, nbytes in plan.batches)
    window = InflightWindow(int(largest * (1 + plan.slack)), plan.places)
    todo: BucketedHSQueue[None] = BucketedHSQueue()  # the shared target queue: one bucket, so a plain FIFO
    states: BucketedHSQueue[str] = BucketedHSQueue()
    boom = Boom(plan.fail)
    lock = threading.Lock()
    in_flight = most = 0
    used: list[int] = []
    targets_left = plan.targets

    def abort(error: BaseException) -> None:
        for part in (window, todo, states):
            part.abort(error)

    def work(role: str, number: int) -> Callable[[], None]:
        """One batch's worth of work: a random pause, or the failure that the plan wants here."""
        rng = random.Random(f"{plan.seed} {role} {number}")
        done = 0

        def step() -> None:
            nonlocal done
            if plan.fail == (role, number, done):
                raise boom
            done += 1
            for _ in range(rng.choice((0, 0, 20, 200))):
                pass

        return step

    def dispatch() -> None:
        nonlocal in_flight, most
        step = work("dispatch", 0)
        for index, (bucket, nbytes) in enumerate(plan.batches):
            step()
            window.acquire(bucket, nbytes)
            with lock:
                in_flight += nbytes
                most = max(most, in_flight)
            todo.put(Item(index, 0, 0, None))
        todo.close()

    def target(number: int) -> None:
        nonlocal targets_left
        step = work("target", number)
        while True:
            try:
                index = todo.get().index
            except QueueClosed:
                break
            step()
            bucket, nbytes = plan.batches[index]
            states.put(Item(index, bucket, nbytes, f"states of {index}"))
        with lock:
            targets_left -= 1
            last = targets_left == 0
        if last:
            states.close()

    def use(item: Item[str]) -> None:
        nonlocal in_flight
        assert item.payload == f"states of {item.index}"
        with lock:
            in_flight -= item.nbytes
            used.append(item.index)
        window.release(item.bucket, item.nbytes)

    def sink(number: int) -> None:
        step = work("consumer", number)
        while True:
            try:
                item = states.get()
            except QueueClosed:
                return
            step()
            use(item)

    mine = [random.Random(plan.seed).randrange(plan.consumers) for _ in plan.batches]

    def drafter(number: int) -> None:
        step = work("consumer", number)
        for index, owner in enumerate(mine):
            if owner == number:
                item = states.take(index)
                step()
                use(item)

    crew = Crew(abort)
    crew.roles = [dispatch]
    crew.roles += [lambda n=n: target(n) for n in range(plan.targets)]  # type: ignore[misc]
    consumer = drafter if plan.taking else sink
    crew.roles += [lambda n=n: consumer(n) for n in range(plan.consumers)]  # type: ignore[misc]
    crew.run()

    assert len(set(used)) == len(used)
    assert most <= window.limit_bytes
    assert most <= window.peak <= window.limit_bytes
    if crew.errors:
        assert all(error is boom for error in crew.errors)
    else:
        assert sorted(used) == list(range(len(plan.batches)))
        assert window.in_flight == states.qsize() == 0
        if plan.places == 1 and plan.slack == 0:
            assert window.peak >= largest


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
    rng = random.Random(seed)
    total = sum(counts)
    starts = [sum(counts[:producer]) for producer in range(len(counts))]
    wanted = [rng.sample(range(total), total)[: total // 3][taker::takers] for taker in range(takers)]
    got: list[list[Item[int]]] = [[] for _ in range(getters)]
    taken: list[list[int]] = [[] for _ in range(takers)]
    left, lock = len(counts), threading.Lock()

    def produce(producer: int) -> None:
        nonlocal left
        own = random.Random(f"{seed} {producer}")
        for index in range(starts[producer], starts[producer] + counts[producer]):
            shared.put(Item(index, own.randrange(3), own.randrange(10), producer))
        with lock:
            left -= 1
            last = left == 0
        if last:
            shared.close()

    def get(getter: int) -> None:
        while True:
            try:
                got[getter].append(shared.get())
            except QueueClosed:
                return

    def take(taker: int) -> None:
        for index in wanted[taker]:
            try:
                taken[taker].append(shared.take(index).index)
            except QueueClosed:  # a get had it before
                continue
            except ValueError:  # another taker waits for it
                continue

    crew = Crew(shared.abort)
    for role, count in ((produce, len(counts)), (get, getters), (take, takers)):
        crew.roles += [lambda role=role, n=n: role(n) for n in range(count)]  # type: ignore[misc]
    crew.run()
    assert not crew.errors
    out = [item.index for items in got for item in items] + [index for indices in taken for index in indices]
    assert sorted(out) == list(range(total)), "every item out exactly once"
    for items in got:  # one producer's items of one bucket reach one getter in the order they were put
        for producer in range(len(counts)):
            for bucket in range(3):
                seen = [i.index for i in items if (i.payload, i.bucket) == (producer, bucket)]
                assert seen == sorted(seen)
    counters = shared.counters()
    assert sum(counters.puts.values()) == sum(counters.gets.values()) == total
    assert (shared.qsize(), shared.nbytes(), shared.bucket_sizes()) == (0, 0, {})
