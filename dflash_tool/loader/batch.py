"""A microbatch as tensors. B samples, S tokens of the longest, n aux layers, H hidden size.

Hidden states are kept layer by layer, as they are on disk: rows are read and hashed right where they are used.
`fc` wants the layers of a position side by side. That one pass comes with the cast to the compute dtype (CPU) or
behind the copy to the device (CUDA), and costs the same as that alone: 12.9 against 12.5 ms for 16 x 512 tokens of 5
layers x 576, one core. Reading side by side reaches 0.5-0.6 of the speed at that width (staged or by scattered reads).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BatchInputs(NamedTuple):
    """What a drafter takes: context `[B, S, n*H]`, input_ids and loss_mask `[B, S]` (int64, uint8), lengths `[B]`."""

    context: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor


class Arrival(Protocol):
    """States that may still be on their way when the batch is there already: who waits for whom, and when."""

    def wait(self, device: torch.device) -> None:
        """Let what this thread gives `device` to do from now on come after the arrival. A CPU waits itself."""

    def used(self, device: torch.device) -> None:
        """What this thread gave `device` to do so far reads the states."""

    def done(self) -> None:
        """Wait until every use is over."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedBatch:
    """One microbatch: samples of one bucket by ascending length, padded with zeros on the right.

    `states`, `input_ids` and `loss_mask` lie in recycled memory: they are valid until the next batch is asked for or
    `release` is called, whichever is first. Copy what must stay.

    Attributes:
        index_in_step: its place in the step, over all ranks.
        bucket: of all its samples.
        rows: int64 `[B]`, rows of samples.arrow (of several stores: of `JoinedSamples`).
        sample_ids: uint64 `[B, 2]`.
        copies: int64 `[B]`, which copy of its sample each row is.
        lengths: int64 `[B]`.
        input_ids: int64 `[B, S]`.
        loss_mask: uint8 `[B, S]`, 1 where the token is supervised.
        states: store dtype `[n, B, S, H]`, layers ascending; on the host, or on the device of the drafter it is for.
        arrival: of `states`; None where they are there.
    """

    index_in_step: int
    bucket: int
    rows: NDArray[np.int64]
    sample_ids: NDArray[np.uint64]
    copies: NDArray[np.int64]
    lengths: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    states: Tensor
    arrival: Arrival | None = field(default=None, repr=False)
    on_release: Callable[[], None] = field(default=lambda: None, repr=False)
    _copies: list[torch.cuda.Event] = field(default_factory=list, init=False, repr=False)
    _released: list[bool] = field(default_factory=list, init=False, repr=False)

    def context(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Put the layers of each position side by side: a new tensor `[B, S, n*H]`, or `out` filled.

        Feature l*H + h of position (b, s) is `states[l, b, s, h]`. `device` and `dtype` default to those of `states`,
        or of `out`, which must be contiguous. The result doesn't share memory with the batch.
        """
        n, batch, seq, hidden = self.states.shape
        if out is None:
            target = self.states.device if device is None else torch.device(device)
            out = torch.empty(batch, seq, n * hidden, dtype=dtype or self.states.dtype, device=target)
        if self.arrival is not None:
            self.arrival.wait(out.device)
        states = self._copy(self.states, out.device)
        out.view(batch, seq, n, hidden).copy_(states.permute(1, 2, 0, 3))
        if self.arrival is not None:
            self.arrival.used(out.device)
        return out

    def to(self, device: torch.device | str, dtype: torch.dtype, *, out: Tensor | None = None) -> BatchInputs:
        """Everything on `device`, the context as `dtype`; on the CPU, token ids and mask stay in the batch's memory.

        Copies to CUDA are asynchronous on the current stream; `release` waits for them, not for what comes after.
        """
        place = torch.device(device)
        rest = [self._copy(tensor, place) for tensor in (self.input_ids, self.loss_mask, self.lengths)]
        return BatchInputs(self.context(device=place, dtype=dtype, out=out), *rest)

    def release(self) -> None:
        """Give the memory back, once copies from it are done; `states` is empty then. A second call does nothing."""
        if not self._released:
            self._released.append(True)
            for event in self._copies:
                event.synchronize()
            if self.arrival is not None:
                self.arrival.done()
            # Whoever told about the release counts the memory as free, so nothing here may hold it any longer.
            object.__setattr__(self, "states", self.states.new_empty(0))
            object.__setattr__(self, "arrival", None)
            self.on_release()

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device or device.type != "cuda":
            return tensor.to(device)
        copied = tensor.to(device, non_blocking=True)
        self._copies.append(torch.cuda.current_stream(device).record_event())
        return copied
