# ruff: noqa: N803, N806 - tensor names carry their shape
"""Weighted cross-entropy of the slots that have a label, through a frozen head that never keeps all logits.

    numerator = sum over counted slots of weight * -log softmax(head(hidden))[label]

`decay_loss`: weights fall with the slot; the divisor is their sum. `dpace_loss`: weights follow what the drafter can
do already (D-PACE); the divisor is the number of blocks. The caller divides by the divisor of the whole optimizer step
(all microbatches, all ranks), so that accumulation does not change the gradient.

The head is frozen, so the gradient of a row's hidden state is known as soon as its logits are: it is computed in the
forward, chunk by chunk, and only `[rows, H]` is kept for the backward, where each row's is scaled by its weight.
Memory: one chunk's logits in fp32 (fp64 for fp64 input), at most `chunk_bytes` (on the CPU `_LEAST_ROWS` rows, if that
is more), and in the head's dtype where that is another.

Legend: N blocks, B slots, M rows (counted slots), H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from dflash_tool.drafter.anchors import Blocks
from dflash_tool.drafter.head import TargetHead

_CHUNK_BYTES = {"cpu": 4 << 20}  # on the CPU what stays in the cache is fastest
_DEVICE_CHUNK_BYTES = 256 << 20
_LEAST_ROWS = 128  # with fewer, reading the head's own weights twice a chunk is what takes the time
_PACE_FLOOR = 0.5


class Loss(NamedTuple):
    """numerator [] (with gradient), denominator, correct [N, B-1] bool: counted, and predicted (argmax) right."""

    numerator: Tensor
    denominator: float
    correct: Tensor


DraftLoss = Callable[[Tensor, Blocks, TargetHead], Loss]


def decay_loss(
    hidden_NBH: Tensor,
    blocks: Blocks,
    weights: NDArray[np.float64],
    head: TargetHead,
    *,
    chunk_bytes: int | None = None,
) -> Loss:
    """Cross-entropy of slots 1..B-1, weighted by slot. Waits for nothing from the device.

    Args:
        hidden_NBH: the drafter's output; slot 0 is left out.
        blocks: labels, and which slots count.
        weights: `[B-1]`, of slots 1..B-1 (`decay_weights`).
        head: the target's.
        chunk_bytes: at most so many bytes of logits at a time.
    """
    losses_M, correct = _slot_losses(hidden_NBH, blocks, head, chunk_bytes)
    _, slot = blocks.counted.nonzero()
    weights_M = torch.from_numpy(weights[slot]).to(losses_M)
    return Loss((losses_M * weights_M).sum(), blocks.total_weight(weights), correct)


def dpace_loss(hidden_NBH: Tensor, blocks: Blocks, head: TargetHead, *, chunk_bytes: int | None = None) -> Loss:
    """Cross-entropy of slots 1..B-1, each weighted by the acceptance that hangs on it (D-PACE). Arguments as above.

    With q the probability of a slot's label (no gradient) and q~ = 0.5 + 0.5 q, the weight of slot j is the sum over
    the counted slots m >= j of q~_1 * ... * q~_m. The denominator counts blocks with a counted slot: dividing by the
    weights themselves would cancel them.
    """
    losses_M, correct = _slot_losses(hidden_NBH, blocks, head, chunk_bytes)
    block, slot = (torch.from_numpy(places).to(losses_M.device) for places in blocks.counted.nonzero())
    prefix = losses_M.new_zeros(blocks.counted.shape)
    prefix[block, slot] = _PACE_FLOOR + (1 - _PACE_FLOOR) * torch.exp(-losses_M.detach())
    prefix = prefix.cumprod(1)  # zero from the first slot on that doesn't count: counted slots are a prefix
    weights_M = prefix.flip(1).cumsum(1).flip(1)[block, slot]
    return Loss((losses_M * weights_M).sum(), float(blocks.counted.any(1).sum()), correct)


def _slot_losses(
    hidden_NBH: Tensor, blocks: Blocks, head: TargetHead, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each counted slot `[M]`, by block and slot, and which slots are right, bool `[N, B-1]`."""
    block, slot = blocks.counted.nonzero()
    device = hidden_NBH.device
    at = torch.from_numpy(block * blocks.size + slot + 1).to(device)
    rows_MH = hidden_NBH.flatten(0, 1).index_select(0, at)
    wide = torch.promote_types(rows_MH.dtype, torch.float32)
    row_bytes = head.vocab_size * wide.itemsize
    if chunk_bytes is None:
        chunk_bytes = max(_CHUNK_BYTES.get(device.type, _DEVICE_CHUNK_BYTES), _LEAST_ROWS * row_bytes)
    losses_M, right_M = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        rows_MH,
        torch.from_numpy(blocks.labels[block, slot]).to(device),
        head,
        max(1, chunk_bytes // row_bytes),
        rows_MH.requires_grad and torch.is_grad_enabled(),
    )
    correct = torch.zeros(hidden_NBH.shape[:2], dtype=torch.bool, device=device)
    correct.view(-1)[at] = right_M
    return losses_M, correct[:, 1:]


class _FrozenHeadLoss(torch.autograd.Function):
    """-log p(label) of each row, and whether it is right; a gradient for the rows alone."""

    @staticmethod
    def forward(
        ctx: Any, rows_MH: Tensor, labels_M: Tensor, head: TargetHead, chunk: int, want_grad: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(rows_MH.dtype, torch.float32)
        losses_M = torch.empty_like(labels_M, dtype=wide)
        right_M = torch.empty_like(labels_M, dtype=torch.bool)
        grad_MH = torch.empty_like(rows_MH) if want_grad else None
        with torch.autocast(rows_MH.device.type, enabled=False):
            for start in range(0, len(rows_MH), chunk):
                part = slice(start, start + chunk)
                label = labels_M[part, None]
                x_mV = linear(rows_MH[part].to(head.weight.dtype), head.weight, head.bias)
                best, guess = x_mV.max(-1, keepdim=True)
                right_M[part] = (guess == label).squeeze(1)
                x_mV = x_mV.to(wide)
                of_label = x_mV.gather(1, label)
                x_mV = x_mV.sub_(best.to(wide)).exp_()
                mass = x_mV.sum(-1, keepdim=True)
                losses_M[part] = (mass.log() + best - of_label).squeeze(1)
                if grad_MH is not None:  # softmax, less 1 at the label, through the head
                    x_mV /= mass
                    x_mV.scatter_add_(1, label, -torch.ones_like(mass))
                    grad_MH[part] = x_mV.to(head.weight.dtype) @ head.weight
        ctx.mark_non_differentiable(right_M)
        ctx.save_for_backward(grad_MH)
        return losses_M, right_M

    @staticmethod
    def backward(ctx: Any, weights_M: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_MH,) = ctx.saved_tensors
        return grad_MH * weights_M.to(grad_MH.dtype).unsqueeze(1), None, None, None, None
