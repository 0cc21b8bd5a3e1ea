"""What the tests of the loader share: small stores, loaders of them, a store that tells when it is read."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.buckets import StepPlan
from dflash_tool.loader import MixingLoader, anchor_counts, epoch_plans
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.samples import Samples

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LONGEST, G, CONTEXT = 150, 16, 300
WINDOW = 40_000  # CONTEXT tokens of 2 layers x 8 x bf16, ids and mask take 12,300 bytes


def lengths_of(count: int, seed: int = 0) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(3, 0.8, count), 1, LONGEST).astype(int).tolist()  # type: ignore[no-any-return]


def plans_of(samples: Samples, rows: NDArray[np.int64], **changes: Any) -> Callable[[int], StepPlan]:
    arguments = {"seed": 5, "batch_samples": G, "context_budget": CONTEXT, "block_budget": 500} | changes
    return epoch_plans(samples, rows, anchors_of=anchor_counts(samples), anchors=16, block_size=8, **arguments)


def loader_of(store: HiddenStore, rows: NDArray[np.int64] | None = None, **changes: Any) -> MixingLoader:
    rows = np.arange(len(store.samples)) if rows is None else rows
    planning = {name: changes.pop(name) for name in ("seed", "batch_samples", "context_budget") if name in changes}
    options: dict[str, Any] = {
        "layers": (0, 4),
        "epochs": 1,
        "window_bytes": WINDOW,
        "threads": 2,
        "verify": "first",
    }
    return MixingLoader(store, rows, plans_of(store.samples, rows, **planning), **{**options, **changes})


def read_steps(loader: MixingLoader) -> list[tuple[int, int, list[int]]]:
    """(epoch, step, sample rows in order of reading) to the end."""
    return [(step.epoch, step.index, [int(row) for batch in step for row in batch.rows]) for step in loader]


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


class Watched(HiddenStore):
    """A store that calls `before_read(row, out)` in the reading thread."""

    before_read: Callable[[int, dict[Any, NDArray[Any]]], None]

    def read_into(self, sample: Any, out: Any, *, verify: bool) -> None:
        row = self.row_of(sample.committed.sample_ids[sample.place].as_py())
        self.before_read(row, {layer: np.frombuffer(view, np.uint8) for layer, view in out.items()})
        super().read_into(sample, out, verify=verify)
