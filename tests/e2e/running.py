"""Extractions in processes of their own, for tests that kill them."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dflash_tool import pipeline
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.store.reader import HiddenStore
from tests.warm import Run

ENV = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Store(NamedTuple):
    """A store, and the words of the command that made it, without its --out."""

    words: list[object]
    out: Path


SMALL = {"batch_tokens": 512, "inflight_gib": 0.01, "shard_mib": 0.4, "commit_every": 0.3}


def extract_config(target: Path, data: Path, out: Path) -> ExtractConfig:
    """An extraction in many small batches and shards."""
    return ExtractConfig.model_validate({"target": str(target), "data": [data], "out": out, **SMALL})


def extract_words(target: Path, data: Path, out: Path, **changed: object) -> list[str]:
    """The command line of the same extraction."""
    options = {"target": target, "data": data, "out": out, **SMALL, **changed}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "dflash_tool", "extract", *words]


def small_run(target: Path, data: Path, folder: Path, **changed: object) -> Path:
    """FOLDER/run, a drafter of one layer trained for some steps on FOLDER/store, in this process."""
    store = folder / "store"
    pipeline.extract(ExtractConfig(target=str(target), data=(data,), out=store, layers=(1, 2, 3), buckets=3))
    options = {
        "store": store, "out": folder / "run", "block_size": 4, "draft_layers": 1, "anchors": 16, "batch_samples": 16,
        "epochs": 1, "lr": 3e-3, "val_fraction": 0.1, "inflight_gib": 0.1,
    } | changed  # fmt: skip
    pipeline.train(TrainConfig.model_validate(options))
    return folder / "run"


def bytes_under(folder: Path) -> int:
    """Bytes of all files below a folder that changes meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are renamed
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total


def wait_until(run: "subprocess.Popen[Any] | Run", reached: Callable[[], bool]) -> None:
    """Look again and again until the run has come far enough, or has ended."""
    while run.poll() is None and not reached():
        with suppress(subprocess.TimeoutExpired):
            run.wait(0.01)


def contents(out: Path) -> dict[bytes, bytes]:
    """Sample id -> the bytes of all its layers, hashes checked; each sample exactly once."""
    store = HiddenStore.open(out)
    assert store.committed.all()
    assert len(store.index) == len(store.samples)
    return {
        store.samples.sample_id(row): b"".join(v.tobytes() for v in store.read(row, verify=True).values())
        for row in range(len(store.samples))
    }


def torchrun_words(world: int, words: list[str]) -> list[str]:
    """The same command on `world` ranks of this machine."""
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), *port, *words[1:]]


def workers(agent: int) -> list[int]:
    """Pids of the ranks, by local rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = [item for item in environment if item.startswith(b"LOCAL_RANK=")]
        if int(fields[1]) == agent and rank:
            found[int(rank[0].removeprefix(b"LOCAL_RANK="))] = int(process.name)
    return [found[rank] for rank in sorted(found)]
