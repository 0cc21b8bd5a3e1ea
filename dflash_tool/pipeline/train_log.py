"""Rows of metrics.jsonl (and of TensorBoard) from a run's steps, and the run's own sums for its summary."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dflash_tool.loader import LoadedStep
from dflash_tool.pipeline.train_run import TrainRun
from dflash_tool.schemas.run import STEP_PARTS
from dflash_tool.trainer import StepResult
from dflash_tool.trainer.metrics import Write
from dflash_tool.trainer.timing import COMPUTE
from dflash_tool.wording import counted


class TrainLog:
    """A row every `log_every` steps: loss, pace, seconds by part since the last row, for each drafter too.

    spent: seconds by part so far, the mean over drafters, and of rank 0 between steps; memory: bytes at most.
    """

    def __init__(self, run: TrainRun, writers: Sequence[Write]) -> None:
        self.spent: dict[str, float] = {}
        self.memory = 0
        self._run, self._writers = run, writers
        self._idle_steps = self._empty_steps = 0
        self._fewest: int | None = None
        self._begin(time.perf_counter())

    def _begin(self, now: float) -> None:
        """A new row."""
        self._since = now
        self._tokens = self._blocks = self._steps = 0
        self._skew = 0.0
        self._parts: dict[str, float] = {}
        self._drafters: dict[str, dict[str, float]] = {}

    def write(self, row: dict[str, Any]) -> None:
        """Write a row wherever rows go; nowhere but on rank 0."""
        for write in self._writers:
            write(row)

    def step(self, step: LoadedStep, result: StepResult) -> None:
        """Take note of a step; writes a row when it is time. Raises as `DrafterTrainLoop.check`."""
        loop, telemetry = self._run.loop, self._run.telemetry
        _add(self._parts, result.seconds)
        for name, seconds in result.drafters.items():
            _add(self._drafters.setdefault(name, {}), seconds)
        self._tokens += result.context_tokens
        self._blocks += result.blocks
        self._steps += 1
        self._skew += result.skew
        self.memory = max(self.memory, result.memory)
        self._empty_steps += result.samples == 0
        if result.idle and result.samples:
            self._idle_steps += 1
            self._fewest = min(result.microbatches, self._fewest or result.microbatches)
        telemetry.update(step=loop.steps_done, lr=result.lr, buckets=result.buckets)
        due = loop.steps_done % self._run.config.log_every == 0 or loop.steps_done == loop.total_steps
        if not due or not result.blocks:  # a step of nothing but quarantined samples has no loss to write down
            _add(self.spent, result.seconds)
            return
        before = time.perf_counter()
        loop.check()
        loss, norm = float(result.loss), float(result.grad_norm)
        now = time.perf_counter()
        device = {"device": now - before}
        _add(self._parts, device)
        _add(self.spent, result.seconds | device)
        pace = now - self._since
        self.write(
            {
                "kind": "train",
                "step": loop.steps_done,
                "total_steps": loop.total_steps,
                "epoch": step.epoch,
                "loss": loss,
                "lr": result.lr,
                "grad_norm": norm,
                "samples": result.samples,
                "blocks": result.blocks,
                "tokens_per_second": self._tokens / pace,
                "blocks_per_second": self._blocks / pace,
                "steps": self._steps,
                "seconds": pace,
                **{f"{part}_seconds": self._parts.get(part, 0.0) for part in STEP_PARTS},
                "rank_skew_seconds": self._skew,
                "drafters": {name: _waits(seconds) for name, seconds in self._drafters.items()},
                "memory_bytes": result.memory,
                "buckets": {str(bucket): count for bucket, count in sorted(result.buckets.items())},
                **self._run.more(),
            }
        )
        telemetry.update(
            loss=loss,
            grad_norm=norm,
            tokens=int(self._tokens / pace),
            blocks=int(self._blocks / pace),
            waited=self.spent.get("data", 0.0),
            spent=dict(self._parts),
        )
        self._begin(now)

    @contextmanager
    def charge(self, part: str) -> Iterator[None]:
        """Charge the seconds of the body, which is between steps, to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            _add(self.spent, {part: time.perf_counter() - began})

    def notes(self) -> Iterator[str]:
        """What the user should know of the steps' shares, said once."""
        if self._empty_steps:
            yield (
                f"{counted(self._empty_steps, 'step')} changed nothing: all their samples are quarantined; a larger "
                "--batch-samples leaves no step empty"
            )
        if self._idle_steps:
            yield (
                f"in {self._idle_steps:,} steps some of the {self._run.drafters} drafters had nothing to do (the "
                f"smallest had {self._fewest} microbatches): give fewer drafters, a larger --batch-samples or a "
                "smaller --microbatch-tokens"
            )


def _add(total: dict[str, float], seconds: dict[str, float]) -> None:
    for part, value in seconds.items():
        total[part] = total.get(part, 0.0) + value


def _waits(seconds: dict[str, float]) -> dict[str, float]:
    """What a drafter's row says: how long it computed, and whom it waited for."""
    return {
        "compute": sum(seconds.get(part, 0.0) for part in COMPUTE),
        **{part: seconds.get(part, 0.0) for part in ("data", "drafters", "ranks")},
    }
