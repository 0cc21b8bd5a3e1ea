"""One optimizer step of a drafter: each microbatch's gradient, summed, divided once, clipped, applied.

    gradient = sum over microbatches of d(numerator) / sum over microbatches of the weights

so neither the number of microbatches nor their shapes change the step. A microbatch's gradient is added only when it is
whole: one that runs out of memory leaves nothing behind and is run again in halves. Weights, gradients and AdamW's
moments are fp32; on CUDA the forward runs under bf16 autocast.

On the CPU a non-finite loss or gradient stops the step at once; on CUDA such a step changes no weight and is reported
at the next `check` (no synchronisation in between).
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tool.drafter.anchors import Blocks, decay_weights, draw_anchors, make_blocks
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import decay_loss
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import DflashError
from dflash_tool.loader import MixedBatch
from dflash_tool.wording import counted

_BETAS = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did. `loss` and `grad_norm` (before clipping) are tensors on the device: reading them waits for it.

    samples, context_tokens, blocks, weight: of the step; seconds: "forward" (with the loss), "backward", "optimizer";
    buckets: samples by bucket.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    samples: int
    context_tokens: int
    blocks: int
    weight: float
    buckets: dict[int, int]
    seconds: dict[str, float]


@dataclass
class _Clock:
    """Wall seconds by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0, "optimizer": 0.0})
    since: float = field(default_factory=time.perf_counter)

    def spent(self, what: str | None) -> None:
        now = time.perf_counter()
        if what is not None:
            self.seconds[what] += now - self.since
        self.since = now


class DrafterTrainLoop:
    """Owns a drafter's optimizer. The caller brings the steps and decides when to validate and save.

    total_steps: of the whole run, for the learning rate: linear warm-up over `warmup` of them, then cosine to 0.
    anchors: at most so many a sample; gamma: of the loss's decay (None: by block size).
    """

    def __init__(
        self,
        model: DFlashDraftModel,
        head: TargetHead,
        *,
        total_steps: int,
        lr: float,
        warmup: float = 0.04,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        anchors: int = 512,
        gamma: float | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.head = head
        self.total_steps = total_steps
        self.steps_done = 0
        self.halvings = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=_BETAS, weight_decay=weight_decay)
        self._lr, self._warmup, self._clip = lr, max(1, math.ceil(warmup * total_steps)), clip
        self._anchors, self._seed = anchors, seed
        self._block_size = model.settings.block_size
        self._weights = decay_weights(self._block_size, gamma)
        self._parameters = list(model.parameters())
        self._bad_step = torch.zeros((), dtype=torch.bool, device=model.device)
        self._unchecked: list[NDArray[np.int64]] = []

    def learning_rate(self, step: int) -> float:
        """Of a step counted from 0."""
        if step < self._warmup:
            return self._lr * (step + 1) / self._warmup
        share = (step - self._warmup) / max(1, self.total_steps - self._warmup)
        return self._lr * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def step(self, batches: Iterable[MixedBatch], *, epoch: int, rows: NDArray[np.int64]) -> StepResult:
        """Take one optimizer step. `rows`: the step's samples, to be named if it goes wrong.

        Raises DflashError for a non-finite loss or gradient, naming step and samples (on CUDA: at `check`).
        """
        clock = _Clock()
        sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        numerator = torch.zeros((), device=self.model.device)
        weight, samples, tokens, blocks_done = 0.0, 0, 0, 0
        buckets: dict[int, int] = {}
        for batch in batches:
            clock.spent(None)
            lengths = batch.lengths.numpy()
            blocks = self._blocks(batch, lengths, epoch)
            numerator += self._accumulate(batch, blocks, sums, clock)
            weight += blocks.total_weight(self._weights)
            samples += len(lengths)
            tokens += int(lengths.sum())
            blocks_done += len(blocks)
            buckets[batch.bucket] = buckets.get(batch.bucket, 0) + len(lengths)
        clock.spent(None)
        if weight == 0:
            raise DflashError(f"step {self.steps_done}: none of its {counted(len(rows), 'sample')} has an anchor")
        lr = self.learning_rate(self.steps_done)
        loss = numerator / weight
        grad_norm = self._apply(sums, weight, lr, loss)
        clock.spent("optimizer")
        self._unchecked.append(rows)
        self.steps_done += 1
        if self.model.device.type == "cpu":
            self.check()
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            samples=samples,
            context_tokens=tokens,
            blocks=blocks_done,
            weight=weight,
            buckets=buckets,
            seconds=clock.seconds,
        )

    def check(self) -> None:
        """Raise DflashError if a step since the last check had a non-finite loss or gradient. Waits for the device."""
        steps, self._unchecked = self._unchecked, []
        if bool(self._bad_step):
            first = self.steps_done - len(steps)
            named = ", ".join(str(row) for row in np.concatenate(steps)[:8].tolist())
            raise DflashError(
                f"the loss or a gradient is NaN or Inf in step {first if len(steps) == 1 else f'{first} or later'} "
                f"(samples in rows {named}, ... of samples.arrow); no weight was changed by it. Try a smaller --lr or "
                "a longer --warmup, and go on from the last checkpoint with another --out"
            )

    def _blocks(self, batch: MixedBatch, lengths: NDArray[np.int64], epoch: int) -> Blocks:
        tokens = [row[:length] for row, length in zip(batch.input_ids.numpy(), lengths, strict=True)]
        masks = [row[:length] for row, length in zip(batch.loss_mask.numpy(), lengths, strict=True)]
        anchors = draw_anchors(masks, batch.sample_ids, batch.copies, count=self._anchors, seed=self._seed, epoch=epoch)
        return make_blocks(tokens, masks, anchors, block_size=self._block_size)

    def _accumulate(self, batch: MixedBatch, blocks: Blocks, sums: Sequence[Tensor], clock: _Clock) -> Tensor:
        """Add the microbatch's gradient to `sums`, in halves where it does not fit; returns its numerator."""
        if not len(blocks):
            return torch.zeros((), device=self.model.device)
        try:
            numerator, gradients = self._gradients(batch, blocks, clock)
        except torch.OutOfMemoryError:
            gradients = None
        if gradients is None:  # outside the handler, whose traceback held what was allocated
            torch.cuda.empty_cache()
            self.halvings += 1
            first, second = _halves(blocks)
            return self._accumulate(batch, first, sums, clock) + self._accumulate(batch, second, sums, clock)
        torch._foreach_add_(list(sums), list(gradients))
        clock.spent("backward")
        return numerator

    def _gradients(self, batch: MixedBatch, blocks: Blocks, clock: _Clock) -> tuple[Tensor, tuple[Tensor, ...]]:
        numerator = self._numerator(batch, blocks)
        clock.spent("forward")
        gradients = torch.autograd.grad(numerator, self._parameters)
        clock.spent("backward")
        return numerator.detach(), gradients

    def _numerator(self, batch: MixedBatch, blocks: Blocks) -> Tensor:
        device = self.model.device
        on_cuda = device.type == "cuda"
        context = batch.context(device=device, dtype=torch.bfloat16 if on_cuda else self.model.dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
            noise = self.head.noise(blocks, self.model.settings.mask_token_id)
            hidden = self.model.draft_blocks(context, noise, blocks)
        return decay_loss(hidden, blocks, self._weights, self.head).numerator

    def _apply(self, sums: Sequence[Tensor], weight: float, lr: float, loss: Tensor) -> Tensor:
        """Divide by the step's weight, clip by the true global norm, take the step; returns the norm unclipped."""
        torch._foreach_div_(list(sums), weight)
        norm = torch.nn.utils.get_total_norm(sums)
        good = torch.isfinite(norm) & torch.isfinite(loss)
        self._bad_step |= ~good
        scale = torch.clamp(self._clip / (norm + 1e-6), max=1.0)
        for parameter, gradient in zip(self._parameters, sums, strict=True):
            parameter.grad = torch.where(good, gradient * scale, 0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.model.device.type == "cuda" or bool(good):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


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
