# ruff: noqa: N803, N806 - tensor names carry their shape
"""What a block sees in training: the context before its anchor, and its own slots. Two back-ends, one function.

A block's queries attend to the context positions < its anchor (strictly) and to all slots of their own block, in both
directions; never to another block, another sample, or anything at or after the anchor (DFlash paper, section 4).

`two-part` is exact and runs anywhere: blocks sorted by (sample, anchor) are processed in chunks; a chunk's scores
over the context stop at its last anchor, the own-block scores of a few chunks are one batched product, and one softmax
joins both. So work is proportional to the context that is really visible, and memory is that of one chunk's scores: the
backward computes them again, as flash attention does. `flex` is PyTorch's flex_attention under a block mask (CUDA).

Legend: N blocks, B slots a block, R samples (rows), S context positions, A query heads, K KV heads, G = A / K,
D head size.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tool.drafter.anchors import Anchors

Backend = Literal["two-part", "flex"]
_CHUNK_SCORES = 1 << 18  # context scores of a chunk, for each thread: 1 MiB in fp32, which stays in a core's cache
_SECTION_ROWS = 1 << 11  # queries of a section, all heads': few, as copies of them are held


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

    sections: of chunks, for two-part. position [N] int64 on the device: the anchors. mask: flex's BlockMask.
    """

    backend: Backend
    block_size: int
    sections: tuple[tuple[Chunk, ...], ...]
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
    sections = tuple(_sections(_chunks(sample, position, block_size * heads), block_size * heads))
    return AttentionPlan(backend, block_size, sections, on_device)


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
    dtype = torch.promote_types(v_NBKD.dtype, torch.float32)
    out: Tensor = _TwoPart.apply(  # type: ignore[no-untyped-call]
        *(x.to(dtype) for x in (q_NBAD, k_NBKD, v_NBKD, k_RSKD, v_RSKD)), plan
    )
    return out.to(v_NBKD.dtype)


def _chunks(sample: NDArray[np.int64], position: NDArray[np.int64], rows: int) -> Iterator[Chunk]:
    """Cut the sorted blocks so that a chunk's scores (`rows` a block and context position) stay in the caches."""
    first, limit = 0, _CHUNK_SCORES * min(torch.get_num_threads(), 8)
    where, anchors = sample.tolist(), position.tolist()
    for at in range(1, len(where) + 1):
        if (
            at == len(where)
            or where[at] != where[first]
            or (at + 1 - first) * anchors[at] * rows > limit
        ):  # fmt: skip
            yield Chunk(where[first], first, at, anchors[at - 1], anchors[first])
            first = at


def _sections(chunks: Iterable[Chunk], rows: int) -> Iterator[tuple[Chunk, ...]]:
    """Put chunks together, to `_SECTION_ROWS` or a chunk more (a block: `rows`): most calls are made once for all."""
    section: list[Chunk] = []
    for chunk in chunks:
        section.append(chunk)
        if chunk.last - section[0].first >= _SECTION_ROWS // rows:
            yield tuple(section)
            section = []
    if section:
        yield tuple(section)


class _TwoPart(torch.autograd.Function):
    """Two-part attention in the layout of its inputs: only a section at a time is put in order for the products.

    Inside, a section's queries are rows [K, n, G*B, D]: each against its own block, a chunk's together against their
    context.
    """

    @staticmethod
    def forward(
        ctx: Any, q_NBAD: Tensor, k_NBKD: Tensor, v_NBKD: Tensor, k_RSKD: Tensor, v_RSKD: Tensor, plan: AttentionPlan
    ) -> Tensor:
        out_NBAD = torch.empty_like(q_NBAD, memory_format=torch.contiguous_format)
        blocks, slots, heads, width = q_NBAD.shape
        groups = heads // k_NBKD.shape[2]
        lse_KNX = q_NBAD.new_empty(heads // groups, blocks, groups * slots)
        room = _room(q_NBAD, plan)
        for section in plan.sections:
            part = slice(section[0].first, section[-1].last)
            q = _rows(q_NBAD[part], groups).mul_(width**-0.5)
            own = q @ _own(k_NBKD[part]).transpose(-1, -2)
            top, total, result = own.amax(-1), q.new_zeros(q.shape[:-1]), torch.zeros_like(q)
            for chunk, here in _places(section):
                seen = _seen(q[:, here], k_RSKD, chunk, plan, room)
                top_here = torch.maximum(top[:, here], seen.amax(-1), out=top[:, here])
                seen = seen.sub_(top_here.unsqueeze(-1)).exp_()
                torch.sum(seen, -1, out=total[:, here])
                result[:, here].flatten(1, 2).baddbmm_(seen.flatten(1, 2), _context(v_RSKD, chunk))
            own = own.sub_(top.unsqueeze(-1)).exp_()
            total += own.sum(-1)
            result += own @ _own(v_NBKD[part])
            _put(out_NBAD[part], result.div_(total.unsqueeze(-1)), groups)
            lse_KNX[:, part] = total.log_().add_(top)
        ctx.save_for_backward(q_NBAD, k_NBKD, v_NBKD, k_RSKD, v_RSKD, out_NBAD, lse_KNX)
        ctx.plan = plan
        return out_NBAD

    @staticmethod
    def backward(ctx: Any, grad_NBAD: Tensor) -> tuple[Tensor | None, ...]:
        q_NBAD, k_NBKD, v_NBKD, k_RSKD, v_RSKD, out_NBAD, lse_KNX = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        width = q_NBAD.shape[-1]
        groups = q_NBAD.shape[2] // k_NBKD.shape[2]
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_NBAD, k_NBKD, v_NBKD))
        dk_seen, dv_seen = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k_RSKD, v_RSKD))
        room, more_room = _room(q_NBAD, plan), _room(q_NBAD, plan)
        for section in plan.sections:
            part = slice(section[0].first, section[-1].last)
            inner = _rows((grad_NBAD[part] * out_NBAD[part]).sum(-1, keepdim=True), groups)
            q, grad = _rows(q_NBAD[part], groups).mul_(width**-0.5), _rows(grad_NBAD[part], groups)
            lse = lse_KNX[:, part, :, None]
            own = (q @ _own(k_NBKD[part]).transpose(-1, -2)).sub_(lse).exp_()
            _own(dv[part]).copy_(own.transpose(-1, -2) @ grad)
            d_own = (grad @ _own(v_NBKD[part]).transpose(-1, -2)).sub_(inner).mul_(own)
            _own(dk[part]).copy_(d_own.transpose(-1, -2) @ q)
            dq_part = d_own @ _own(k_NBKD[part])
            for chunk, here in _places(section):
                flat_q, flat_grad = q[:, here].flatten(1, 2), grad[:, here].flatten(1, 2)
                seen = _seen(q[:, here], k_RSKD, chunk, plan, room).sub_(lse[:, here]).exp_().flatten(1, 2)
                _context(dv_seen, chunk).add_(torch.bmm(seen.transpose(1, 2), flat_grad))
                d_seen = torch.bmm(flat_grad, _context(v_RSKD, chunk).transpose(1, 2), out=_like(more_room, seen.shape))
                d_seen = d_seen.sub_(inner[:, here].flatten(1, 2)).mul_(seen)
                _context(dk_seen, chunk).add_(torch.bmm(d_seen.transpose(1, 2), flat_q))
                dq_part[:, here].flatten(1, 2).baddbmm_(d_seen, _context(k_RSKD, chunk))
            _put(dq[part], dq_part.mul_(width**-0.5), groups)
        return dq, dk, dv, dk_seen, dv_seen, None


def _places(section: Sequence[Chunk]) -> Iterator[tuple[Chunk, slice]]:
    """The chunks that see a context, and where in their section they are."""
    for chunk in section:
        if chunk.context:
            yield chunk, slice(chunk.first - section[0].first, chunk.last - section[0].first)


def _rows(x_nBAD: Tensor, groups: int) -> Tensor:
    """A section's queries as new rows [K, n, G*B, D]."""
    blocks, slots, _, width = x_nBAD.shape
    x = x_nBAD.view(blocks, slots, -1, groups, width).permute(2, 0, 3, 1, 4)
    return x.clone(memory_format=torch.contiguous_format).view(-1, blocks, groups * slots, width)


def _put(x_nBAD: Tensor, rows: Tensor, groups: int) -> None:
    """The reverse of `_rows`."""
    blocks, slots, _, width = x_nBAD.shape
    ordered = rows.view(-1, blocks, groups, slots, width).permute(1, 3, 0, 2, 4)
    x_nBAD.view(blocks, slots, -1, groups, width).copy_(ordered)


def _own(x_nBKD: Tensor) -> Tensor:
    """Keys or values of a section's own slots, [K, n, B, D] (a view)."""
    return x_nBKD.permute(2, 0, 1, 3)


def _context(x_RSKD: Tensor, chunk: Chunk) -> Tensor:
    """Keys or values that a chunk sees, [K, c, D] (a view)."""
    return x_RSKD[chunk.sample, : chunk.context].transpose(0, 1)


def _room(q_NBAD: Tensor, plan: AttentionPlan) -> Tensor:
    """Memory for the largest chunk's context scores, used again and again."""
    _, slots, heads, _ = q_NBAD.shape
    chunks = (chunk for section in plan.sections for chunk in section)
    largest = max(((chunk.last - chunk.first) * chunk.context for chunk in chunks), default=0)
    return q_NBAD.new_empty(largest * slots * heads)


def _like(room: Tensor, shape: Sequence[int]) -> Tensor:
    return room[: math.prod(shape)].view(shape)


def _seen(q: Tensor, k_RSKD: Tensor, chunk: Chunk, plan: AttentionPlan, room: Tensor) -> Tensor:
    """A chunk's scores over its context [K, n, G*B, c], -inf where hidden, in `room`."""
    seen = _like(room, (*q.shape[:-1], chunk.context))
    torch.bmm(q.flatten(1, 2), _context(k_RSKD, chunk).transpose(1, 2), out=seen.flatten(1, 2))
    if chunk.shared < chunk.context:  # between the first and the last anchor only some see the context
        places = torch.arange(chunk.shared, chunk.context, device=q.device)
        hidden = places >= plan.position[chunk.first : chunk.last, None, None]
        seen[..., chunk.shared :].masked_fill_(hidden, -torch.inf)
    return seen
