"""The target on a device: keep the layers up to the deepest wanted one, capture hidden states.

Forward hooks read what each chosen layer puts out: the residual stream after layer k, never normed (transformers'
`hidden_states[k + 1]`); "final" is the last layer's. Layers beyond the deepest chosen one are dropped after loading and
the head is never run.

Rows are padded on the right and no attention mask is passed, unless this very model is seen to need one (`probe`).
LongRoPE chooses its frequencies by the longest row of a forward, so a batch is run in parts where it lies on both sides
of that switch. A batch that does not fit the device's memory is run in halves.

Shapes: B samples a batch, S padded length, T real tokens of a batch, H hidden size.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dflash_tool.errors import TargetError
from dflash_tool.schemas.config import LayerId, StoreDtype
from dflash_tool.target.decoder import find_decoder, layer_output
from dflash_tool.target.folder import TargetFolder
from dflash_tool.target.head import write_head
from dflash_tool.target.loading import DTYPES, cast, load_weights
from dflash_tool.target.probe import needs_mask

# What allocators say when they raise a plain RuntimeError: the CPU's, CUDA's own libraries.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Hidden states of one batch's kept samples.

    states: layer id -> [T, H] in the store's dtype (bfloat16 as uint16), the real rows one sample after the
    other; finite: bool [kept samples], False where a row of any layer holds NaN or Inf.
    """

    states: dict[LayerId, NDArray[Any]]
    finite: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """input_ids [B, S], padded on the right; lengths [B]; keep bool [B]."""

    input_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keep: NDArray[np.bool_]

    def part(self, start: int, stop: int) -> "_Batch":
        """Samples start..stop, padded to their own longest."""
        lengths = self.lengths[start:stop]
        input_ids = np.ascontiguousarray(self.input_ids[start:stop, : lengths.max()])
        return _Batch(input_ids=input_ids, lengths=lengths, keep=self.keep[start:stop])


class TargetModel:
    """A loaded, truncated target on one device. Not thread-safe: one forward at a time.

    `decoder`: what is run; `masked`: batches get an attention mask, because this model needs one (its attention looks
    ahead); `halvings`: how often a batch was cut in two because it did not fit the device's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Sequence[LayerId],
        device: torch.device,
        dtype: torch.dtype,
        store_dtype: StoreDtype,
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.halvings = 0
        self._store_dtype = DTYPES[store_dtype]
        text: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
        self._switch = _rope_switch(text)
        index = {layer: text.num_hidden_layers - 1 if layer == "final" else layer for layer in self.layers}
        deepest = max(index.values())
        found = find_decoder(model)
        found.truncate(deepest)
        self.decoder, modules = found.module, found.layers
        cast(self.decoder, dtype)
        self._place()
        self.masked = needs_mask(self.decoder, modules[deepest], vocab_size=text.vocab_size, device=device)
        self._side = _side_stream(device)
        self._rows: Tensor | None = None
        self._sums: Tensor | None = None
        self._states: dict[LayerId, Tensor] = {}
        for layer in self.layers:
            modules[index[layer]].register_forward_hook(partial(self._keep, layer))

    @classmethod
    def load(
        cls,
        target: TargetFolder,
        *,
        layers: Sequence[LayerId],
        device: torch.device,
        dtype: torch.dtype,
        store_dtype: StoreDtype,
        head: Path | None = None,
        trust_remote_code: bool = False,
    ) -> "TargetModel":
        """Load the weights in their own dtype, write `head` if it is asked for, then truncate and cast.

        layers: decoder layers' ids, and "final" for the last layer's output before the final norm.
        Raises TargetError for weights that can't be loaded or are not all there, and for architectures that don't fit.
        """
        model = load_weights(target, trust_remote_code)
        if head is not None:
            write_head(model, target, head)
        return cls(model, layers=layers, device=device, dtype=dtype, store_dtype=store_dtype)

    def replica(self) -> "TargetModel":
        """Another target on the same device and weights, for another thread; all other state is its own."""
        shared: dict[int, Any] = {id(parameter): parameter for parameter in self.decoder.parameters()}
        if self._side is not None:
            shared[id(self._side)] = _side_stream(self.device)
        other = copy.deepcopy(self, shared)  # its hooks are bound to `other`
        other.halvings = 0
        return other

    def capture(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], keep: NDArray[np.bool_] | None = None
    ) -> Captured:
        """Run one batch and return the chosen layers' real rows.

        input_ids [B, S] int64, padded on the right with any valid id; lengths [B]; keep bool [B], samples whose
        rows are wanted (all by default): the others only keep the batch's shape, and so the numbers, the same.
        Raises TargetError for a sample that does not fit the device's memory even alone.
        """
        batch = _Batch(
            input_ids=input_ids, lengths=lengths, keep=np.ones(len(lengths), np.bool_) if keep is None else keep
        )
        parts = [captured for part in self._one_rope_each(batch) for captured in self._halved_until_it_fits(part)]
        if len(parts) == 1:
            return parts[0]
        return Captured(
            states={layer: np.concatenate([part.states[layer] for part in parts]) for layer in self.layers},
            finite=np.concatenate([part.finite for part in parts]),
        )

    def _one_rope_each(self, batch: _Batch) -> list[_Batch]:
        """Cut the batch between neighbours of which one is longer than LongRoPE's switch and the other is not."""
        if self._switch is None:
            return [batch]
        cuts = np.flatnonzero(np.diff(batch.lengths > self._switch)) + 1
        bounds = [0, *cuts.tolist(), len(batch.lengths)]
        return [batch.part(start, stop) for start, stop in pairwise(bounds)]

    def _halved_until_it_fits(self, batch: _Batch) -> list[Captured]:
        try:
            return [self._forward(batch)]
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            first_line = str(error).partition("\n")[0]
        # Outside the handler: its traceback held what the forward had allocated.
        self._states.clear()
        self._rows = self._sums = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        count = len(batch.lengths)
        if count == 1:
            raise TargetError(
                f"a sample of {batch.lengths[0]:,} tokens does not fit the memory of {self.device}, even alone: "
                f"choose a smaller --max-length or --dtype, or a device with more free memory ({first_line})"
            )
        self.halvings += 1
        middle = count // 2
        return [
            *self._halved_until_it_fits(batch.part(0, middle)),
            *self._halved_until_it_fits(batch.part(middle, count)),
        ]

    @torch.inference_mode()
    def _forward(self, batch: _Batch) -> Captured:
        count, width = batch.input_ids.shape
        kept = np.flatnonzero(batch.keep)
        lengths = batch.lengths[kept]
        rows = np.concatenate([np.arange(b * width, b * width + batch.lengths[b]) for b in kept] or [np.empty(0)])
        whole = len(rows) == count * width
        self._rows = None if whole else torch.from_numpy(rows.astype(np.int64)).to(self.device)
        self._sums = torch.zeros(len(rows), device=self.device)
        mask = None
        if self.masked:
            real = np.arange(width) < batch.lengths[:, None]
            mask = torch.from_numpy(real.astype(np.int64)).to(self.device)
        self.decoder(input_ids=torch.from_numpy(batch.input_ids).to(self.device), attention_mask=mask, use_cache=False)
        if self._side is not None:
            self._side.synchronize()
        states = {layer: self._states.pop(layer) for layer in self.layers}
        suspects = torch.from_numpy(np.flatnonzero(~torch.isfinite(self._sums).cpu().numpy()))
        finite = np.ones(len(kept), np.bool_)
        if len(suspects):  # a NaN or Inf, or an overflow of the sum alone
            bad = torch.stack([~torch.isfinite(part[suspects]).all(dim=1) for part in states.values()]).any(dim=0)
            finite[np.repeat(np.arange(len(kept)), lengths)[suspects[bad].numpy()]] = False
        return Captured(states={layer: _to_numpy(part) for layer, part in states.items()}, finite=finite)

    def _keep(self, layer: LayerId, module: nn.Module, _inputs: Any, output: Any) -> None:
        """The hook of a chosen layer: its real rows in the store's dtype, on their way to the CPU."""
        states = layer_output(module, output)
        flat = states.reshape(-1, states.shape[-1])
        # Fresh memory either way: whatever follows may write into the layer's output.
        if self._rows is None:
            real = flat.to(self._store_dtype, copy=True)
        else:
            real = flat.to(self._store_dtype).index_select(0, self._rows)
        assert self._sums is not None
        self._sums += real.sum(dim=1, dtype=torch.float32)
        self._states[layer] = self._to_host(real)

    def _to_host(self, real: Tensor) -> Tensor:
        """On CUDA: copied on a side stream while the next layers run; complete once that stream is synchronised.

        torch keeps freed pinned blocks and hands them out again, once the tensor and every numpy view of it are
        gone and the copy is done: buffers are recycled, and never under a writer that still reads them.
        """
        if self._side is None:
            return real
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            host = torch.empty(real.shape, dtype=real.dtype, pin_memory=True)
            host.copy_(real, non_blocking=True)
        real.record_stream(self._side)
        return host

    def _place(self) -> None:
        try:
            self.decoder.to(self.device).eval().requires_grad_(False)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            size = sum(parameter.nbytes for parameter in self.decoder.parameters())
            raise TargetError(
                f"this target takes {size / 2**30:.1f} GiB up to its deepest chosen layer, more than is free on "
                f"{self.device}: choose a smaller --dtype or another --target-device"
            ) from error


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _rope_switch(text: Any) -> int | None:
    """The longest row for which LongRoPE uses its short frequencies; None for every other kind of positions."""
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, Mapping))):
        if rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in _OUT_OF_MEMORY
    )


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    """[T, H] on the CPU -> numpy; bfloat16 as uint16, bit for bit."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
