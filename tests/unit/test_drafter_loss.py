"""The losses against cases by hand and plain cross-entropy, with gradients, chunks, biases and autocast."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from dflash_tool.drafter.anchors import Blocks, decay_weights, every_anchor, make_blocks
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import decay_loss, dpace_loss


def blocks_of(labels: list[list[int]], counted: list[list[int]]) -> Blocks:
    nothing = np.zeros(len(labels), np.int64)
    return Blocks(nothing, nothing, nothing, np.array(labels, np.int64), np.array(counted, bool))


def test_by_hand() -> None:
    # Head rows 0 and ln 3 over a hidden size of one: hidden h gives logits (0, h ln 3), so p(1) = 3^h / (1 + 3^h).
    head = TargetHead(torch.zeros(2, 1), torch.tensor([[0.0], [math.log(3)]]))
    hidden = torch.tensor([[[9.0], [1.0], [0.0], [2.0]]], requires_grad=True)
    blocks = blocks_of([[1, 0, 1]], [[1, 1, 0]])
    loss = decay_loss(hidden, blocks, np.array([1.0, 0.5, 0.25]), head)
    assert loss.numerator.item() == pytest.approx(-math.log(3 / 4) - 0.5 * math.log(1 / 2))
    assert loss.denominator == 1.5
    assert loss.correct.tolist() == [[True, True, False]]  # a tie goes to the first; what doesn't count is never right
    (gradient,) = torch.autograd.grad(loss.numerator, hidden)
    assert gradient.flatten().tolist() == pytest.approx([0.0, (3 / 4 - 1) * math.log(3), 0.5 * 0.5 * math.log(3), 0.0])


def random_case(bias: bool) -> tuple[Tensor, Blocks, TargetHead]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rng = np.random.default_rng(0)
    masks = [rng.random(n) < 0.8 for n in (30, 12)]
    tokens = [rng.integers(0, 50, len(mask)) for mask in masks]
    blocks = make_blocks(tokens, masks, every_anchor(masks), block_size=6)
    head = TargetHead(random(50, 7), random(50, 7), random(50) if bias else None)
    return random(len(blocks), 6, 7).requires_grad_(), blocks, head


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 3000, None])
def test_equals_plain_cross_entropy(bias: bool, chunk_bytes: int | None) -> None:
    hidden, blocks, head = random_case(bias)
    weights = decay_weights(6)
    logits = head.logits(hidden[:, 1:])
    each = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(blocks.labels).flatten(), reduction="none")
    every = torch.from_numpy(weights * blocks.counted).flatten()
    expected = (each * every).sum()
    got = decay_loss(hidden, blocks, weights, head, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(got.numerator, expected, rtol=1e-12, atol=0)
    assert got.denominator == pytest.approx(every.sum().item(), rel=1e-14)
    assert torch.equal(
        got.correct, (logits.argmax(-1) == torch.from_numpy(blocks.labels)) & torch.from_numpy(blocks.counted)
    )
    wanted = torch.autograd.grad(expected / 3, hidden)[0]
    torch.testing.assert_close(torch.autograd.grad(got.numerator / 3, hidden)[0], wanted, rtol=1e-11, atol=1e-14)


def test_without_gradient_and_without_labels() -> None:
    hidden, blocks, head = random_case(False)
    with torch.no_grad():
        plain = decay_loss(hidden, blocks, decay_weights(6), head)
    assert not plain.numerator.requires_grad
    assert plain.numerator.item() == pytest.approx(decay_loss(hidden, blocks, decay_weights(6), head).numerator.item())
    none = decay_loss(hidden[:2], blocks_of([[1] * 5] * 2, [[0] * 5] * 2), decay_weights(6), head)
    assert none.numerator.item() == none.denominator == 0
    assert not torch.autograd.grad(none.numerator, hidden)[0].any()


def test_large_logits_stay_finite() -> None:
    head = TargetHead(torch.zeros(3, 1), torch.tensor([[0.0], [1e4], [-1e4]]))
    hidden = torch.ones(1, 2, 1, requires_grad=True)
    loss = decay_loss(hidden, blocks_of([[0]], [[1]]), np.ones(1), head)
    assert loss.numerator.item() == 1e4
    assert torch.autograd.grad(loss.numerator, hidden)[0].isfinite().all()


def test_a_bf16_head_under_autocast_accumulates_in_fp32() -> None:
    hidden, blocks, head = random_case(True)
    half = TargetHead(
        *(x.bfloat16() for x in (head.embedding, head.weight)), None if head.bias is None else head.bias.bfloat16()
    )
    wide = TargetHead(
        *(x.float() for x in (half.embedding, half.weight)), None if half.bias is None else half.bias.float()
    )
    rows = hidden.detach().bfloat16().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = decay_loss(rows, blocks, decay_weights(6), half)
        expected = decay_loss(rows, blocks, decay_weights(6), wide)  # not cast: the loss has its own precision
    assert got.numerator.dtype == expected.numerator.dtype == torch.float32
    torch.testing.assert_close(got.numerator, expected.numerator, rtol=5e-3, atol=0)
    gradients = [torch.autograd.grad(loss.numerator, rows)[0] for loss in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=3e-2, atol=3e-2)


def test_dpace_by_hand() -> None:
    # p(1) of slots: 3/4, 1/2, 9/10; q~ = 1/2 + p/2: 7/8, 3/4, 19/20; prefix products 7/8, 21/32, 399/640.
    head = TargetHead(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[0.0], [math.log(3)]]).double())
    hidden = torch.tensor([[[9.0], [1.0], [0.0], [2.0]]] * 2, dtype=torch.float64, requires_grad=True)
    loss = dpace_loss(hidden, blocks_of([[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 0]]), head)
    of_slot = [-math.log(3 / 4), -math.log(1 / 2), -math.log(9 / 10)]
    whole = [7 / 8 + 21 / 32 + 399 / 640, 21 / 32 + 399 / 640, 399 / 640]
    short = [7 / 8 + 21 / 32, 21 / 32]
    expected = sum(w * x for w, x in zip(whole, of_slot, strict=True)) + sum(
        w * x for w, x in zip(short, of_slot[:2], strict=True)
    )
    assert loss.numerator.item() == pytest.approx(expected, rel=1e-6)
    assert loss.denominator == 2
    (gradient,) = torch.autograd.grad(loss.numerator, hidden)
    by_slot = [w * (p - 1) * math.log(3) for w, p in zip(whole, (3 / 4, 1 / 2, 9 / 10), strict=True)]
    assert gradient[0].flatten().tolist() == pytest.approx([0.0, *by_slot], rel=1e-6)
    assert gradient[1, 3].item() == 0


def test_dpace_gives_a_sample_its_share_by_anchors() -> None:
    """A sample with 10 anchors pulls 10 times as much as one with 1, and its pull depends on how good it is.

    By hand, for blocks of one draft: d loss / d hidden = (1/2 + p/2) (p - 1) ln 3 / (number of blocks).
    """
    head = TargetHead(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[0.0], [math.log(3)]]).double())
    hidden = torch.tensor([[[0.0], [0.0]]] + [[[0.0], [1.0]]] * 10, dtype=torch.float64, requires_grad=True)
    loss = dpace_loss(hidden, blocks_of([[1]] * 11, [[1]] * 11), head)
    (gradient,) = torch.autograd.grad(loss.numerator / loss.denominator, hidden)
    one, ten = gradient[0].sum().item(), gradient[1:].sum().item()
    assert one == pytest.approx(3 / 4 * -1 / 2 * math.log(3) / 11, rel=1e-6)
    assert ten == pytest.approx(10 * 7 / 8 * -1 / 4 * math.log(3) / 11, rel=1e-6)
    assert ten / one == pytest.approx(10 * (7 / 32) / (3 / 8), rel=1e-6)


def test_dpace_does_not_depend_on_chunks() -> None:
    hidden, blocks, head = random_case(True)
    whole, cut = (dpace_loss(hidden, blocks, head, chunk_bytes=size) for size in (None, 1))
    torch.testing.assert_close(whole.numerator, cut.numerator, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss.numerator, hidden)[0] for loss in (whole, cut)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-14)
