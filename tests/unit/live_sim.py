"""A live run on a clock of its own: the real source, window, gate and queues, with stub targets and drafters.

Only one thread runs at a time. It hands over when it would block or when its work takes (simulated) time; the clock
moves when nobody else can run. So a run is deterministic, takes no time to wait, and if nobody can ever run again, that
is a deadlock, found at once.
"""

import heapq
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dflash_tool.buckets import Step, StepPlan, assign, assign_buckets, choose_edges
from dflash_tool.loader import LoaderClosed, PlannedStep
from dflash_tool.pipeline import live_source, targets
from dflash_tool.pipeline.live_plan import default_places
from dflash_tool.pipeline.live_source import LiveFeed, LiveSource
from dflash_tool.target import PaddedStates, Way
from dflash_tool.window import InflightWindow, Sleeper

LAYER = 0


@dataclass(eq=False)
class Task:
    """A thread of the simulation; it runs while its gate is open."""

    name: str
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class DeadlockError(Exception):
    """Nobody can ever run again."""


class Simulation:
    """Runs tasks one at a time. `now`: simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alive: set[Task] = set()
        self._ready: deque[Task] = deque()
        self._timers: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._waiting: defaultdict[Any, list[Task]] = defaultdict(list)
        self._current: Task | None = None
        self._over = threading.Semaphore(0)

    def spawn(self, name: str, run: Callable[[], object], abort: Callable[[BaseException], None]) -> Any:
        """As `start_thread` does it, but in the simulation; the watchdog looks at another clock and is left out."""
        thread = SimpleNamespace(name=name, join=lambda: None)
        if name == "watchdog":
            return thread
        task = Task(name)

        def guarded() -> None:
            task.gate.acquire()
            try:
                run()
            except BaseException as error:
                abort(error)
            self.alive.discard(task)
            self._hand_over()

        self.alive.add(task)
        self._ready.append(task)
        threading.Thread(target=guarded, name=name, daemon=True).start()
        return thread

    def run(self) -> None:
        """Until all tasks have ended. DeadlockError if some never will."""
        self._hand_over()
        assert self._over.acquire(timeout=300)
        if self.alive:
            raise DeadlockError(", ".join(sorted(task.name for task in self.alive)))

    def take(self, seconds: float) -> None:
        """Let the running task's work take so long."""
        assert self._current is not None
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), self._current))
        self._leave()

    def wait(self, what: Any) -> None:
        """Block the running task until `wake(what)`."""
        assert self._current is not None
        self._waiting[what].append(self._current)
        self._leave()

    def wake(self, what: Any) -> None:
        """Let whoever waits for this run on."""
        self._ready.extend(self._waiting.pop(what, ()))

    def _leave(self) -> None:
        me = self._current
        assert me is not None
        self._hand_over()
        me.gate.acquire()

    def _hand_over(self) -> None:
        if self._ready:
            self._current = self._ready.popleft()
        elif self._timers:
            self.now, _, self._current = heapq.heappop(self._timers)
        else:
            self._current = None
            self._over.release()
            return
        self._current.gate.release()


@dataclass
class StubSamples:
    """What a source needs of `Samples`: token t of sample r is r + t, everything is supervised."""

    lengths: NDArray[np.int64]

    @property
    def ids(self) -> NDArray[np.uint64]:
        return np.arange(2 * len(self.lengths), dtype=np.uint64).reshape(-1, 2)

    @property
    def copies(self) -> NDArray[np.int64]:
        return np.zeros(len(self.lengths), np.int64)

    def sample_id(self, row: int) -> bytes:
        return self.ids[row].tobytes()

    def tokens(self, row: int) -> NDArray[np.int32]:
        return (row + np.arange(self.lengths[row])).astype(np.int32)

    def mask(self, row: int) -> NDArray[np.uint8]:
        return np.ones(self.lengths[row], np.uint8)

    def __len__(self) -> int:
        return len(self.lengths)


class StubTarget:
    """A forward takes `seconds(padded tokens)`; the state of a token is (its id, its position)."""

    device = torch.device("cpu")

    def __init__(self, before: Callable[[int], None]) -> None:
        self.before = before

    def capture_padded(self, input_ids: Any, lengths: Any, layers: Any, to: Way) -> PaddedStates:
        self.before(input_ids.size)
        states = to.empty((1, *input_ids.shape, 2), torch.float32)
        width = np.arange(input_ids.shape[1])
        real = torch.from_numpy(width < lengths[:, None])
        states[0, :, :, 0] = torch.from_numpy(input_ids) * real
        states[0, :, :, 1] = torch.from_numpy(width) * real
        return PaddedStates(states=states, finite=np.ones(len(lengths), np.bool_), arrival=to.arrival(states))


class Ledger(InflightWindow):
    """The window, with its bounds looked at after every acquire, which `acquired` is told of."""

    acquired: Callable[[], None] = staticmethod(lambda: None)

    def acquire(self, bucket: int, nbytes: int) -> None:
        super().acquire(bucket, nbytes)
        assert self.in_flight <= self.limit_bytes
        assert max(self.places_used().values()) <= self.places
        self.acquired()


@dataclass(kw_only=True)
class World:
    """A plan, who computes it, and how long that takes. Costs are seconds of a token; `fail` raises in some thread."""

    lengths: NDArray[np.int64]
    buckets: int
    targets: int
    drafters: int
    batch_samples: int
    budget: int
    places: int
    target_cost: Sequence[float]  # of each target
    drafter_cost: float
    limit: int = 1 << 40
    steps_ahead: int = 8
    delay: Callable[[str], float] = lambda who: 0.0
    fail: Callable[[str], None] = lambda who: None

    def planned(self) -> list[PlannedStep]:
        """The steps as the loader hands them over."""
        steps = []
        for step, rows in _plan(self.lengths.tobytes(), self.buckets, self.batch_samples, self.budget):
            shares = assign(step, self.drafters)
            owner = sorted((place, drafter) for drafter, share in enumerate(shares) for place in share)
            steps.append(
                PlannedStep(
                    epoch=0, index=step.index, rows=rows, microbatches=step.microbatches,
                    drafters=tuple(drafter for _, drafter in owner), fingerprint="",
                )
            )  # fmt: skip
        return steps

    def fastest(self) -> float:
        """Seconds that the slower side needs if the other is infinitely fast: step ends are in it, waits aren't."""
        drafting, free_at = 0.0, [(0.0, number) for number in range(self.targets)]
        for step in self.planned():
            busy = [0.0] * self.drafters
            for drafter, batch in zip(step.drafters, step.microbatches, strict=True):
                busy[drafter] += batch.padded_tokens * self.drafter_cost
                at, number = heapq.heappop(free_at)
                heapq.heappush(free_at, (at + batch.padded_tokens * self.target_cost[number], number))
            drafting += max(busy)
        return max(drafting, max(free_at)[0])


@lru_cache(maxsize=4)
def _plan(lengths: bytes, buckets: int, batch_samples: int, budget: int) -> list[tuple[Step, NDArray[np.int64]]]:
    """Each step and its samples; lengths: of int64."""
    each = np.frombuffer(lengths, np.int64)
    bucket_of = assign_buckets(each, choose_edges(each, buckets))
    ids = np.random.default_rng(1).integers(0, 2**63, (len(each), 2)).astype(np.uint64)
    plan = StepPlan(
        ids=ids, lengths=each, buckets=bucket_of, block_tokens=np.zeros(len(each), np.int64), seed=0, epoch=0,
        batch_samples=batch_samples, context_budget=budget, block_budget=1,
    )  # fmt: skip
    return [(step, plan.samples(step.index)) for step in plan]


def heavy_tailed(samples: int) -> NDArray[np.int64]:
    """Lengths as those of chats: most of them short, some very long."""
    return np.clip(np.random.default_rng(0).lognormal(2.0, 0.9, samples), 1, 120).astype(np.int64)


def balanced(samples: int, targets: int, drafters: int, *, buckets: int = 6, speed: float = 1.0) -> World:
    """Targets are `speed` times as fast as drafters, all together; at 1 nobody has slack. Places: the default."""
    return World(
        lengths=heavy_tailed(samples), buckets=buckets, targets=targets, drafters=drafters, batch_samples=128,
        budget=128, places=default_places(targets, drafters), target_cost=[targets / drafters / speed] * targets,
        drafter_cost=1.0,
    )  # fmt: skip


class LiveRun:
    """A world in motion.

    Afterwards: `seconds`; `used`, batches by number; `errors`; `ahead`, unfinished steps up to and with that of a batch
    when it was dispatched, at most.
    """

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.sim = world, Simulation()
        self.errors: list[BaseException] = []
        self.used: list[int] = []
        self.ahead = self.step = self._dispatched = 0
        self._barrier: list[int] = []
        steps = world.planned()
        self._step_of = [place for place, step in enumerate(steps) for _ in step.microbatches]
        with monkeypatch.context() as patch:
            patch.setattr(Sleeper, "sleep", lambda sleeper: sleeper.done or self.sim.wait(sleeper))
            patch.setattr(Sleeper, "end", lambda sleeper, error=None: self._end(sleeper, error))
            patch.setattr(live_source, "start_thread", self.sim.spawn)
            patch.setattr(targets, "start_thread", self.sim.spawn)
            patch.setattr(live_source, "InflightWindow", Ledger)
            feed = LiveFeed(
                targets={f"target {n}": StubTarget(self._forward(n)) for n in range(world.targets)},
                samples=StubSamples(world.lengths),  # type: ignore[arg-type]
                layers=(LAYER,), drafters=(torch.device("cpu"),) * world.drafters, row_bytes=8,
                limit_bytes=world.limit, places=world.places, steps_ahead=world.steps_ahead,
                on_quarantine=lambda rows: None,
            )  # fmt: skip
            self.source: LiveSource = feed(self._fallible(steps), (LAYER,))
            self.source.window.acquired = self._note  # type: ignore[attr-defined]
            self.source.start()
            for drafter in range(world.drafters):
                self.sim.spawn(f"drafter {drafter}", lambda drafter=drafter: self._draft(drafter), self._abort)
            self.sim.run()
            self.source.close()
        self.seconds = self.sim.now
        self.batches = len(self._step_of)
        self.steps = len(steps)

    def _note(self) -> None:
        self.ahead = max(self.ahead, self._step_of[self._dispatched] + 1 - max(0, self.step - 1))
        self._dispatched += 1

    def _end(self, sleeper: Sleeper, error: BaseException | None) -> None:
        sleeper.error, sleeper.done = error, True
        self.sim.wake(sleeper)

    def _abort(self, error: BaseException) -> None:
        """What the loader and the group do with a drafter's error: everybody gets the first one."""
        self.errors.append(error)
        self.source.abort(error)
        self.sim.wake("step")

    def _fallible(self, steps: list[PlannedStep]) -> Iterator[PlannedStep]:
        for step in steps:
            self.world.fail("prefetcher")
            yield step

    def _forward(self, number: int) -> Callable[[int], None]:
        def forward(tokens: int) -> None:
            self.world.fail(f"target {number}")
            self.sim.take(tokens * self.world.target_cost[number] + self.world.delay("target"))

        return forward

    def _draft(self, drafter: int) -> None:
        """One drafter of a group: its share of each step, then a barrier."""
        number = 0
        while (planned := self._next_step(drafter)) is not None:
            for owner, microbatch in zip(planned.drafters, planned.microbatches, strict=True):
                if owner == drafter:
                    self._use(number, drafter, microbatch)
                number += 1

    def _use(self, number: int, drafter: int, microbatch: Any) -> None:
        self.world.fail(f"drafter {drafter}")
        batch = self.source.take_batch(number)
        assert batch.rows.tolist() == microbatch.rows.tolist()
        self.sim.take(microbatch.padded_tokens * self.world.drafter_cost + self.world.delay("drafter"))
        batch.release()
        self.used.append(number)

    def _next_step(self, drafter: int) -> PlannedStep | None:
        """Wait for the others to finish the step; the last one asks for the next."""
        if self.errors:
            raise self.errors[0]
        self._barrier.append(drafter)
        if len(self._barrier) < self.world.drafters:
            self.sim.wait("step")
            if self.errors:
                raise self.errors[0]
        else:
            self.step += 1
            self._planned = self.source.take_step(self.step - 1)
            self._barrier.clear()
            self.sim.wake("step")
        return self._planned


__all__ = ["DeadlockError", "LiveRun", "LoaderClosed", "World", "balanced", "heavy_tailed"]
