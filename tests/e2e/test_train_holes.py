"""`train` on a store whose quarantined samples leave whole steps empty: such a step passes and changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_tool import pipeline
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.target import Captured, TargetModel
from dflash_tool.trainer import DrafterTrainLoop
from dflash_tool.trainer.metrics import read_metrics

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
SETTINGS = {
    "block-size": 4, "draft-layers": 1, "anchors": 8, "batch-samples": 1, "epochs": 1, "lr": 1e-2, "val-fraction": 0,
    "save-every": 1, "log-every": 1, "inflight-gib": 0.1,
}  # fmt: skip
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


def _tensors(run: Path, file: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last" / file)


def test_a_step_without_samples_passes_and_a_resume_after_it_is_exact(
    random_target: Callable[..., Path],
    token_rows: Callable[..., Path],
    tmp_path: Path,
    dflash: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample a step, every second sample quarantined. Each step ends the run once; then it goes on."""
    capture = TargetModel.capture

    def broken(self: TargetModel, *args: Any) -> Captured:
        captured = capture(self, *args)
        captured.finite[::2] = False
        return captured

    store = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(TargetModel, "capture", broken)
        data = (token_rows(12),)
        pipeline.extract(ExtractConfig(target=str(random_target()), data=data, out=store, layers=(1, 3), max_bad=1.0))

    whole, often = tmp_path / "whole", tmp_path / "often"
    done = dflash("train", "--store", store, "--out", whole, *FLAGS, "--json")
    assert done.code == 0, done.err
    rows = [row for row in read_metrics(whole) if row["kind"] == "train"]
    assert 0 < len(rows) < 12  # an empty step has no loss to write down
    assert all(row["samples"] == 1 for row in rows)
    empty = 12 - len(rows)
    assert f"{empty} steps changed nothing" in " ".join(json.loads(done.out)["notes"])

    step = DrafterTrainLoop.step
    for _ in range(11):
        taken = iter([False, True])

        def once(self: DrafterTrainLoop, *args: Any, taken: Any = taken, **named: Any) -> Any:
            if next(taken):
                raise KeyboardInterrupt
            return step(self, *args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(DrafterTrainLoop, "step", once)
            dflash("train", "--store", store, "--out", often, *FLAGS)
    assert dflash("train", "--store", store, "--out", often, *FLAGS).code == 0
    losses = [[row["loss"] for row in read_metrics(run) if row["kind"] == "train"] for run in (whole, often)]
    assert losses[0] == losses[1]
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = _tensors(often, file), _tensors(whole, file)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert float(theirs["step"]) == len(rows)
