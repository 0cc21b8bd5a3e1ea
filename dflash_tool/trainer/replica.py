"""One drafter of a group: microbatches -> the sum of their gradients, and what it did.

A microbatch's gradient is added only when it is whole: one that runs out of memory leaves nothing behind and is run
again in halves. Weights and gradients are fp32; on CUDA the forward runs under bf16 autocast. Replicas on one device
share its model: weights are only read while gradients are taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tool.drafter.anchors import Blocks, draw_anchors, make_blocks
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import DraftLoss, Loss
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import DflashError
from dflash_tool.loader import MixedBatch
from dflash_tool.trainer.timing import Clock


@dataclass(kw_only=True)
class ShareWork:
    """What one drafter did of a step; plain numbers, so that ranks can tell each other.

    weight: its share of the step's divisor; buckets: samples by bucket; seconds: by part (see `timing`).
    """

    microbatches: int = 0
    samples: int = 0
    context_tokens: int = 0
    blocks: int = 0
    weight: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Sums:
    """One flat buffer `[P + 1]`: a sum for each parameter (`gradients`, views) and, last, the loss's numerator."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=parameters[0].dtype, device=parameters[0].device)
        parts = torch.split(self.flat[:-1], sizes)
        self.gradients = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.numerator = self.flat[-1]


class Replica:
    """A drafter that takes gradients. anchors: at most so many a sample; seed: of the run."""

    def __init__(
        self, model: DFlashDraftModel, head: TargetHead, *, loss: DraftLoss, anchors: int = 512, seed: int = 0
    ) -> None:
        self.model, self.head = model, head
        self.halvings = 0
        self._loss, self._anchors, self._seed = loss, anchors, seed
        self._parameters = list(model.parameters())
        self._sums: Sums | None = None

    @property
    def sums(self) -> Sums:
        """What `add_up` filled: made when first asked for, in the dtype that the weights have then."""
        if self._sums is None:
            self._sums = Sums(self._parameters)
        return self._sums

    def add_up(self, share: Iterable[MixedBatch], *, epoch: int) -> ShareWork:
        """Sum the gradients of a step's share, in its order, into `sums`."""
        work, clock = ShareWork(), Clock()
        self.sums.flat.zero_()
        for batch in share:
            clock.spent("data")
            lengths = batch.lengths.numpy()
            blocks = self._blocks(batch, lengths, epoch)
            self._add(batch, blocks, work, clock)
            work.microbatches += 1
            work.samples += len(lengths)
            work.context_tokens += int(lengths.sum())
            work.blocks += len(blocks)
            work.buckets[batch.bucket] = work.buckets.get(batch.bucket, 0) + len(lengths)
        clock.spent("data")
        work.seconds = clock.seconds
        return work

    def _blocks(self, batch: MixedBatch, lengths: NDArray[np.int64], epoch: int) -> Blocks:
        tokens = [row[:length] for row, length in zip(batch.input_ids.numpy(), lengths, strict=True)]
        masks = [row[:length] for row, length in zip(batch.loss_mask.numpy(), lengths, strict=True)]
        anchors = draw_anchors(masks, batch.sample_ids, batch.copies, count=self._anchors, seed=self._seed, epoch=epoch)
        return make_blocks(tokens, masks, anchors, block_size=self.model.settings.block_size)

    def _add(self, batch: MixedBatch, blocks: Blocks, work: ShareWork, clock: Clock) -> None:
        """Add these blocks' gradient, numerator and weight, in halves where they do not fit."""
        if not len(blocks):
            return
        try:
            loss = self._forward(batch, blocks)
            clock.spent("forward")
            gradients = torch.autograd.grad(loss.numerator, self._parameters)
        except torch.OutOfMemoryError:
            gradients = None
        if gradients is None:  # outside the handler, whose traceback held what was allocated
            torch.cuda.empty_cache()
            self.halvings += 1
            for half in _halves(blocks):
                self._add(batch, half, work, clock)
            return
        torch._foreach_add_(self.sums.gradients, list(gradients))
        self.sums.numerator += loss.numerator.detach()
        work.weight += loss.denominator
        clock.spent("backward")

    def _forward(self, batch: MixedBatch, blocks: Blocks) -> Loss:
        device = self.model.device
        on_cuda = device.type == "cuda"
        context = batch.context(device=device, dtype=torch.bfloat16 if on_cuda else self.model.dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
            noise = self.head.noise(blocks, self.model.settings.mask_token_id)
            hidden = self.model.draft_blocks(context, noise, blocks)
        return self._loss(hidden, blocks, self.head)


def _halves(blocks: Blocks) -> tuple[Blocks, Blocks]:
    """The blocks in two parts. DflashError for a single block: even that does not fit."""
    if len(blocks) < 2:
        raise DflashError(
            f"a block at position {blocks.position[0]} does not fit the drafter's device even alone: use "
            "--grad-checkpointing, a smaller --block-size or fewer --draft-layers"
        )
    middle = len(blocks) // 2
    parts = [
        Blocks(blocks.sample[p], blocks.position[p], blocks.tokens[p], blocks.labels[p], blocks.counted[p])
        for p in (slice(None, middle), slice(middle, None))
    ]
    return parts[0], parts[1]
