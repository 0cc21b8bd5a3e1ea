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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dflash_tool.errors import TargetError
from dflash_tool.schemas.config import LayerId, StoreDtype
from dflash_tool.target.capture import BatchPart, Captured, PaddedPart, PaddedStates, RowsPart, join_rows
from dflash_tool.target.decoder import find_decoder, layer_output
from dflash_tool.target.folder import TargetFolder
from dflash_tool.target.head import write_head
from dflash_tool.target.loading import DTYPES, cast, load_weights
from dflash_tool.target.probe import needs_mask
from dflash_tool.target.transfer import Way, way

P = TypeVar("P", bound=RowsPart | PaddedPart)

_CPU = torch.device("cpu")
# What allocators say when they raise a plain RuntimeError: the CPU's, CUDA's own libraries.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


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
        self._hidden_size: int = text.hidden_size
        self._to_host = way(device, _CPU)
        self._part: RowsPart | PaddedPart | None = None
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
        shared[id(self._to_host)] = way(self.device, _CPU)
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
        every = np.ones(len(lengths), np.bool_)
        batch = BatchPart(input_ids=input_ids, lengths=lengths, keep=every if keep is None else keep)
        return join_rows(self._run(batch, lambda part: RowsPart(part, self._to_host, self.device, self._store_dtype)))

    def capture_padded(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], layers: Sequence[LayerId], to: Way
    ) -> PaddedStates:
        """Run one batch and send its states `[n, B, S, H]`, of all chosen layers in this order, on their way.

        Returns once the forward is done; the states may arrive later. Raises TargetError for a sample that does not
        fit the device's memory even alone, and where there is no memory for the states at the other end.
        """
        shape = (len(layers), *input_ids.shape, self._hidden_size)
        try:
            states = to.empty(shape, self._store_dtype)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            size = float(np.prod(shape)) * self._store_dtype.itemsize / 2**20
            raise TargetError(
                f"no memory is left for hidden states of {size:,.0f} MiB where they are used: lower --inflight-gib or "
                f"--microbatch-tokens ({str(error).partition(chr(10))[0]})"
            ) from error
        batch = BatchPart(input_ids=input_ids, lengths=lengths, keep=np.ones(len(lengths), np.bool_))
        parts = self._run(batch, lambda part: PaddedPart(part, states, layers, to, self.device))
        finite = np.concatenate([part.finite() for part in parts])
        if not finite.all():
            states = to.select(states, np.flatnonzero(finite).tolist(), int(lengths[finite].max(initial=1)))
        return PaddedStates(states=states, finite=finite, arrival=to.arrival(states))

    def _run(self, batch: BatchPart, make: Callable[[BatchPart], P]) -> list[P]:
        return [done for part in self._one_rope_each(batch) for done in self._halved_until_it_fits(part, make)]

    def _one_rope_each(self, batch: BatchPart) -> list[BatchPart]:
        """Cut the batch between neighbours of which one is longer than LongRoPE's switch and the other is not."""
        if self._switch is None:
            return [batch]
        cuts = np.flatnonzero(np.diff(batch.lengths > self._switch)) + 1
        bounds = [0, *cuts.tolist(), len(batch.lengths)]
        return [batch.part(start, stop) for start, stop in pairwise(bounds)]

    def _halved_until_it_fits(self, batch: BatchPart, make: Callable[[BatchPart], P]) -> list[P]:
        try:
            return [self._forward(batch, make)]
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            first_line = str(error).partition("\n")[0]
        finally:
            self._part = None
        # Outside the handler: its traceback held what the forward had allocated.
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
            *self._halved_until_it_fits(batch.part(0, middle), make),
            *self._halved_until_it_fits(batch.part(middle, count), make),
        ]

    @torch.inference_mode()
    def _forward(self, batch: BatchPart, make: Callable[[BatchPart], P]) -> P:
        part = self._part = make(batch)
        mask = None
        if self.masked:
            real = np.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
            mask = torch.from_numpy(real.astype(np.int64)).to(self.device)
        self.decoder(input_ids=torch.from_numpy(batch.input_ids).to(self.device), attention_mask=mask, use_cache=False)
        part.end()
        return part

    def _keep(self, layer: LayerId, module: nn.Module, _inputs: Any, output: Any) -> None:
        """The hook of a chosen layer: its rows in the store's dtype, on their way."""
        assert self._part is not None
        self._part.add(layer, layer_output(module, output))

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
