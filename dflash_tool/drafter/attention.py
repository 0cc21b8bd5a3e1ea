# ruff: noqa: N803, N806 - tensor names carry their shape
"""What a block sees in training: the context before its anchor, and its own slots. Two back-ends, one function.

A block's queries attend to the context positions < its anchor (strictly) and to all slots of their own block, in both
directions; never to another block, another sample, or anything at or after the anchor (DFlash paper, section 4).

`two-part` is exact and runs anywhere: blocks sorted by (sample, anchor) are processed in chunks; a chunk's scores
over the context stop at its last anchor, its own-block scores are one batched product, and one softmax joins both.
So work is proportional to the context that is really visible, and memory is that of one chunk: the backward
computes the scores again, as flash attention does. `flex` is PyTorch's flex_attention under a block mask (CUDA).

Legend: N blocks, B slots a block, R samples (rows), S context positions, A query heads, K KV heads, G = A / K,
D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tool.drafter.anchors import Anchors

Backend = Literal["two-part", "flex"]
_CHUNK_SCORES = 1 << 19  # context scores of a chunk: 2 MiB in fp32, which stays in a core's cache


class Chunk(NamedTuple):
    """Blocks `first`..`last` - 1 of one sample; the last anchor is `context`, the first one `shared`."""

    sample: int
    first: int
    last: int
    context: int
    shared: int


@dataclass(frozen=True)
class AttentionPlan:
    """Which block sees what, for all layers of one microbatch.

    chunks: for two-part. position [N] int64 on the device: the anchors. mask: flex's BlockMask.
    """

    backend: Backend
    block_size: int
    chunks: tuple[Chunk, ...]
    position: Tensor
    mask: Any = None


def plan_attention(
    anchors: Anchors,
    *,
    samples: int,
    context: int,
    block_size: int,
    heads: int,
    device: torch.device,
    backend: Backend | None = None,
) -> AttentionPlan:
    """Plan the attention of blocks at these anchors.

    Args:
        anchors: N, sorted by (sample, position), samples in 0..R-1 and positions in 0..S.
        samples: R.
        context: S.
        block_size: B.
        heads: query heads, for the size of a chunk.
        device: where the attention will run.
        backend: default `flex` on CUDA, `two-part` elsewhere.

    Raises:
        ValueError: the anchors aren't sorted, or lie outside the samples.
    """
    sample, position = anchors.sample, anchors.position
    place = sample * (context + 1) + position
    if len(place) and not (
        (np.diff(place) >= 0).all() and sample[0] >= 0 and sample[-1] < samples
        and position.min() >= 0 and position.max() <= context
    ):  # fmt: skip
        raise ValueError(
            f"anchors must be sorted by (sample, position), with samples in 0..{samples - 1} and positions in "
            f"0..{context}"
        )
    backend = backend or ("flex" if device.type == "cuda" else "two-part")
    on_device = torch.from_numpy(position).to(device)
    if backend == "flex":
        from dflash_tool.drafter.flex import flex_mask  # noqa: PLC0415 - slow to import, and not used on CPU

        mask = flex_mask(anchors, samples=samples, context=context, block_size=block_size, device=device)
        return AttentionPlan(backend, block_size, (), on_device, mask)
    return AttentionPlan(backend, block_size, tuple(_chunks(sample, position, block_size * heads)), on_device)


def block_attention(
    q_NBAD: Tensor, k_NBKD: Tensor, v_NBKD: Tensor, k_RSKD: Tensor, v_RSKD: Tensor, plan: AttentionPlan
) -> Tensor:
    """Attention of every block to its context and itself, scaled by D^-0.5.

    Args:
        q_NBAD: queries of the blocks' slots.
        k_NBKD: keys of the slots.
        v_NBKD: values of the slots.
        k_RSKD: keys of the context. Rows at or after a sample's last anchor are never read.
        v_RSKD: values of the context.
        plan: from `plan_attention`.

    Returns:
        `[N, B, A, D]`, of the values' dtype.
    """
    if plan.backend == "flex":
        from dflash_tool.drafter.flex import flex_blocks  # noqa: PLC0415

        gathered: Tensor = flex_blocks(q_NBAD, k_NBKD, v_NBKD, k_RSKD, v_RSKD, plan.mask)
        return gathered
    blocks, slots, heads, width = q_NBAD.shape
    kv = k_NBKD.shape[2]
    dtype = torch.promote_types(v_NBKD.dtype, torch.float32)
    q = q_NBAD.to(dtype).mul(width**-0.5).view(blocks, slots, kv, heads // kv, width)
    out: Tensor = _TwoPart.apply(  # type: ignore[no-untyped-call]
        q.permute(2, 0, 3, 1, 4).reshape(kv, blocks, -1, width),
        *(x.to(dtype).permute(2, 0, 1, 3).contiguous() for x in (k_NBKD, v_NBKD)),
        *(x.to(dtype).permute(0, 2, 1, 3).contiguous() for x in (k_RSKD, v_RSKD)),
        plan,
    )
    out = out.view(kv, blocks, heads // kv, slots, width).permute(1, 3, 0, 2, 4)
    return out.reshape(blocks, slots, heads, width).to(v_NBKD.dtype)


def _chunks(sample: NDArray[np.int64], position: NDArray[np.int64], rows: int) -> Iterator[Chunk]:
    """Cut the sorted blocks so that a chunk's scores (`rows` a block and context position) stay in the cache."""
    first = 0
    where, anchors = sample.tolist(), position.tolist()
    for at in range(1, len(where) + 1):
        if (
            at == len(where)
            or where[at] != where[first]
            or (at + 1 - first) * anchors[at] * rows > _CHUNK_SCORES
        ):  # fmt: skip
            yield Chunk(where[first], first, at, anchors[at - 1], anchors[first])
            first = at


class _TwoPart(torch.autograd.Function):
    """Two-part attention; x is a chunk's [K, n, G*B, ...] part of queries that are scaled already."""

    @staticmethod
    def forward(
        ctx: Any, q_KNXD: Tensor, k_KNBD: Tensor, v_KNBD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, plan: AttentionPlan
    ) -> Tensor:
        out = torch.empty_like(q_KNXD)
        lse = q_KNXD.new_empty(q_KNXD.shape[:-1])
        for chunk in plan.chunks:
            part = slice(chunk.first, chunk.last)
            seen, own = _scores(q_KNXD[:, part], k_KNBD[:, part], k_RKSD, chunk, plan)
            top = own.amax(-1)
            if chunk.context:
                top = torch.maximum(top, seen.amax(-1))
            own = own.sub_(top.unsqueeze(-1)).exp_()
            total = own.sum(-1)
            result = own @ v_KNBD[:, part]
            if chunk.context:
                seen = seen.sub_(top.unsqueeze(-1)).exp_()
                total += seen.sum(-1)
                result += (seen.flatten(1, 2) @ v_RKSD[chunk.sample, :, : chunk.context]).view_as(result)
            out[:, part] = result.div_(total.unsqueeze(-1))
            lse[:, part] = total.log_().add_(top)
        ctx.save_for_backward(q_KNXD, k_KNBD, v_KNBD, k_RKSD, v_RKSD, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad_KNXD: Tensor) -> tuple[Tensor | None, ...]:
        q_KNXD, k_KNBD, v_KNBD, k_RKSD, v_RKSD, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        grad_KNXD = grad_KNXD.contiguous()
        inner = (grad_KNXD * out).sum(-1, keepdim=True)
        lse = lse.unsqueeze(-1)
        dq, dk, dv = torch.empty_like(q_KNXD), torch.empty_like(k_KNBD), torch.empty_like(v_KNBD)
        dk_seen, dv_seen = torch.zeros_like(k_RKSD), torch.zeros_like(v_RKSD)
        for chunk in plan.chunks:
            part = slice(chunk.first, chunk.last)
            q, grad = q_KNXD[:, part], grad_KNXD[:, part]
            seen, own = _scores(q, k_KNBD[:, part], k_RKSD, chunk, plan)
            own = own.sub_(lse[:, part]).exp_()
            dv[:, part] = own.transpose(-1, -2) @ grad
            d_own = (grad @ v_KNBD[:, part].transpose(-1, -2)).sub_(inner[:, part]).mul_(own)
            dk[:, part] = d_own.transpose(-1, -2) @ q
            d_part = d_own @ k_KNBD[:, part]
            if chunk.context:
                keys, values = (x[chunk.sample, :, : chunk.context] for x in (k_RKSD, v_RKSD))
                flat_q, flat_grad = q.flatten(1, 2), grad.flatten(1, 2)
                seen = seen.sub_(lse[:, part]).exp_().flatten(1, 2)
                dv_seen[chunk.sample, :, : chunk.context] += seen.transpose(-1, -2) @ flat_grad
                d_seen = flat_grad @ values.transpose(-1, -2)
                d_seen = d_seen.sub_(inner[:, part].flatten(1, 2)).mul_(seen)
                dk_seen[chunk.sample, :, : chunk.context] += d_seen.transpose(-1, -2) @ flat_q
                d_part += (d_seen @ keys).view_as(d_part)
            dq[:, part] = d_part
        return dq, dk, dv, dk_seen, dv_seen, None


def _scores(q: Tensor, k: Tensor, k_RKSD: Tensor, chunk: Chunk, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """A chunk's scores over its context [K, n, G*B, c], -inf where hidden, and over its own slots [K, n, G*B, B]."""
    own = q @ k.transpose(-1, -2)
    if not chunk.context:
        return own, own
    keys = k_RKSD[chunk.sample, :, : chunk.context]
    seen = (q.flatten(1, 2) @ keys.transpose(-1, -2)).view(*q.shape[:-1], chunk.context)
    if chunk.shared < chunk.context:  # between the first and the last anchor only some see the context
        places = torch.arange(chunk.shared, chunk.context, device=q.device)
        hidden = places >= plan.position[chunk.first : chunk.last, None, None]
        seen[..., chunk.shared :].masked_fill_(hidden, -torch.inf)
    return seen, own
