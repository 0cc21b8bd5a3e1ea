"""Small live runs: their settings, as a config and as a command line, and what they leave."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_tool.schemas.live import LiveConfig
from dflash_tool.trainer.metrics import read_metrics

SMALL = {
    "layers": "1,3", "buckets": 3, "store_dtype": "float32", "target_device": "cpu", "drafter_device": "cpu",
    "block_size": 4, "draft_layers": 1, "anchors": 8, "batch_samples": 16, "epochs": 2, "lr": 1e-3,
    "val_fraction": 0.1, "val_every": 4, "save_every": 3, "log_every": 1, "inflight_gib": 0.1,
    "microbatch_tokens": 200, "batch_tokens": 200,
}  # fmt: skip


def config(target: Path, data: Path, out: Path, **changed: object) -> LiveConfig:
    return LiveConfig.model_validate({"target": str(target), "data": [data], "out": out, **SMALL, **changed})


def words(target: Path, data: Path, out: Path, **changed: object) -> list[str]:
    """The command line of the same run."""
    words = [sys.executable, "-m", "dflash_tool", "live"]
    for name, value in {"target": target, "data": data, "out": out, **SMALL, **changed}.items():
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", str(each)]
    return words


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run) if row["kind"] == "train"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last" / "model.safetensors")
