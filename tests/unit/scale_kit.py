"""Steps made by hand, for one drafter or many; run as a module under torchrun it takes them on every rank."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from dflash_tool.drafter.anchors import Blocks, decay_weights, draw_anchors, make_blocks
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import Loss, decay_loss
from dflash_tool.loader import MixedBatch
from dflash_tool.ranks import Ranks
from dflash_tool.trainer import DrafterGroup, DrafterTrainLoop, GradientSum, Replica

from .drafter_kit import normal, small_drafter

BLOCK, ANCHORS, SEED, EPOCH = 5, 6, 3, 2
# Tokens and supervised tokens of each microbatch's samples; the last microbatch has no two in a row: no anchor.
LENGTHS = [(9, 14, 14), (40,), (25, 31), (6,), (33, 60), (12, 13)]
NO_ANCHOR = len(LENGTHS) - 1
WEIGHTS = decay_weights(BLOCK)


def batches() -> list[MixedBatch]:
    """Microbatches of uneven lengths and supervised counts."""
    rng = np.random.default_rng(0)
    made = []
    for number, lengths in enumerate(LENGTHS):
        shape = (len(lengths), max(lengths))
        mask = np.zeros(shape, np.uint8)
        for row, length in enumerate(lengths):
            mask[row, rng.integers(0, length // 2) : length] = 1
            if number == NO_ANCHOR:
                mask[row, ::2] = 0
        made.append(
            MixedBatch(
                index_in_step=number,
                bucket=0,
                rows=np.arange(len(lengths)) + 10 * number,
                sample_ids=rng.integers(0, 2**63, (len(lengths), 2)).astype(np.uint64),
                copies=np.zeros(len(lengths), np.int64),
                lengths=torch.tensor(lengths),
                input_ids=torch.from_numpy(rng.integers(0, 60, shape)),
                loss_mask=torch.from_numpy(mask),
                states=normal(3, *shape, 24, seed=number),
            )
        )
    return made


def head() -> TargetHead:
    return TargetHead(normal(61, 24, seed=7), normal(61, 24, seed=8))


@dataclass
class Step:
    """A step whose shares are these."""

    shares: Sequence[Iterable[MixedBatch]]
    epoch: int = EPOCH
    rows: NDArray[np.int64] = field(default_factory=lambda: np.arange(3))
    abort: Callable[[BaseException], None] = lambda _: None


def loop_of(drafters: int, *, clip: float, apart: bool = False, **more: object) -> DrafterTrainLoop:
    """A loop over equal drafters, each with a model of its own if they are `apart`."""
    shared = small_drafter(block_size=BLOCK)
    replicas = [
        Replica(small_drafter(block_size=BLOCK) if apart else shared, head(), loss=_loss, anchors=ANCHORS, seed=SEED)
        for _ in range(drafters)
    ]
    return DrafterTrainLoop(DrafterGroup(replicas), total_steps=10, lr=1e-2, clip=clip, **more)  # type: ignore[arg-type]


def _loss(hidden: Tensor, blocks: Blocks, target: TargetHead) -> Loss:
    return decay_loss(hidden, blocks, WEIGHTS, target)


def expected() -> tuple[float, float, list[Tensor]]:
    """Loss, gradient norm and gradient of all microbatches, computed plainly: one sample at a time, all logits."""
    model, target = small_drafter(block_size=BLOCK), head()
    numerator, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for batch in batches():
        for row, length in enumerate(batch.lengths.tolist()):
            tokens, mask = batch.input_ids[row, :length].numpy(), batch.loss_mask[row, :length].numpy()
            ids = batch.sample_ids[row : row + 1]
            anchors = draw_anchors([mask], ids, np.zeros(1), count=ANCHORS, seed=SEED, epoch=EPOCH)
            blocks = make_blocks([tokens], [mask], anchors, block_size=BLOCK)
            if not len(blocks):
                continue
            context = batch.states[:, row, :length].permute(1, 0, 2).reshape(1, length, -1)
            hidden = model.draft_blocks(context, target.noise(blocks, 60), blocks)
            labels = torch.from_numpy(blocks.labels)
            each = F.cross_entropy(target.logits(hidden[:, 1:]).flatten(0, 1), labels.flatten(), reduction="none")
            weights = torch.from_numpy(blocks.counted * WEIGHTS).flatten()
            numerator = numerator + (each * weights).sum()
            denominator += float(weights.sum())
    gradient = torch.autograd.grad(numerator / denominator, list(model.parameters()))
    norm = torch.cat([part.flatten() for part in gradient]).norm()
    return float(numerator.detach()) / denominator, float(norm), list(gradient)


def check_step(loop: DrafterTrainLoop, shares: Sequence[Sequence[MixedBatch]], clip: float) -> None:
    """Take the step; its loss, norm and clipped gradient, over all drafters and ranks, are those computed plainly."""
    loss, norm, gradient = expected()
    result = loop.step(Step(shares))
    torch.testing.assert_close(float(result.loss), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(float(result.grad_norm), norm, rtol=1e-10, atol=0)
    scale = min(1.0, clip / (norm + 1e-6))
    for got, wanted in zip(loop.group.sums.gradients, gradient, strict=True):
        torch.testing.assert_close(got, wanted * scale, rtol=1e-10, atol=1e-10)


def main(out: Path) -> None:
    """On each rank of two: several ways to share one step out. Writes OUT/<rank> when all came out right."""
    torch.set_num_threads(1)
    ranks = Ranks.join()
    every, add_up = batches(), GradientSum(ranks, torch.device("cpu"))
    ways = {
        "one rank without an anchor": [[every[:NO_ANCHOR]], [every[NO_ANCHOR:]]],
        "one rank without work": [[every], [[]]],
        "two drafters each": [[every[:1], every[1:2]], [every[2:4], every[4:]]],
    }
    with ranks.alive():
        for number, way in enumerate(ways.values()):
            for clip in (0.05, 1e9):
                loop = loop_of(len(way[0]), clip=clip, ranks=ranks, all_reduce=add_up)
                loop.steps_done = 2 * number + (clip > 1)  # meetings of other names
                with loop.group:
                    check_step(loop, way[ranks.rank], clip)
        weights = torch.cat([parameter.detach().flatten() for parameter in loop.group.model.parameters()])
        same = ranks.everyone("weights", weights.sum().item())
        assert same[0] == same[1]
        add_up.close()
    (out / str(ranks.rank)).write_text(", ".join(ways))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
