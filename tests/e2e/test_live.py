"""`live` from end to end on a tiny random target: the same steps as `extract` and `train`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_tool import pipeline
from dflash_tool.schemas.live import LiveConfig
from dflash_tool.trainer import Replica
from dflash_tool.trainer.metrics import read_metrics

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
