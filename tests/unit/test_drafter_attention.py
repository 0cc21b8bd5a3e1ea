"""Which block sees what: both back-ends against a plain loop over every pair, forward and backward."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_tool.drafter import attention
from dflash_tool.drafter.anchors import Anchors
from dflash_tool.drafter.attention import block_attention, plan_attention
from dflash_tool.drafter.flex import flex_mask

CPU = torch.device("cpu")
Tensors = list[Tensor]


def make(
    lengths: list[int], anchors: list[list[int]], *, size: int, heads: int, kv: int, width: int = 4
) -> tuple[Anchors, Tensors]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    where = Anchors(
        np.repeat(np.arange(len(anchors)), [len(a) for a in anchors]),
        np.array([a for row in anchors for a in row], np.int64),
    )
    count, rows, context = len(where), len(lengths), max(lengths)
    shapes = [(count, size, heads, width), *[(count, size, kv, width)] * 2, *[(rows, context, kv, width)] * 2]
    return where, [random(*shape) for shape in shapes]


def plain(where: Anchors, tensors: Tensors) -> Tensor:
    """One query at a time, over an explicit list of what it may see."""
    q, k, v, k_seen, v_seen = tensors
    count, size, heads, width = q.shape
    group = heads // k.shape[2]
    rows = []
    for n in range(count):
        sample, anchor = int(where.sample[n]), int(where.position[n])
        for slot in range(size):
            for head in range(heads):
                of = head // group
                keys = [*(k_seen[sample, p, of] for p in range(anchor)), *(k[n, other, of] for other in range(size))]
                values = [*(v_seen[sample, p, of] for p in range(anchor)), *(v[n, other, of] for other in range(size))]
                scores = torch.stack([key @ q[n, slot, head] for key in keys]) / math.sqrt(width)
                rows.append(torch.softmax(scores, 0) @ torch.stack(values))
    return torch.stack(rows).view(q.shape)


def planned(where: Anchors, tensors: Tensors, backend: attention.Backend) -> Tensor:
    q, _, _, k_seen, _ = tensors
    plan = plan_attention(
        where,
        samples=k_seen.shape[0],
        context=k_seen.shape[1],
        block_size=q.shape[1],
        heads=q.shape[2],
        device=q.device,
        backend=backend,
    )
    return block_attention(*tensors, plan)


CASES = {
    "grouped": ([13, 9], [[0, 1, 1, 5, 12], [3, 8]], 4, 6, 2),
    "a head each": ([7], [[2, 3, 6]], 3, 2, 2),
    "one key head": ([6, 6, 6], [[], [5], [0, 2]], 2, 3, 1),
    "one head": ([5], [[1, 4]], 2, 1, 1),
    "no context": ([4], [[0, 0]], 5, 2, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("scores", [1, 60, 1 << 19])
@pytest.mark.parametrize("section", [1, 40, 1 << 11])
def test_two_part_equals_a_plain_loop(
    case: tuple[list[int], list[list[int]], int, int, int], scores: int, section: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, anchors, size, heads, kv = case
    monkeypatch.setattr(attention, "_CHUNK_SCORES", scores)  # a block a chunk, a few, all
    monkeypatch.setattr(attention, "_SECTION_ROWS", section)  # a chunk a section, a few, all
    where, tensors = make(lengths, anchors, size=size, heads=heads, kv=kv)
    slope = torch.randn(len(where), size, heads, 4, dtype=torch.float64)
    results = []
    for compute in (plain, lambda w, t: planned(w, t, "two-part")):
        out = compute(where, tensors)
        gradients = torch.autograd.grad(out, tensors, slope, allow_unused=True)
        results.append(
            [out, *(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, tensors, strict=True))]
        )
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_order_of_anchors_is_checked() -> None:
    for sample, position in (([0, 0], [3, 2]), ([1, 0], [0, 0]), ([0], [9]), ([2], [0]), ([0], [-1])):
        with pytest.raises(ValueError, match="sorted by"):
            plan_attention(
                Anchors(np.array(sample), np.array(position)),
                samples=2,
                context=8,
                block_size=4,
                heads=1,
                device=CPU,
            )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flex_without_compilation_equals_a_plain_loop(case: tuple[list[int], list[list[int]], int, int, int]) -> None:
    lengths, anchors, size, heads, kv = case
    where, tensors = make(lengths, anchors, size=size, heads=heads, kv=kv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "called without torch.compile"
        out = planned(where, [t.detach() for t in tensors], "flex")
    torch.testing.assert_close(out, plain(where, tensors).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("context", "samples", "blocks", "size"), [(300, 2, 70, 16), (513, 3, 40, 10), (128, 1, 8, 16), (40, 2, 100, 7)]
)
def test_flex_tiles_are_full_partial_or_empty_as_the_mask_says(
    context: int, samples: int, blocks: int, size: int
) -> None:
    rng = np.random.default_rng(context)
    places = np.sort(rng.integers(0, samples * context, blocks))
    where = Anchors(places // context, places % context)
    mask = flex_mask(where, samples=samples, context=context, block_size=size, device=CPU)
    queries, keys = mask.seq_lengths
    assert queries % 128 == 0
    assert keys % 128 == 0
    visible = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(queries)[:, None], torch.arange(keys)[None])
    each = -(-context // 128) * 128
    expected = np.zeros((queries, keys), bool)
    for query in range(queries):
        block = query // size
        if block < blocks:
            start = where.sample[block] * each
            expected[query, start : start + where.position[block]] = True
        own = samples * each + block * size
        expected[query, own : min(own + size, keys)] = True
    assert np.array_equal(visible.numpy(), expected)
    tiles = expected.reshape(queries // 128, 128, keys // 128, 128)
    for listed_in, number, wanted in (
        (mask.full_kv_indices, mask.full_kv_num_blocks, tiles.all((1, 3))),
        (mask.kv_indices, mask.kv_num_blocks, tiles.any((1, 3)) & ~tiles.all((1, 3))),
    ):
        assert listed_in is not None
        assert number is not None
        for row, many in enumerate(number[0, 0].tolist()):
            assert listed_in[0, 0, row, :many].tolist() == np.flatnonzero(wanted[row]).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the compiled flex back-end can't run here")
def test_compiled_flex_equals_two_part() -> None:
    rng = np.random.default_rng(0)
    lengths, size = [300, 170], 16
    anchors = [np.sort(rng.choice(n, 40, replace=False)).tolist() for n in lengths]
    where, tensors = make(lengths, anchors, size=size, heads=6, kv=2, width=64)
    slope = torch.randn(len(where), size, 6, 64)
    results = []
    for backend in ("two-part", "flex"):
        moved = [t.detach().float().cuda().requires_grad_() for t in tensors]
        out = planned(where, moved, backend)  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad(out, moved, slope.cuda())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
