"""Nobody starves, nothing deadlocks, the window holds: a live run's real parts on a simulated clock."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .live_sim import LiveRun, World, balanced


@pytest.mark.parametrize("buckets", [6, 1])
@pytest.mark.parametrize(
    ("targets", "drafters", "speed"),
    [(1, 1, 1), (8, 1, 1), (1, 8, 1), (8, 8, 1), (5, 3, 1), (3, 5, 1), (3, 2, 2), (2, 3, 0.5)],
)
def test_as_fast_as_the_slower_side(
    monkeypatch: pytest.MonkeyPatch, buckets: int, targets: int, drafters: int, speed: float
) -> None:
    """Heavy-tailed lengths; one bucket is the hardest: all share its places. benchmarks/live_sim.py does all pairs."""
    world = balanced(2500, targets, drafters, buckets=buckets, speed=speed)
    run = LiveRun(world, monkeypatch)
    assert sorted(run.used) == list(range(run.batches))
    assert run.ahead <= world.steps_ahead
    # Nobody drafts before the first batch is made, nor makes one while the last are drafted.
    ends = max(world.target_cost) * 128 + 128 * world.drafter_cost
    assert world.fastest() / (run.seconds - ends) >= 0.97


def test_the_limit_is_what_a_side_takes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula against runs in which the other side takes no time and has all the room."""
    for targets, drafters in ((2, 3), (4, 1)):
        free = replace(balanced(1000, targets, drafters), places=1 << 30)
        alone = replace(free, drafter_cost=0.0), replace(free, target_cost=[0.0] * targets)
        assert all(LiveRun(world, monkeypatch).seconds == pytest.approx(world.fastest()) for world in alone)


def test_a_slow_target_costs_only_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four targets one is ten times slower; while it is at a batch the others make some thirty."""
    slow = replace(balanced(6000, 4, 1), target_cost=[10.0, 1.0, 1.0, 1.0], drafter_cost=1 / 3.1, places=64)
    run = LiveRun(slow, monkeypatch)
    assert sorted(run.used) == list(range(run.batches))
    assert run.ahead <= slow.steps_ahead
    seconds = run.seconds - 10 * 128  # nobody helps it with its last batch
    assert slow.fastest() / seconds >= 0.97
    tokens = sum(batch.padded_tokens for step in slow.planned() for batch in step.microbatches)
    assert seconds <= tokens / 3.1 * 1.03


class BoomError(Exception):
    """What a failing thread raises."""


worlds = st.builds(
    World,
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40).map(lambda each: np.array(each, np.int64)),
    buckets=st.integers(1, 4),
    targets=st.integers(1, 4),
    drafters=st.integers(1, 4),
    batch_samples=st.integers(1, 12),
    budget=st.integers(1, 40),
    places=st.integers(1, 3),
    steps_ahead=st.integers(1, 3),
    target_cost=st.lists(st.sampled_from([0.0, 1.0, 10.0]), min_size=4, max_size=4),
    drafter_cost=st.sampled_from([0.0, 1.0, 10.0]),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=worlds,
    slack=st.sampled_from([0, 0, 1, 3]),
    seed=st.integers(0, 2**32),
    failing=st.none()
    | st.tuples(
        st.sampled_from(["prefetcher", *(f"{side} {n}" for side in ("target", "drafter") for n in range(4))]),
        st.integers(1, 9),
    ),
)
def test_every_run_ends(
    monkeypatch: pytest.MonkeyPatch, world: World, slack: int, seed: int, failing: tuple[str, int] | None
) -> None:
    """With all steps done, or with the first error raised everywhere; a deadlock is an error of the simulation."""
    largest = max(batch.padded_tokens for step in world.planned() for batch in step.microbatches) * 8
    boom, calls, rng = BoomError(), Counter[str](), random.Random(seed)

    def fail(who: str) -> None:
        calls[who] += 1
        if failing is not None and (who, calls[who]) == failing:
            raise boom

    delay: Callable[[str], float] = lambda _: rng.choice((0.0, 0.0, 1.0, 30.0))  # noqa: E731
    world = replace(world, limit=largest * (1 + slack), fail=fail, delay=delay)
    run = LiveRun(world, monkeypatch)
    assert len(set(run.used)) == len(run.used)
    assert run.source.window.peak <= run.source.window.limit_bytes
    assert run.ahead <= world.steps_ahead
    if run.errors:
        assert all(error is boom for error in run.errors)
        assert len(run.errors) == world.drafters
    else:
        assert sorted(run.used) == list(range(run.batches))
        assert run.source.window.in_flight == run.source.states.qsize() == 0
