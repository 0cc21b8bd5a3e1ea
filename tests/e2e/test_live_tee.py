"""`--tee STORE`: what passes in the first epoch of a live run is a store, whole and as good as `extract`'s."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_tool import pipeline
from dflash_tool.store.lock import RunLock
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.verify import verify
from dflash_tool.trainer.metrics import read_metrics
from tests.warm import Warm

from .live_kit import config as config_of
from .live_kit import losses, weights, words
from .running import contents, wait_until

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's


def test_training_from_the_tee_repeats_the_run_bit_for_bit(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path
) -> None:
    config = config_of(
        random_target(),
        token_rows(100),
        tmp_path / "live",
        tee=tmp_path / "store",
        store_dtype="bfloat16",
        shard_mib=0.05,
    )
    pipeline.live(config)
    store = HiddenStore.open(tmp_path / "store")
    assert store.manifest.complete
    assert len(contents(tmp_path / "store")) == len(store.samples)
    assert not list(verify(tmp_path / "store", rehash=True))
    pipeline.train(config.train().model_copy(update={"out": tmp_path / "train"}))
    assert losses(tmp_path / "live") == losses(tmp_path / "train")
    ours, theirs = weights(tmp_path / "live"), weights(tmp_path / "train")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [row for row in read_metrics(tmp_path / "live") if row["kind"] == "validation"]
    assert rows == [row for row in read_metrics(tmp_path / "train") if row["kind"] == "validation"]
    pipeline.extract(config.extract())  # nothing is left to do
    assert HiddenStore.open(tmp_path / "store").manifest == store.manifest


def test_a_tee_is_whole_once_the_first_epoch_has_passed(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm
) -> None:
    """Long before the end: `train` uses it while the run goes on, and a kill leaves it as it is."""
    target, data = random_target(), token_rows(60)
    changed = {"max_steps": 40, "epochs": 1000, "val_every": 1000, "save_every": 2, "tee": tmp_path / "store"}
    config = config_of(target, data, tmp_path / "run", **changed)
    run = warm.start(words(target, data, tmp_path / "run", **changed))

    def whole() -> bool:
        manifest = tmp_path / "store" / "manifest.json"
        return manifest.exists() and json.loads(manifest.read_text())["complete"]

    wait_until(run, whole)
    run.send_signal(signal.SIGSTOP)
    pipeline.train(config.train().model_copy(update={"out": tmp_path / "train", "max_steps": 4}))
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert not list(verify(tmp_path / "store", rehash=True))
    done = pipeline.live(config)
    assert 0 < done.trained.steps < 40
    epoch = losses(tmp_path / "train")
    assert len(losses(tmp_path / "run")) == 40 > len(epoch) == 4
    assert HiddenStore.open(tmp_path / "store").manifest.complete


def test_a_tee_of_other_settings_and_other_folders_are_refused(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    target, data = random_target(), token_rows(60)
    config = config_of(target, data, tmp_path / "run", tee=tmp_path / "store", max_length=40)
    pipeline.extract(config.extract())
    command = words(target, data, tmp_path / "run", tee=tmp_path / "store", max_length=50)[3:]
    refused = dflash(*command)
    assert refused.code == 1
    assert "--max-length: the store has 40, this run 50" in " ".join(refused.err.split())
    assert not (tmp_path / "run").exists()
    with RunLock(tmp_path / "store"):
        assert "is being written by" in dflash(*words(target, data, tmp_path / "run", tee=tmp_path / "store")[3:]).err
    assert not (tmp_path / "run").exists()
    own = dflash(*words(target, data, tmp_path / "run", tee=tmp_path / "run")[3:])
    assert "--tee: " in own.err
    assert "is the run's own folder" in " ".join(own.err.split())
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.tex").touch()
    assert "holds something else" in dflash(*words(target, data, tmp_path / "else")[3:]).err
    held = dflash(*words(target, data, tmp_path / "run", tee=tmp_path / "else")[3:])
    assert "--tee: " in held.err
    assert "holds something else" in " ".join(held.err.split())
    assert not (tmp_path / "run").exists()
