"""What becomes of a layer's output: real rows on the host (`extract`), or a padded batch where it is used (`live`).

A part is a batch, or the piece of one that is run in a forward of its own. Non-finite states are looked for in the sum
of each row over all layers, which is made on the device; only where a sum is not finite (it may have overflowed by
itself) the states are looked at.

Shapes: B samples a batch, S padded length, T real tokens, n layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tool.schemas.config import LayerId
from dflash_tool.target.transfer import Arrival, Way


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Hidden states of one batch's kept samples.

    states: layer id -> [T, H] in the store's dtype (bfloat16 as uint16), the real rows one sample after the
    other; finite: bool [kept samples], False where a row of any layer holds NaN or Inf.
    """

    states: dict[LayerId, NDArray[Any]]
    finite: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class PaddedStates:
    """Hidden states of one batch, layer by layer, where they are used.

    finite: bool [B], False for samples with NaN or Inf; states: [n, those that are finite, S, H] in the store's dtype,
    zeros behind the ends; arrival: when they are there.
    """

    states: Tensor
    finite: NDArray[np.bool_]
    arrival: Arrival


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """input_ids [B, S], padded on the right; lengths [B]; keep bool [B]; first: its place in the whole batch."""

    input_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keep: NDArray[np.bool_]
    first: int = 0

    def part(self, start: int, stop: int) -> "BatchPart":
        """Samples start..stop, padded to their own longest."""
        lengths = self.lengths[start:stop]
        input_ids = np.ascontiguousarray(self.input_ids[start:stop, : lengths.max()])
        return BatchPart(input_ids=input_ids, lengths=lengths, keep=self.keep[start:stop], first=self.first + start)


class RowsPart:
    """The real rows of a part's kept samples, on the host."""

    def __init__(self, batch: BatchPart, way: Way, device: torch.device, dtype: torch.dtype) -> None:
        count, width = batch.input_ids.shape
        kept = np.flatnonzero(batch.keep)
        rows = np.concatenate([np.arange(b * width, b * width + batch.lengths[b]) for b in kept] or [np.empty(0)])
        whole = len(rows) == count * width
        self._rows = None if whole else torch.from_numpy(rows.astype(np.int64)).to(device)
        self._sums = torch.zeros(len(rows), device=device)
        self._lengths, self._way, self._dtype = batch.lengths[kept], way, dtype
        self._states: dict[LayerId, Tensor] = {}
        self._finite: NDArray[np.bool_]

    def add(self, layer: LayerId, states: Tensor) -> None:
        """Take a layer's output [B, S, H]."""
        flat = states.reshape(-1, states.shape[-1])
        # Fresh memory either way: whatever follows may write into the layer's output.
        if self._rows is None:
            real = flat.to(self._dtype, copy=True)
        else:
            real = flat.to(self._dtype).index_select(0, self._rows)
        self._sums += real.sum(dim=1, dtype=torch.float32)
        if self._way.in_place:
            self._states[layer] = real
        else:  # while the next layers run
            self._states[layer] = self._way.empty(real.shape, real.dtype)
            self._way.copy(self._states[layer][None], real[None])

    def end(self) -> None:
        """Wait for the rows; the forward is over."""
        self._way.wait()
        suspects = torch.from_numpy(np.flatnonzero(~torch.isfinite(self._sums).cpu().numpy()))
        self._finite = np.ones(len(self._lengths), np.bool_)
        if len(suspects):
            bad = torch.stack([~torch.isfinite(part[suspects]).all(dim=1) for part in self._states.values()])
            of_sample = np.repeat(np.arange(len(self._lengths)), self._lengths)
            self._finite[of_sample[suspects[bad.any(dim=0)].numpy()]] = False

    def captured(self) -> Captured:
        """What was captured."""
        return Captured(states={layer: to_numpy(part) for layer, part in self._states.items()}, finite=self._finite)


def join_rows(parts: Sequence[RowsPart]) -> Captured:
    """The parts of a batch as one."""
    each = [part.captured() for part in parts]
    if len(each) == 1:
        return each[0]
    return Captured(
        states={layer: np.concatenate([part.states[layer] for part in each]) for layer in each[0].states},
        finite=np.concatenate([part.finite for part in each]),
    )


class PaddedPart:
    """A part of a batch that goes into `into` [n, B, S, H], which lies at the end of `way`; layers: their order there.

    The part may be narrower than the batch.
    """

    def __init__(
        self, batch: BatchPart, into: Tensor, layers: Sequence[LayerId], way: Way, device: torch.device
    ) -> None:
        count, width = batch.input_ids.shape
        self._into = into[:, batch.first : batch.first + count]
        self._number = {layer: number for number, layer in enumerate(layers)}
        self._way = way
        self._in_place = way.in_place and width == into.shape[2]
        padding = np.flatnonzero(np.arange(width) >= batch.lengths[:, None])
        self._padding = torch.from_numpy(padding).to(device) if len(padding) else None
        self._sums = torch.zeros(count, width, device=device)
        self._finite: NDArray[np.bool_]

    def add(self, layer: LayerId, states: Tensor) -> None:
        """Take a layer's output [B, S, H]."""
        into = self._into[self._number[layer]]
        states = states.reshape(*self._sums.shape, -1)
        # Fresh memory either way: whatever follows may write into the layer's output.
        real = into.copy_(states) if self._in_place else states.contiguous().to(into.dtype, copy=True)
        if self._padding is not None:
            real.view(-1, real.shape[-1]).index_fill_(0, self._padding, 0)
        self._sums += real.sum(dim=2, dtype=torch.float32)
        if not self._in_place:
            self._way.copy(into, real)

    def end(self) -> None:
        """See which samples are finite. Waits for the forward, and for the states only if there is a doubt."""
        self._finite = torch.isfinite(self._sums).all(dim=1).cpu().numpy()
        if not self._finite.all():
            self._way.wait()
            for place in np.flatnonzero(~self._finite):
                self._finite[place] = bool(torch.isfinite(self._into[:, place]).all())

    def finite(self) -> NDArray[np.bool_]:
        """[B], False for samples with NaN or Inf."""
        return self._finite


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """A tensor on the CPU -> numpy; bfloat16 as uint16, bit for bit."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
