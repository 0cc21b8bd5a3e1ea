"""`train` from several stores and from stores that are being written: what is refused, and the same run as after it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_tool import pipeline
from dflash_tool.buckets import epoch_order
from dflash_tool.pipeline import train_run
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.store.follow import Follower
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import read_manifest, write_manifest
from dflash_tool.store.reader import HiddenStore
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer.metrics import read_metrics
from tests.store_kit import make_writer

from .running import ENV, extract_words, wait_until

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
Extract = Callable[..., Path]
SMALL = {
    "block_size": 4, "draft_layers": 1, "anchors": 8, "batch_samples": 16, "epochs": 2, "lr": 1e-3,
    "val_fraction": 0.1, "val_every": 4, "save_every": 3, "log_every": 1, "inflight_gib": 0.1,
}  # fmt: skip
DFLASH = [sys.executable, "-m", "dflash_tool"]


@pytest.fixture(scope="module")
def extract(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Extract:
    """Make a store of so many samples, layers 1 and 3 unless it says otherwise."""
    made: dict[str, Path] = {}

    def make(samples: int = 100, *, family: str = "qwen3", seed: int = 0, **changed: object) -> Path:
        key = f"{samples} {family} {seed} {changed}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("extracted") / "store"
            data = token_rows(samples, seed=seed)
            options = {"layers": (1, 3), "buckets": 3, **changed}
            pipeline.extract(
                ExtractConfig(target=str(random_target(family)), data=(data,), out=made[key], **options)  # type: ignore[arg-type]
            )
        return made[key]

    return make


def _words(stores: list[Path], out: Path, *flags: object, **changed: object) -> list[str]:
    words = ["train", *(str(word) for store in stores for word in ("--store", store)), "--out", str(out)]
    options = {**SMALL, **changed}
    words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, *map(str, flags)]


def _open(stores: list[Path], out: Path, **changed: object) -> train_run.TrainRun:
    config = TrainConfig.model_validate({"store": stores, "out": out, **SMALL, **changed})
    return train_run.open_run(config, TrainTelemetry())


def _rows(run: Path, kind: str = "train") -> list[tuple[int, int, float]]:
    return [(row["step"], row.get("samples", 0), row["loss"]) for row in read_metrics(run) if row["kind"] == kind]


def _same_weights(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(run / "checkpoints" / "last" / "model.safetensors") for run in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_duplicates_across_stores_are_on_one_side(extract: Extract, tmp_path: Path) -> None:
    a = extract()
    shutil.copytree(a, tmp_path / "copy")
    run = _open([a, extract(60, seed=1), tmp_path / "copy"], tmp_path / "run", weight=(1, 1.5, 2), epochs=1)
    ids = run.store.samples.ids
    contents = ids.copy()
    contents[:, 1] &= np.uint64(0xFFFFFFFF)
    sides = [{tuple(words) for words in contents[rows].tolist()} for rows in (run.train_rows, run.val_rows)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == len(run.val_rows) > 1
    seen = [int(row) for step in run.loader for batch in step for row in batch.rows]
    assert sorted(seen) == run.train_rows.tolist()


def test_a_weight_of_one_is_no_weight(extract: Extract, tmp_path: Path) -> None:
    plain, one, two = (
        _open([extract()], tmp_path / "run", **weight) for weight in ({}, {"weight": 1}, {"weight": (2,)})
    )
    assert plain.config == one.config
    assert plain.loader.state_dict() == one.loader.state_dict()
    assert plain.store.fingerprint == one.store.fingerprint != two.store.fingerprint
    assert len(two.train_rows) == 2 * len(plain.train_rows)


@pytest.mark.parametrize(
    ("other", "flags", "says"),
    [
        ({"family": "llama"}, [], ["target of", "a drafter serves one target"]),
        ({"store_dtype": "float32"}, [], ["store dtype of", "is bfloat16", "float32", "--store-dtype"]),
        ({"layers": (1, 2)}, [], ["--aux-layers is needed", "holds layers 1, 3", "1, 2", "of both: 1"]),
        ({"layers": (1, 2)}, ["--aux-layers", "1,3"], ["lacks layer 3", "it holds 1, 2"]),
        ({"mask_token_id": 94}, [], ["--mask-token-id is needed", "is 96", "94"]),
        ({}, ["--weight", 1], ["--weight: got 1 (1.0) for 2 stores", "one for each --store"]),
        ({}, ["--weight", 1, "--weight", -1], ["--weight: got -1.0", "greater than or equal to 0"]),
        ({}, ["--weight", 1, "--weight", "nan"], ["--weight: got nan", "finite"]),
        ({}, ["--weight", 0, "--weight", 0], ["--weight: got 0.0, 0.0", "above 0"]),
        (None, [], ["are the same store", "--weight 2"]),
    ],
)
def test_stores_that_do_not_fit_together(
    extract: Extract, tmp_path: Path, dflash: Run, other: dict[str, Any] | None, flags: list[object], says: list[str]
) -> None:
    a = extract()
    (tmp_path / "link").symlink_to(a)
    b = tmp_path / "link" if other is None else extract(**{"samples": 60, "seed": 1} | other)
    refused = dflash(*_words([a, b], tmp_path / "run", *flags))
    said = " ".join(refused.err.split())
    assert refused.code == 2, said
    for part in says:
        assert part in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_its_own_stores_and_weights(extract: Extract, tmp_path: Path, dflash: Run) -> None:
    stores, out = [extract(), extract(60, seed=1)], tmp_path / "run"
    weights = ["--weight", 0.5, "--weight", 2]
    first = dflash(*_words(stores, out, *weights, epochs=1))
    assert first.code == 0, first.err
    assert all(samples <= 16 for _, samples, _ in _rows(out))
    again = dflash(*_words(stores, out, *weights, "--json", epochs=1))
    assert json.loads(again.out)["steps"] == 0
    other = dflash(*_words(stores, out, epochs=1))
    assert other.code == 2
    assert "--weight: the run has [0.5, 2.0], now [1.0, 1.0]" in " ".join(other.err.split())
    turned = dflash(*_words(stores[::-1], out, *weights, epochs=1))
    assert turned.code == 2
    assert "is of other stores" in " ".join(turned.err.split())


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
    run = _open([extract()], tmp_path / "run")
    quarantined = (int(run.train_rows[3]), int(run.val_rows[1])) if holes else ()
    growing = Growing(extract(), tmp_path / "store", quarantined)
    beside, after = tmp_path / "beside", tmp_path / "after"
    with _following(growing, monkeypatch):
        followed = dflash(*_words([growing.root], beside, "--follow", "--json"))
    assert followed.code == 0, followed.err
    assert growing.grown == 100 - len(quarantined)
    plain = dflash(*_words([growing.root], after, "--json"))
    assert plain.code == 0, plain.err
    assert _rows(beside) == _rows(after)
    held_out = len(run.val_rows) - holes
    assert sum(samples for _, samples, _ in _rows(after)) == 2 * (growing.grown - held_out)
    assert _same_weights(beside, after)
    last = [json.loads(run.out)["last"] for run in (followed, plain)]
    assert last[0] == last[1]
    assert set(_rows(beside, "validation")) < set(_rows(after, "validation"))
    assert any("validation began once" in note for note in json.loads(followed.out)["notes"])


def test_beside_an_extraction_of_one_of_two_stores(
    extract: Extract, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing(extract(), tmp_path / "store")
    stores = [extract(60, seed=1), growing.root]
    with _following(growing, monkeypatch):
        followed = dflash(*_words(stores, tmp_path / "beside", "--follow", "--weight", 1, "--weight", 1.5))
    assert followed.code == 0, followed.err
    assert dflash(*_words(stores, tmp_path / "after", "--weight", 1, "--weight", 1.5)).code == 0
    assert _rows(tmp_path / "beside") == _rows(tmp_path / "after")
    assert _same_weights(tmp_path / "beside", tmp_path / "after")


def test_what_a_growing_store_must_fulfil(
    extract: Extract, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing(extract(), tmp_path / "store")
    growing.grow()
    out = tmp_path / "run"

    def refused(code: int, *flags: object, **changed: object) -> str:
        result = dflash(*_words([growing.root], out, *flags, **changed))
        assert result.code == code, result.err
        assert "Traceback" not in result.err
        assert not out.exists()
        return " ".join(result.err.split())

    assert "5 of 100 samples" in refused(1)
    assert "--follow" in refused(1)
    assert "no run is writing it" in refused(1, "--follow")
    with growing.lock:
        said = refused(2, "--follow", seed=5)
    assert "--seed: got 5" in said
    assert "seed 0" in said


def test_a_store_that_lost_samples_is_refused(extract: Extract, tmp_path: Path, dflash: Run) -> None:
    store = tmp_path / "store"
    shutil.copytree(extract(), store)
    lost = min((store / "index").iterdir())
    lost.unlink()
    result = dflash(*_words([store], tmp_path / "run"))
    assert result.code == 1
    assert "has lost" in " ".join(result.err.split())


def test_stopped_and_left_alone_beside_an_extraction(
    extract: Extract, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while it waits; then the extraction dies. Each time the run is saved where it stands, and goes on."""
    growing = Growing(extract(), tmp_path / "store")
    beside, after = tmp_path / "beside", tmp_path / "after"
    words = _words([growing.root], beside, "--follow")

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
    assert dflash(*_words([growing.root], after)).code == 0
    assert _rows(beside) == _rows(after)
    assert _same_weights(beside, after)


def test_beside_a_real_extraction(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path
) -> None:
    """Two processes; the extraction is held up until training has begun."""
    store, beside, after = tmp_path / "store", tmp_path / "beside", tmp_path / "after"
    options: dict[str, Any] = {"batch_samples": 64, "epochs": 1}
    words = extract_words(random_target(), token_rows(1000), store, layers="1,3")
    with _process(words) as extraction:
        wait_until(extraction, (store / "head").exists)
        extraction.send_signal(signal.SIGSTOP)
        assert not read_manifest(store).complete
        with _process([*DFLASH, *_words([store], beside, "--follow", **options)]) as training:
            wait_until(training, (beside / "metrics.jsonl").exists)
            extraction.send_signal(signal.SIGCONT)
            _, said = training.communicate(timeout=240)
            assert training.returncode == 0, said
        _, said = extraction.communicate(timeout=240)
        assert extraction.returncode == 0, said
    subprocess.run([*DFLASH, *_words([store], after, **options)], env=ENV, check=True, capture_output=True)
    assert _rows(beside) == _rows(after)
    assert _same_weights(beside, after)


@contextmanager
def _process(words: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process that doesn't outlive the test, also where it is stopped."""
    with subprocess.Popen(words, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
