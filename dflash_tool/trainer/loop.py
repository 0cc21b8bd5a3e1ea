"""One optimizer step over all drafters: gradients summed, divided once, clipped, applied.

    gradient = sum over microbatches of d(numerator) / sum over microbatches of the weights

over local drafters and ranks, so neither the number of microbatches nor who computes them changes the step. Before
gradients are added up, the ranks meet: each tells what it did, and none waits in a collective for one that won't come.
Every rank then takes the same optimizer step.

On the CPU a non-finite loss or gradient stops the step at once; on CUDA such a step changes no weight and is reported
at the next `check` (no synchronisation in between).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tool.errors import DflashError, Interrupted
from dflash_tool.ranks import Ranks
from dflash_tool.trainer.group import DrafterGroup, TrainStep
from dflash_tool.trainer.replica import Sums
from dflash_tool.trainer.timing import Clock, peak_memory
from dflash_tool.wording import counted

_BETAS = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, over all ranks. `loss` and `grad_norm` (before clipping) are tensors on the device.

    Reading those waits for it. microbatches, samples, context_tokens, blocks, weight: of the step; buckets: samples by
    bucket; idle: drafters without a microbatch; drafters: seconds by part (see `timing`) of each drafter, by name;
    skew: seconds between the first rank to have its gradients and the last; memory: bytes, of the rank that has most;
    stop: a rank was asked to stop, and every rank knows.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    microbatches: int
    samples: int
    context_tokens: int
    blocks: int
    weight: float
    idle: int
    buckets: dict[int, int]
    drafters: dict[str, dict[str, float]]
    skew: float
    memory: int
    stop: Interrupted | None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part, the mean over all drafters."""
        parts = dict.fromkeys(part for seconds in self.drafters.values() for part in seconds)
        return {
            part: sum(each.get(part, 0.0) for each in self.drafters.values()) / len(self.drafters) for part in parts
        }


class DrafterTrainLoop:
    """Owns the optimizer of a group of drafters. The caller brings the steps and decides when to validate and save.

    total_steps: of the whole run, for the learning rate: linear warm-up over `warmup` of them, then cosine to 0.
    ranks, all_reduce: who else trains, and what adds up a tensor over them in place.
    """

    def __init__(
        self,
        group: DrafterGroup,
        *,
        total_steps: int,
        lr: float,
        warmup: float = 0.04,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        ranks: Ranks | None = None,
        all_reduce: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        self.group = group
        self.total_steps = total_steps
        self.steps_done = 0
        self._parameters = list(group.model.parameters())
        self.optimizer = torch.optim.AdamW(self._parameters, lr=lr, betas=_BETAS, weight_decay=weight_decay, fused=True)
        self._lr, self._warmup, self._clip = lr, max(1, math.ceil(warmup * total_steps)), clip
        self._ranks, self._all_reduce = ranks or Ranks(), all_reduce
        self._bad_step = torch.zeros((), dtype=torch.bool, device=group.model.device)
        self._unchecked: list[NDArray[np.int64]] = []

    def learning_rate(self, step: int) -> float:
        """Of a step counted from 0."""
        if step < self._warmup:
            return self._lr * (step + 1) / self._warmup
        share = (step - self._warmup) / max(1, self.total_steps - self._warmup)
        return self._lr * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def step(self, step: TrainStep, *, stop: Sequence[BaseException] = ()) -> StepResult:
        """Take one optimizer step. `stop`: holds what asked this rank to stop, once something has.

        Raises what a drafter raised, and DflashError for a rank that is gone or stopped, or for a non-finite loss or
        gradient, naming step and samples (on CUDA: at `check`).
        """
        began = time.perf_counter()
        works = self.group.add_up(step)
        report = {
            "works": [asdict(work) for work in works],
            "busy": time.perf_counter() - began,
            "memory": peak_memory(self.group.devices),
            "stop": _told(stop),
        }
        clock = Clock()
        reports = self._ranks.everyone(f"step {self.steps_done}", report, stop=stop)
        clock.spent("ranks")
        every = [work for each in reports for work in each["works"]]
        weight = sum(work["weight"] for work in every)
        if weight == 0 and any(work["samples"] for work in every):
            raise DflashError(f"step {self.steps_done}: none of its {counted(len(step.rows), 'sample')} has an anchor")
        sums, lr = self.group.sums, self.learning_rate(self.steps_done)
        self._all_reduce(sums.flat)
        clock.spent("reduce")
        # Where all of a step's samples were quarantined there is nothing to learn: it passes, and changes nothing.
        grad_norm = self._apply(sums, weight, lr) if weight else torch.zeros_like(sums.numerator)
        clock.spent("optimizer")
        self._unchecked.append(step.rows)
        self.steps_done += 1
        if self.group.model.device.type == "cpu":
            self.check()
        return StepResult(
            loss=sums.numerator.clone(),
            grad_norm=grad_norm,
            lr=lr,
            **{
                name: sum(work[name] for work in every)
                for name in ("microbatches", "samples", "context_tokens", "blocks")
            },
            weight=weight,
            idle=sum(not work["microbatches"] for work in every),
            buckets=_buckets(every),
            drafters=_drafters(reports, clock.seconds),
            skew=max(each["busy"] for each in reports) - min(each["busy"] for each in reports),
            memory=max(each["memory"] for each in reports),
            stop=next((Interrupted(*each["stop"]) for each in reports if each["stop"]), None),
        )

    def check(self) -> None:
        """Raise DflashError if a step since the last check had a non-finite loss or gradient. Waits for the device.

        Raises it again each time it is asked, so that nothing is saved from then on.
        """
        if bool(self._bad_step):
            steps = self._unchecked
            first = self.steps_done - len(steps)
            rows = np.concatenate(steps).tolist()
            named = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
            raise DflashError(
                f"the loss or a gradient is NaN or Inf in step {first if len(steps) == 1 else f'{first} or later'} "
                f"(samples in rows {named} of samples.arrow); no weight was changed by it. Start again with another "
                "--out and a smaller --lr or a longer --warmup; --init-from takes the weights of a checkpoint"
            )
        self._unchecked = []

    def _apply(self, sums: Sums, weight: float, lr: float) -> Tensor:
        """Divide by the step's weight, clip by the true global norm, take the step; returns the norm unclipped."""
        sums.flat.div_(weight)
        norm = torch.nn.utils.get_total_norm(sums.gradients)
        good = torch.isfinite(norm) & torch.isfinite(sums.numerator)
        self._bad_step |= ~good
        torch._foreach_mul_(sums.gradients, torch.clamp(self._clip / (norm + 1e-6), max=1.0))
        for parameter, gradient in zip(self._parameters, sums.gradients, strict=True):
            parameter.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The fused optimizer changes nothing where this is 1, without waiting for the device.
        self.optimizer.found_inf = (~good).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.group.copy_weights()
        return norm


def _told(stop: Sequence[BaseException]) -> tuple[str, int] | None:
    """What asked this rank to stop, as ranks tell each other: message and signal."""
    return (str(stop[0]), stop[0].exit_code - 128) if stop and isinstance(stop[0], Interrupted) else None


def _buckets(works: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Samples by bucket over all drafters; another rank's bucket numbers come as text."""
    total: dict[int, int] = {}
    for work in works:
        for bucket, samples in work["buckets"].items():
            total[int(bucket)] = total.get(int(bucket), 0) + samples
    return total


def _drafters(reports: Sequence[dict[str, Any]], mine: dict[str, float]) -> dict[str, dict[str, float]]:
    """Seconds by part of every drafter, named. A rank waits for the slowest; what came after took all the same time."""
    slowest = max(report["busy"] for report in reports)
    after = {part: mine[part] for part in ("reduce", "optimizer")}
    return {
        (f"rank {rank} " if len(reports) > 1 else "") + f"drafter {number}": {
            **work["seconds"], "ranks": slowest - report["busy"], **after,
        }
        for rank, report in enumerate(reports)
        for number, work in enumerate(report["works"])
    }  # fmt: skip
