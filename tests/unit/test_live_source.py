"""A live source with stub targets: what a batch holds, what is kept back, what is said of it."""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_tool.errors import TargetError
from dflash_tool.loader import PlannedStep
from dflash_tool.pipeline.flow import Flow, TargetFlow, bottleneck, join, look
from dflash_tool.pipeline.live_source import LiveFeed, LiveSource
from dflash_tool.pipeline.tee import Tee
from dflash_tool.target import PaddedStates, Way

from .live_sim import LAYER, StubSamples, StubTarget, World


def _world(**changed: Any) -> World:
    lengths = np.random.default_rng(0).integers(1, 20, 60)
    given = {
        "lengths": lengths, "buckets": 3, "targets": 2, "drafters": 1, "batch_samples": 10, "budget": 60, "places": 4,
        "target_cost": [0.0, 0.0], "drafter_cost": 0.0, "steps_ahead": 2,
    }  # fmt: skip
    return World(**{**given, **changed})


def _feed(world: World, target: Any, **changed: Any) -> LiveFeed:
    given = {
        "targets": {f"target {number}": target for number in range(world.targets)},
        "samples": StubSamples(world.lengths), "layers": (LAYER,),
        "drafters": (torch.device("cpu"),) * world.drafters, "row_bytes": 8,
        "limit_bytes": 1 << 20, "places": world.places, "steps_ahead": world.steps_ahead,
        "on_quarantine": lambda _: None,
    }  # fmt: skip
    return LiveFeed(**{**given, **changed})


def _steps(source: LiveSource) -> Iterator[tuple[PlannedStep, list[Any]]]:
    number = step = 0
    while (planned := source.take_step(step)) is not None:
        batches = [source.take_batch(number + place) for place in range(len(planned.microbatches))]
        yield planned, batches
        for batch in batches:
            batch.release()
        number, step = number + len(batches), step + 1


def test_batches_hold_their_samples_in_plan_order() -> None:
    world = _world(places=1 << 20)
    source = _feed(world, StubTarget(lambda _: None))(iter(world.planned()), (LAYER,))
    source.start()
    seen = 0
    for planned, batches in _steps(source):
        for microbatch, batch in zip(planned.microbatches, batches, strict=True):
            assert batch.rows.tolist() == microbatch.rows.tolist()
            assert (batch.bucket, batch.index_in_step) == (microbatch.bucket, microbatch.index_in_step)
            for place, row in enumerate(batch.rows.tolist()):
                length = int(world.lengths[row])
                assert batch.lengths[place] == length
                assert batch.input_ids[place, :length].tolist() == list(range(row, row + length))
                assert batch.loss_mask[place].tolist() == [1] * length + [0] * (microbatch.width - length)
                states = batch.states[0, place]
                assert states[:length].tolist() == [[row + token, token] for token in range(length)]
                assert not states[length:].any()
                seen += 1
    assert seen == len(world.lengths)
    assert source.window.in_flight == 0
    flow = look(source)
    assert flow.tokens == world.lengths.sum()
    assert flow.padded_tokens == sum(batch.padded_tokens for step in world.planned() for batch in step.microbatches)
    assert 0 < flow.peak == source.peak_bytes() <= flow.limit
    source.close()


def test_memory_that_is_counted_as_free_is_free() -> None:
    """Whoever waits for the next batch, drafter or tee, does not hold the one before; the batch object may live on."""
    made: list[weakref.ref[torch.Tensor]] = []

    class Remembered(StubTarget):
        def capture_padded(self, input_ids: Any, lengths: Any, layers: Any, to: Way) -> PaddedStates:
            got = super().capture_padded(input_ids, lengths, layers, to)
            made.append(weakref.ref(got.states))
            return got

    world, written = _world(targets=1, places=1 << 20), threading.Event()
    samples = StubSamples(world.lengths)
    tee = Tee(_Writer(), samples, np.zeros(len(world.lengths), np.bool_))  # type: ignore[arg-type]
    source = _feed(world, Remembered(lambda _: None), samples=samples, tee=tee)(iter(world.planned()), (LAYER,))
    free: list[bool] = []
    release = source.window.release

    def watched(bucket: int, nbytes: int) -> None:
        free.append(made[0]() is None)
        release(bucket, nbytes)
        written.set()

    source.window.release = watched  # type: ignore[method-assign]
    source.start()
    with tee:
        batch = source.take_batch(0)
        batch.release()
        assert written.wait(60)
        source.close()
    assert free == [True]
    assert batch.states.numel() == 0


class _Writer:
    """A shard writer that throws away."""

    def append(self, *_: object) -> None: ...

    def quarantine(self, *_: object) -> None: ...

    def commit_due(self) -> None: ...

    def commit_all(self) -> None: ...

    def abandon(self) -> None: ...


def test_no_more_steps_are_dispatched_than_allowed() -> None:
    """With targets that are infinitely fast and a drafter that takes nothing, two steps' batches wait."""
    world = _world(places=1 << 20)
    steps = world.planned()
    source = _feed(world, StubTarget(lambda _: None))(iter(steps), (LAYER,))
    enough, acquire = threading.Event(), source.gate.acquire
    asked: list[int] = []

    def watched(bucket: int, nbytes: int) -> None:
        asked.append(bucket)
        if len(asked) == 3:
            enough.set()
        acquire(bucket, nbytes)

    source.gate.acquire = watched  # type: ignore[method-assign]
    source.start()
    assert enough.wait(60)
    first_two = sum(len(step.microbatches) for step in steps[:2])
    for number in range(first_two):
        source.take_batch(number).release()
    assert source.states.counters().puts == source.states.counters().gets
    assert len(asked) == 3  # the third step waits at the gate
    assert sum(source.states.counters().puts.values()) == first_two
    source.close()


def test_a_batch_whose_samples_are_all_quarantined_is_empty() -> None:
    class Spoiled(StubTarget):
        def capture_padded(self, input_ids: Any, lengths: Any, layers: Any, to: Way) -> PaddedStates:
            got = super().capture_padded(input_ids, lengths, layers, to)
            return replace(got, states=to.select(got.states, [], 1), finite=np.zeros(len(lengths), np.bool_))

    told: list[int] = []
    world = _world()
    feed = _feed(world, Spoiled(lambda _: None), on_quarantine=lambda rows: told.extend(rows.tolist()))
    source = feed(iter(world.planned()), (LAYER,))
    source.start()
    batches = [source.take_batch(number) for number in range(2)]
    assert all(batch.rows.size == 0 and batch.states.shape[:2] == (1, 0) for batch in batches)
    assert sorted(told) == sorted(np.concatenate([b.rows for b in world.planned()[0].microbatches[:2]]).tolist())
    source.close()


def test_a_target_that_hangs_is_named_and_left_behind() -> None:
    end = threading.Event()
    world = _world(targets=1)
    feed = _feed(world, StubTarget(lambda _: end.wait(60)), hang_seconds=0.05)
    source = feed(iter(world.planned()), (LAYER,))
    source.start()
    with pytest.raises(TargetError, match=r"target 0 has been at one batch of [\d,]+ tokens for"):
        source.take_batch(0)
    source.close()
    end.set()


def _flow(computing: float, waiting: float, **changed: float) -> Flow:
    target = TargetFlow(tokens=100, padded_tokens=110, computing=computing, waiting=waiting)
    given = {"for_memory": 0.0, "for_places": 0.0, "for_steps": 0.0, "inflight": 0, "peak": 1, "limit": 2}
    return Flow(targets={"target 0 on cpu": target}, queued={0: 1}, **{**given, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spent", "flow", "says"),
    [
        ({"data": 41.0, "forward": 59.0}, _flow(99, 1), "drafters idle 41 %, targets idle 1 %: targets are"),
        ({"data": 1.0, "backward": 99.0}, _flow(40, 60, for_steps=60), "targets idle 60 %: drafters are"),
        ({"data": 40.0, "forward": 60.0}, _flow(50, 50, for_memory=50), "window is the bottleneck; raise --inflight"),
        ({"data": 40.0, "forward": 60.0}, _flow(50, 50, for_places=50), "raise --hs-queue-depth"),
        ({"data": 1.0, "forward": 40.0, "validation": 59.0}, _flow(40, 60, for_steps=60), "validating is"),
        ({"data": 0.2, "forward": 9.8, "validation": 90.0}, _flow(99.9, 0.1), "validating is"),
        ({"data": 40.0, "forward": 25.0, "validation": 35.0}, _flow(99, 1), "targets are"),
        ({}, _flow(1, 1), ""),
    ],
)
def test_the_bottleneck_is_named(spent: dict[str, float], flow: Flow, says: str) -> None:
    said = bottleneck(spent, flow)
    assert says in said
    assert bool(said) == bool(spent)


def test_flows_of_ranks_are_joined() -> None:
    one, other = _flow(10, 5, for_memory=3), _flow(20, 7, for_memory=4, peak=9)
    both = join([one, other])
    assert list(both.targets) == ["rank 0 target 0 on cpu", "rank 1 target 0 on cpu"]
    assert (both.for_memory, both.peak, both.tokens, both.queued) == (7, 9, 200, {0: 2})
    assert both.idle == pytest.approx(12 / 42)
    assert join([one]) is one
