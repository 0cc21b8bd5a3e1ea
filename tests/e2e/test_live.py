"""`live` from end to end on a tiny random target: the same steps as `extract` and `train`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_tool import pipeline
from dflash_tool.schemas.live import LiveConfig
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.verify import verify
from dflash_tool.trainer import Replica
from dflash_tool.trainer.metrics import read_metrics

from .running import contents

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
SMALL = {
    "layers": "1,3", "buckets": 3, "store_dtype": "float32", "target_device": "cpu", "drafter_device": "cpu",
    "block_size": 4, "draft_layers": 1, "anchors": 8, "batch_samples": 16, "epochs": 2, "lr": 1e-3,
    "val_fraction": 0.1, "val_every": 4, "save_every": 3, "log_every": 1, "inflight_gib": 0.1,
    "microbatch_tokens": 200,
}  # fmt: skip


def _config(target: Path, data: Path, out: Path, **changed: object) -> LiveConfig:
    return LiveConfig.model_validate({"target": str(target), "data": [data], "out": out, **SMALL, **changed})


@contextmanager
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What every microbatch was, in order: samples, shape, anchors, labels."""
    seen: list[tuple[Any, ...]] = []
    blocks_of = Replica._blocks

    def watch(self: Replica, batch: Any, lengths: Any, epoch: int) -> Any:
        blocks = blocks_of(self, batch, lengths, epoch)
        seen.append(
            (epoch, batch.index_in_step, batch.sample_ids.tolist(), tuple(batch.states.shape),
             blocks.sample.tolist(), blocks.position.tolist(), blocks.labels.tolist())
        )  # fmt: skip
        return blocks

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "_blocks", watch)
        yield seen


def _losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run) if row["kind"] == "train"]


def test_the_same_steps_as_extract_and_train(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = _config(random_target(), token_rows(100), tmp_path / "live")
    with _watched(monkeypatch) as live:
        pipeline.live(config)
    offline = config.model_copy(update={"tee": tmp_path / "store"})
    pipeline.extract(offline.extract())
    with _watched(monkeypatch) as trained:
        pipeline.train(offline.train().model_copy(update={"out": tmp_path / "train"}))
    assert len(live) > 20
    assert live == trained
    np.testing.assert_allclose(_losses(tmp_path / "live"), _losses(tmp_path / "train"), rtol=1e-5)


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last" / "model.safetensors")


def test_training_from_the_tee_repeats_the_run_bit_for_bit(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path
) -> None:
    config = _config(
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
    assert _losses(tmp_path / "live") == _losses(tmp_path / "train")
    ours, theirs = _weights(tmp_path / "live"), _weights(tmp_path / "train")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [row for row in read_metrics(tmp_path / "live") if row["kind"] == "validation"]
    assert rows == [row for row in read_metrics(tmp_path / "train") if row["kind"] == "validation"]
    pipeline.extract(config.extract())  # nothing is left to do
    assert HiddenStore.open(tmp_path / "store").manifest == store.manifest
