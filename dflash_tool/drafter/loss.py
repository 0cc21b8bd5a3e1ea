# ruff: noqa: N803, N806 - tensor names carry their shape
"""Decay-weighted cross-entropy of the slots that have a label, through a frozen head that never keeps all logits.

    numerator = sum over counted slots of weight * -log softmax(head(hidden))[label];   denominator = sum of the weights

The caller divides by the weight of the whole optimizer step (all microbatches, all ranks), so that accumulation does
not change the gradient. The head is frozen, so the gradient of a row's hidden state is known as soon as its logits
are: it is computed in the forward, chunk by chunk, and only `[rows, H]` is kept for the backward. Memory: one
chunk's logits in fp32 (fp64 for fp64 input), at most `chunk_bytes`, and in the head's dtype where that is another.

Legend: N blocks, B slots, M rows (counted slots), H hidden, V vocabulary.
"""

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


class Loss(NamedTuple):
    """numerator [] (with gradient), denominator, correct [N, B-1] bool: counted, and predicted (argmax) right."""

    numerator: Tensor
    denominator: float
    correct: Tensor


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
    block, slot = blocks.counted.nonzero()
    device = hidden_NBH.device
    at = torch.from_numpy(block * blocks.size + slot + 1).to(device)
    rows_MH = hidden_NBH.flatten(0, 1).index_select(0, at)
    wide = torch.promote_types(rows_MH.dtype, torch.float32)
    chunk_bytes = chunk_bytes or _CHUNK_BYTES.get(device.type, _DEVICE_CHUNK_BYTES)
    numerator, right = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        rows_MH,
        torch.from_numpy(blocks.labels[block, slot]).to(device),
        torch.from_numpy(weights[slot]).to(device, wide),
        head,
        max(1, chunk_bytes // (head.vocab_size * wide.itemsize)),
        rows_MH.requires_grad and torch.is_grad_enabled(),
    )
    correct = torch.zeros(hidden_NBH.shape[:2], dtype=torch.bool, device=device)
    correct.view(-1)[at] = right
    return Loss(numerator, blocks.total_weight(weights), correct[:, 1:])


class _FrozenHeadLoss(torch.autograd.Function):
    """Weighted sum of -log p(label), and which rows are right; a gradient for the rows alone."""

    @staticmethod
    def forward(
        ctx: Any, rows_MH: Tensor, labels_M: Tensor, weights_M: Tensor, head: TargetHead, chunk: int, want_grad: bool
    ) -> tuple[Tensor, Tensor]:
        wide = weights_M.dtype
        total = weights_M.new_zeros(())
        right_M = torch.empty_like(labels_M, dtype=torch.bool)
        grad_MH = torch.empty_like(rows_MH) if want_grad else None
        with torch.autocast(rows_MH.device.type, enabled=False):
            for start in range(0, len(rows_MH), chunk):
                part = slice(start, start + chunk)
                label, weight = labels_M[part, None], weights_M[part, None]
                x_mV = linear(rows_MH[part].to(head.weight.dtype), head.weight, head.bias)
                best, guess = x_mV.max(-1, keepdim=True)
                right_M[part] = (guess == label).squeeze(1)
                x_mV = x_mV.to(wide)
                of_label = x_mV.gather(1, label)
                x_mV = x_mV.sub_(best.to(wide)).exp_()
                mass = x_mV.sum(-1, keepdim=True)
                total += ((mass.log() + best - of_label) * weight).sum()
                if grad_MH is not None:  # weight * (softmax - 1 at the label), through the head
                    x_mV *= weight / mass
                    x_mV.scatter_add_(1, label, -weight)
                    grad_MH[part] = x_mV.to(head.weight.dtype) @ head.weight
        ctx.mark_non_differentiable(right_M)
        ctx.save_for_backward(grad_MH)
        return total, right_M

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_MH,) = ctx.saved_tensors
        return grad_MH * grad_total.to(grad_MH.dtype), None, None, None, None, None
