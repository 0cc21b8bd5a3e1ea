"""`train` from stores that are being written: the same run as after it, and what ends it early."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_tool.buckets import epoch_order
from dflash_tool.pipeline import stores, train_run
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.store import follow
from dflash_tool.store.follow import Follower
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import read_manifest, write_manifest
from dflash_tool.store.reader import HiddenStore
from tests.store_kit import make_writer
from tests.warm import Warm

from .running import extract_words, wait_until
from .train_kit import DFLASH, opened, rows_of, same_weights, words_of

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
Extract = Callable[..., Path]


class Growing:
    """A finished store, begun again: nothing is committed; each `grow` commits the next five samples, as extract does.

    The last call completes the store and gives the lock back. `quarantined`: never committed.
    """

    def __init__(self, whole: Path, root: Path, quarantined: tuple[int, ...] = ()) -> None:
        shutil.copytree(whole, root, ignore=shutil.ignore_patterns("shards", "index"))
        self._whole, self.root, self._quarantined = HiddenStore.open(whole), root, quarantined
        self.manifest: Manifest = read_manifest(root).model_copy(update={"complete": False, "run": None})
        write_manifest(root, self.manifest)
        self.lock = RunLock(root)  # a new one each time that an extraction seems to run
        samples = self._whole.samples
        order = epoch_order(samples.ids, samples.buckets.astype(np.int64), seed=self.manifest.seed, epoch=0)
        self._left = order.tolist()
        self._writer = make_writer(root, self.manifest)
        self._one_at_a_time = threading.Lock()
        self.grown = 0

    def grow(self, _leave: object = None) -> None:
        with self._one_at_a_time:
            samples = self._whole.samples
            for row in self._left[:5]:
                bucket, length = int(samples.buckets[row]), int(samples.lengths[row])
                if row in self._quarantined:
                    self._writer.quarantine(bucket, [samples.sample_id(row)])
                else:
                    self._writer.append(bucket, [samples.sample_id(row)], [length], self._whole.read(row))
                    self.grown += 1
            self._writer.commit_all()
            self._left = self._left[5:]
            if not self._left:
                never = tuple(samples.sample_id(row).hex() for row in self._quarantined)
                write_manifest(self.root, self.manifest.model_copy(update={"complete": True, "quarantined": never}))
                self.lock.release()


@contextmanager
def _following(
    growing: Growing, monkeypatch: pytest.MonkeyPatch, at_wait: Callable[[threading.Event], object] | None = None
) -> Iterator[None]:
    """An extraction seems to run; at each wait of the follower the store grows, or `at_wait` happens."""
    growing.lock = RunLock(growing.root)
    with monkeypatch.context() as patch, growing.lock:
        patch.setattr(train_run, "Follower", partial(Follower, pause=at_wait or growing.grow))
        yield


@pytest.mark.parametrize("holes", [False, True])
def test_the_same_run_beside_an_extraction_as_after_it(
    extract: Extract, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch, holes: bool
) -> None:
    """Also where one sample of either side is quarantined."""
    run = opened([extract()], tmp_path / "run")
    quarantined = (int(run.train_rows[3]), int(run.val_rows[1])) if holes else ()
    growing = Growing(extract(), tmp_path / "store", quarantined)
    beside, after = tmp_path / "beside", tmp_path / "after"
    with _following(growing, monkeypatch):
        followed = dflash(*words_of([growing.root], beside, "--follow", "--json"))
    assert followed.code == 0, followed.err
    assert growing.grown == 100 - len(quarantined)
    plain = dflash(*words_of([growing.root], after, "--json"))
    assert plain.code == 0, plain.err
    assert rows_of(beside) == rows_of(after)
    held_out = len(run.val_rows) - holes
    assert sum(samples for _, samples, _ in rows_of(after)) == 2 * (growing.grown - held_out)
    assert same_weights(beside, after)
    last = [json.loads(run.out)["last"] for run in (followed, plain)]
    assert last[0] == last[1]
    assert set(rows_of(beside, "validation")) < set(rows_of(after, "validation"))
    assert any("validation began once" in note for note in json.loads(followed.out)["notes"])


def test_beside_an_extraction_of_one_of_two_stores(
    extract: Extract, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing(extract(), tmp_path / "store")
    stores = [extract(60, seed=1), growing.root]
    with _following(growing, monkeypatch):
        followed = dflash(*words_of(stores, tmp_path / "beside", "--follow", "--weight", 1, "--weight", 1.5))
    assert followed.code == 0, followed.err
    assert dflash(*words_of(stores, tmp_path / "after", "--weight", 1, "--weight", 1.5)).code == 0
    assert rows_of(tmp_path / "beside") == rows_of(tmp_path / "after")
    assert same_weights(tmp_path / "beside", tmp_path / "after")


def test_a_step_of_nothing_but_quarantined_samples(extract: Extract, tmp_path: Path, dflash: Run) -> None:
    """Here the last of the epoch: a run ends, and has the other steps."""
    run = opened([extract()], tmp_path / "run", epochs=1)
    samples = len(run.train_rows) - 1
    *_, last = (step.rows for step in opened([extract()], tmp_path, epochs=1, batch_samples=samples).loader if [*step])
    assert len(last) == 1
    growing = Growing(extract(), tmp_path / "store", (int(last[0]),))
    while not read_manifest(growing.root).complete:
        growing.grow()
    done = dflash(*words_of([growing.root], tmp_path / "run", "--json", epochs=1, batch_samples=samples))
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    assert [(step, seen) for step, seen, _ in rows_of(tmp_path / "run")] == [(1, samples)]


def test_what_a_growing_store_must_fulfil(
    extract: Extract, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing(extract(), tmp_path / "store")
    growing.grow()
    out = tmp_path / "run"

    def refused(code: int, *flags: object, **changed: object) -> str:
        result = dflash(*words_of([growing.root], out, *flags, **changed))
        assert result.code == code, result.err
        assert "Traceback" not in result.err
        assert not out.exists()
        return " ".join(result.err.split())

    assert "5 of 100 samples" in refused(1)
    assert "--follow" in refused(1)
    monkeypatch.setattr(follow, "_PATIENCE", 0)  # it waits for an extraction to begin
    assert "no run is writing it" in refused(1, "--follow")
    with growing.lock:
        said = refused(2, "--follow", seed=5)
    assert "--seed: got 5" in said
    assert "seed 0" in said


def test_stopped_and_left_alone_beside_an_extraction(
    extract: Extract, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while it waits; then the extraction dies. Each time the run is saved where it stands, and goes on."""
    growing = Growing(extract(), tmp_path / "store")
    beside, after = tmp_path / "beside", tmp_path / "after"
    words = words_of([growing.root], beside, "--follow")

    def until(committed: int, then: Callable[[threading.Event], object]) -> Callable[[threading.Event], object]:
        return lambda leave: growing.grow() if growing.grown < committed else then(leave)

    def terminate(leave: threading.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert leave.wait(60)

    def stands_at() -> int:
        return int(json.loads((beside / "checkpoints" / "last" / "state.json").read_text())["step"])

    with _following(growing, monkeypatch, until(50, terminate)):
        stopped = dflash(*words)
    assert stopped.code == 143, stopped.err
    assert "run the same command to go on" in " ".join(stopped.err.split())
    assert f"stands at step {stands_at()} of" in " ".join(stopped.err.split())
    before = stands_at()
    with _following(growing, monkeypatch, until(75, lambda _leave: growing.lock.release())):
        alone = dflash(*words)
    assert alone.code == 1, alone.err
    said = " ".join(alone.err.split())
    assert "75 of 100 samples) and no run is writing it" in said
    assert f"dflash extract --config {growing.root / 'extract.yaml'}" in said
    assert stands_at() > before > 0
    with _following(growing, monkeypatch):
        assert dflash(*words).code == 0
    assert dflash(*words_of([growing.root], after)).code == 0
    assert rows_of(beside) == rows_of(after)
    assert same_weights(beside, after)


def test_beside_a_real_extraction(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm
) -> None:
    """Two processes; the extraction is held up until training has begun."""
    store, beside, after = tmp_path / "store", tmp_path / "beside", tmp_path / "after"
    options: dict[str, Any] = {"batch_samples": 64, "epochs": 1}
    words = extract_words(random_target(), token_rows(1000), store, layers="1,3")
    with warm.start(words) as extraction:
        wait_until(extraction, (store / "head").exists)
        extraction.send_signal(signal.SIGSTOP)
        assert not read_manifest(store).complete
        with warm.start([*DFLASH, *words_of([store], beside, "--follow", **options)]) as training:
            wait_until(training, (beside / "metrics.jsonl").exists)
            extraction.send_signal(signal.SIGCONT)
            training.end()
        extraction.end()
    warm.start([*DFLASH, *words_of([store], after, **options)]).end()
    assert rows_of(beside) == rows_of(after)
    assert same_weights(beside, after)


def test_started_before_the_extraction(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm, dflash: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As the README has it, one after the other: nobody has made the store yet, and training waits for it."""
    store, extractions = tmp_path / "store", []

    def begin(seconds: float) -> None:
        if not extractions:
            assert not store.exists()
            extractions.append(warm.start(extract_words(random_target(), token_rows(100), store, layers="1,3")))
        time.sleep(seconds / 20)

    monkeypatch.setattr(stores, "wait_until_begun", partial(follow.wait_until_begun, pause=begin))
    done = dflash(*words_of([store], tmp_path / "run", "--follow", epochs=1))
    extractions[0].end()
    assert done.code == 0, done.err
