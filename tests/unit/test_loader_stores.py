"""Several stores and growing stores through the loader; commits, waits and steps are ordered by events."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_tool.buckets import StepPlan
from dflash_tool.errors import Interrupted
from dflash_tool.loader import MixingLoader, anchor_counts, epoch_plans
from dflash_tool.store.follow import Follower, WriterGone
from dflash_tool.store.joined import AnyStore, JoinedStore
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import write_manifest
from dflash_tool.store.reader import HiddenStore
from tests.store_kit import MadeStore, make_store, make_writer

G = 8
Steps = list[tuple[int, int, list[int]]]


def loader_of(store: AnyStore, **options: Any) -> tuple[MixingLoader, Callable[[int], StepPlan]]:
    rows = np.arange(len(store.samples))
    plan_of = epoch_plans(
        store.samples, rows, anchors_of=anchor_counts(store.samples), anchors=16, block_size=4, seed=0,
        batch_samples=G, context_budget=300, block_budget=1000,
    )  # fmt: skip
    options = {"layers": (0, 2), "epochs": 1, "window_bytes": 100_000, "threads": 1, "verify": "first", **options}
    return MixingLoader(store, rows, plan_of, **options), plan_of


def read(loader: MixingLoader, into: Steps | None = None) -> Steps:
    steps: Steps = [] if into is None else into
    for step in loader:
        steps.append((step.epoch, step.index, [int(row) for batch in step for row in batch.rows]))
    return steps


def lengths_of(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 100, count).tolist()  # type: ignore[no-any-return]


def test_each_store_has_its_share_of_every_step(tmp_path: Path) -> None:
    """Twice the 60 samples of one store, about half of the 80 of the other."""
    make_store(tmp_path / "a", lengths_of(60, 0), edges=(30, 100))
    make_store(tmp_path / "b", lengths_of(80, 1), edges=(20, 60, 100), seed=1)
    joined = JoinedStore([HiddenStore.open(tmp_path / name) for name in "ab"], [2, 0.5], seed=0)
    samples = joined.samples
    loader, _ = loader_of(joined, epochs=2)
    share = np.bincount(samples.strata) / len(samples)
    seen: list[Counter[int]] = [Counter(), Counter()]
    for step in loader:
        counts = np.zeros_like(share)
        for batch in step:
            seen[step.epoch].update(batch.rows.tolist())
            np.add.at(counts, samples.strata[batch.rows], 1)
            assert (samples.buckets[batch.rows] == batch.bucket).all()
            np.testing.assert_array_equal(batch.copies, samples.copies[batch.rows])
            np.testing.assert_array_equal(batch.sample_ids, samples.ids[batch.rows])
            for place, row in enumerate(batch.rows.tolist()):
                states = torch.from_numpy(np.stack(list(joined.read(row).values()))).view(torch.bfloat16)
                assert torch.equal(batch.states[:, place, : states.shape[1]], states)
        assert np.abs(counts - share * len(step.rows)).max() < 2
    assert seen == [Counter(range(len(samples)))] * 2
    places = {row: step for _, step, rows in read(loader_of(joined)[0]) for row in rows}
    twice = [(row, row + 1) for row in range(0, 120, 2)]
    together = sum(places[one] == places[other] for one, other in twice)
    assert together < len(twice) / 3  # by chance a twentieth: copies are shuffled on their own


def test_quarantined_samples_leave_holes(tmp_path: Path) -> None:
    """The others stay in their steps; a microbatch of nothing but holes is none."""
    made = make_store(tmp_path, lengths_of(40, 0), edges=(30, 100))
    plain, plan_of = loader_of(HiddenStore.open(tmp_path))
    expected = read(plain)
    lost = [int(row) for row in plan_of(0).step(2).microbatches[0].rows] + [7]
    store = HiddenStore.open(tmp_path)
    store.quarantined[lost] = True
    store.located[lost] = -1
    loader, _ = loader_of(store)
    steps = []
    for step in loader:
        rows: list[int] = []
        for batch in step:
            assert len(batch.rows)
            assert batch.input_ids.shape[1] == int(batch.lengths.max())
            rows += batch.rows.tolist()
        assert sorted(rows) == sorted(step.rows.tolist())
        steps.append((step.epoch, step.index, rows))
    assert steps == [(epoch, step, [row for row in rows if row not in lost]) for epoch, step, rows in expected]
    assert len(made.rows) - len(lost) == sum(len(rows) for *_, rows in steps)


class Growing:
    """40 samples of which none is committed; `commit(rows)` writes some, and `follower` calls `at_wait`."""

    def __init__(self, root: Path) -> None:
        self.whole: MadeStore = make_store(root / "whole", lengths_of(40, 0), edges=(30, 100))
        self.root = root / "growing"
        make_store(self.root, lengths_of(40, 0), edges=(30, 100), complete=False)
        for path in [*(self.root / "index").iterdir()]:
            path.unlink()
        self.writer = make_writer(self.root, self.whole.manifest)
        self.store = JoinedStore([HiddenStore.open(self.root)], [1.0], seed=0)
        self.lock = RunLock(self.root)
        self.at_wait: Callable[[threading.Event], object] = lambda leave: leave.wait(60)
        self.follower = Follower(self.store, pause=self._wait)

    def _wait(self, leave: threading.Event) -> None:
        self.at_wait(leave)

    def commit(self, rows: list[int]) -> None:
        samples = self.whole.samples
        for row in rows:
            bucket, length = int(samples.buckets[row]), int(samples.lengths[row])
            self.writer.append(bucket, [samples.sample_id(row)], [length], self.whole.rows[row])
        self.writer.commit_all()


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    store = Growing(tmp_path)
    with store.lock:
        yield store


def test_a_step_runs_once_its_samples_are_committed(growing: Growing) -> None:
    """Each step's samples are committed when the step before is consumed, and not earlier; then the second epoch."""
    expected = read(loader_of(HiddenStore.open(growing.whole.root), epochs=2)[0])
    loader, plan_of = loader_of(growing.store, epochs=2, follower=growing.follower)
    plan = plan_of(0)
    consumed = threading.Semaphore(1)
    committed = 0

    def next_step(_leave: threading.Event) -> None:
        nonlocal committed
        assert consumed.acquire(timeout=60)
        assert loader.state_dict()["step"] == committed
        if committed == len(plan):  # the second epoch waits for the store
            write_manifest(growing.root, growing.whole.manifest)
            return
        growing.commit(plan.samples(committed).tolist())
        committed += 1

    growing.at_wait = next_step
    steps: Steps = []
    for step in loader:
        steps.append((step.epoch, step.index, [int(row) for batch in step for row in batch.rows]))
        if step.epoch == 0:
            assert len(steps) == committed
            consumed.release()
    assert steps == expected


def test_what_is_there_is_used_before_a_dead_extraction_is_reported(growing: Growing) -> None:
    loader, plan_of = loader_of(growing.store, follower=growing.follower)
    growing.commit(plan_of(0).order[: 2 * G + 3].tolist())
    growing.lock.release()
    steps: Steps = []
    with pytest.raises(WriterGone, match="19 of 40 samples"):
        read(loader, into=steps)
    assert [index for _, index, _ in steps] == [0, 1]
    assert loader.state_dict()["step"] == 2


def test_stopped_while_it_waits(growing: Growing) -> None:
    """`end_early` reaches a loader whose consumer waits for a step, and `wait_for`; `close` ends it too."""
    loader, plan_of = loader_of(growing.store, follower=growing.follower)
    growing.commit(plan_of(0).order[:G].tolist())
    waiting = threading.Event()

    def wait(leave: threading.Event) -> None:
        waiting.set()
        assert leave.wait(60)

    growing.at_wait = wait
    steps = iter(loader)
    assert len(next(steps).rows) == G
    assert waiting.wait(60)
    loader.close()
    steps.close()  # type: ignore[attr-defined]

    waiting.clear()
    stopper = threading.Thread(target=lambda: (waiting.wait(60), loader.end_early(Interrupted("stop", 15))))
    stopper.start()
    done: Steps = []
    with pytest.raises(Interrupted, match="stop"):
        read(loader, into=done)
    stopper.join()
    assert len(done) == loader.state_dict()["step"] == 1
    with pytest.raises(Interrupted, match="stop"):
        loader.wait_for(np.arange(40))
