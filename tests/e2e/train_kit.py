"""`train` on several stores, in tests: the command line, the run's parts, what it wrote."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_tool.pipeline import train_run
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer.metrics import read_metrics

SMALL = {
    "block_size": 4, "draft_layers": 1, "anchors": 8, "batch_samples": 16, "epochs": 2, "lr": 1e-3,
    "val_fraction": 0.1, "val_every": 4, "save_every": 3, "log_every": 1, "inflight_gib": 0.1,
}  # fmt: skip
DFLASH = [sys.executable, "-m", "dflash_tool"]


def words_of(stores: list[Path], out: Path, *flags: object, **changed: object) -> list[str]:
    words = ["train", *(str(word) for store in stores for word in ("--store", store)), "--out", str(out)]
    options = {**SMALL, **changed}
    words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, *map(str, flags)]


def opened(stores: list[Path], out: Path, **changed: object) -> train_run.TrainRun:
    config = TrainConfig.model_validate({"store": stores, "out": out, **SMALL, **changed})
    return train_run.open_run(config, TrainTelemetry())


def rows_of(run: Path, kind: str = "train") -> list[tuple[int, int, float]]:
    return [(row["step"], row.get("samples", 0), row["loss"]) for row in read_metrics(run) if row["kind"] == kind]


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(run / "checkpoints" / "last" / "model.safetensors") for run in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
