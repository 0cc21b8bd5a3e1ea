"""How large hidden states are, by layer, in a few samples: outlier channels and a broken layer show up here."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.schemas.config import LayerId, StoreDtype
from dflash_tool.store.reader import HiddenStore

SAMPLES = 8
CHANNELS = 5


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """One layer over some samples' rows. norm: mean Euclidean norm of a row; largest: of all |x|.

    channels: (number, mean |x|) of those with the largest mean; median: mean |x| of the channel in the middle.
    """

    layer: LayerId
    norm: float
    largest: float
    channels: tuple[tuple[int, float], ...]
    median: float


def layer_norms(store: HiddenStore) -> tuple[int, list[LayerNorms]]:
    """How many samples were read (at most `SAMPLES`, spread over the lengths), and what they are like in each layer.

    Raises StoreError, as `HiddenStore.read`, for rows that can't be read.
    """
    rows = np.flatnonzero(store.committed)
    if not len(rows):
        return 0, []
    rows = rows[np.argsort(store.samples.lengths[rows], kind="stable")]
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, SAMPLES).round().astype(np.int64))]
    return len(chosen), [_norms(store, layer, chosen) for layer in store.layers]


def _norms(store: HiddenStore, layer: LayerId, rows: NDArray[np.int64]) -> LayerNorms:
    tokens, norms, largest = 0, 0.0, 0.0
    sums = np.zeros(store.width)
    for row in rows.tolist():
        states = np.abs(as_float32(store.read(row, (layer,))[layer], store.manifest.store_dtype))
        tokens += len(states)
        norms += float(np.linalg.norm(states, axis=1).sum(dtype=np.float64))
        largest = max(largest, float(states.max()))
        sums += states.sum(0, dtype=np.float64)
    means = sums / tokens
    top = np.argsort(-means, kind="stable")[:CHANNELS]
    return LayerNorms(
        layer=layer,
        norm=norms / tokens,
        largest=largest,
        channels=tuple((int(channel), float(means[channel])) for channel in top),
        median=float(np.median(means)),
    )


def as_float32(states: NDArray[Any], dtype: StoreDtype) -> NDArray[np.float32]:
    """Stored rows as float32; a bfloat16 is the upper half of one."""
    if dtype == "bfloat16":
        return (states.astype(np.uint32) << 16).view(np.float32)
    return states.astype(np.float32)
