"""`train` from end to end: store -> mixing loader -> drafter, with validation, metrics and checkpoints.

The loop reads as three lines: step; log; now and then validate and save. What comes before it is in `train_run`.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dflash_tool.errors import Interrupted, StoreError
from dflash_tool.loader import LoadedStep
from dflash_tool.pipeline.train_run import SETTINGS, TrainRun, check_out, open_run, resume
from dflash_tool.schemas.train import TrainConfig, TrainState
from dflash_tool.signals import StopSignals
from dflash_tool.store.files import make_folder
from dflash_tool.store.lock import RunLock
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer import Checkpoint, MetricsLog, StepResult, Validation
from dflash_tool.trainer.validate import bigram_yield
from dflash_tool.wording import counted

_PACKAGES = ("dflash-tool", "torch", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run. taus are walk taus of the held-out answers; `steps` counts what this call took."""

    run: Path
    steps: int
    total_steps: int
    drafter: Path
    first: dict[str, Any] | None
    last: dict[str, Any] | None
    best_walk_tau: float | None
    bigram_tau: float | None
    seconds: float
    waited: float
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One JSON document."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


def train(config: TrainConfig, telemetry: TrainTelemetry | None = None) -> TrainResult:
    """Train a drafter, or go on with the run `config.out`. Raises a `DflashError` for all that a user can mend."""
    telemetry = telemetry or TrainTelemetry()
    check_out(config.out)
    run = open_run(config, telemetry)
    with StopSignals() as stop:
        made = make_folder(config.out)
        with RunLock(config.out), run.loader:
            try:
                resumed = resume(run)
                kept = resumed.state.step if resumed else -1
                with stop.forward_to(run.interrupt), MetricsLog(config.out, after_step=kept) as metrics:
                    return _train(run, resumed, metrics)
            except BaseException:
                if made and not (config.out / SETTINGS).exists():  # refused before it began: leave no trace
                    shutil.rmtree(config.out, ignore_errors=True)
                raise


def _train(run: TrainRun, resumed: Checkpoint | None, metrics: MetricsLog) -> TrainResult:
    config, loop, telemetry = run.config, run.loop, run.telemetry
    begun_at = loop.steps_done
    if resumed is None:
        run.first_validation = _validate(run, metrics)
    telemetry.start(step=begun_at, total_steps=loop.total_steps)
    log = _Log(run, metrics)
    for step in _steps_left(run):
        result = loop.step(step, epoch=step.epoch, rows=step.rows)
        log.step(step, result)
        done = loop.steps_done
        last = done == loop.total_steps
        if last or done % config.val_every == 0:
            run.newest_validation = _validate(run, metrics) or run.newest_validation
        if last or done % config.save_every == 0 or run.stop:
            _save(run)
        if run.stop:
            raise _interrupted(run)
    telemetry.stop()
    return _result(run, begun_at)


def _steps_left(run: TrainRun) -> Iterator[LoadedStep]:
    loop = run.loop
    if loop.steps_done >= loop.total_steps:
        return
    try:
        for step in run.loader:
            if run.validator is not None and loop.steps_done == loop.total_steps - 1:
                run.loader.wait_for(run.val_rows)  # the last validation comes right after
            yield step
            if loop.steps_done >= loop.total_steps:
                return
    except (Interrupted, StoreError) as error:  # between two steps
        run.stop.append(error)
        if loop.steps_done:
            _save(run)
        raise _interrupted(run) from None


class _Log:
    """Rows of metrics.jsonl: every `log_every` steps, with the seconds spent and waited since the last row."""

    def __init__(self, run: TrainRun, metrics: MetricsLog) -> None:
        self._run, self._metrics = run, metrics
        self._spent = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._tokens = self._blocks = self._steps = 0
        self._since = time.perf_counter()
        self._waited = run.loader.counters().waited

    def step(self, step: LoadedStep, result: StepResult) -> None:
        """Take note of a step; writes a row when it is time."""
        loop, telemetry = self._run.loop, self._run.telemetry
        for name, seconds in result.seconds.items():
            self._spent[name] += seconds
        self._tokens += result.context_tokens
        self._blocks += result.blocks
        self._steps += 1
        telemetry.update(step=loop.steps_done, lr=result.lr, buckets=result.buckets)
        if loop.steps_done % self._run.config.log_every and loop.steps_done != loop.total_steps:
            return
        loop.check()
        waited, now = self._run.loader.counters().waited, time.perf_counter()
        loss, norm = float(result.loss), float(result.grad_norm)
        self._metrics.write(
            {
                "kind": "train",
                "step": loop.steps_done,
                "epoch": step.epoch,
                "loss": loss,
                "lr": result.lr,
                "grad_norm": norm,
                "samples": result.samples,
                "blocks": result.blocks,
                "tokens_per_second": self._tokens / (now - self._since),
                "blocks_per_second": self._blocks / (now - self._since),
                "steps": self._steps,
                "seconds": now - self._since,
                "data_wait_seconds": waited - self._waited,
                **{f"{name}_seconds": seconds for name, seconds in self._spent.items()},
                "memory_bytes": _memory(self._run.device),
                "buckets": {str(bucket): count for bucket, count in sorted(result.buckets.items())},
            }
        )
        telemetry.update(
            loss=loss,
            grad_norm=norm,
            tokens=int(self._tokens / (now - self._since)),
            blocks=int(self._blocks / (now - self._since)),
            waited=waited,
            spent=dict(self._spent),
        )
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._tokens = self._blocks = self._steps = 0
        self._since, self._waited = now, waited


def _validate(run: TrainRun, metrics: MetricsLog) -> dict[str, Any] | None:
    if run.validator is None:
        return None
    if run.follower is not None and not run.follower.here(run.val_rows):
        if run.loop.steps_done == 0:
            run.notes.append("validation began once all held-out samples were extracted, not at step 0")
        return None
    run.telemetry.stage("validating")
    found: Validation = run.validator.run(run.model)
    row = {"step": run.loop.steps_done, **found.as_row()}
    metrics.write(row)
    run.telemetry.tau(run.loop.steps_done, found.walk_tau)
    run.telemetry.stage("training")
    if run.loop.steps_done and (run.best is None or found.walk_tau > run.best[0]):
        run.best = (found.walk_tau, run.loop.steps_done)
        _save(run)
    return row


def _save(run: TrainRun) -> None:
    """Write a checkpoint; a disk that refuses is said, and the run goes on."""
    run.loop.check()
    best_tau, best_step = run.best or (None, None)
    state = TrainState(
        step=run.loop.steps_done,
        total_steps=run.loop.total_steps,
        loader=run.loader.state_dict(),
        config=run.config.model_dump(mode="json"),
        store_settings=run.store.fingerprint,
        best_walk_tau=best_tau,
        best_step=best_step,
        validation=run.newest_validation,
        threads=torch.get_num_threads(),
        versions={name: version(name) for name in _PACKAGES},
    )
    try:
        run.checkpoints.save(run.model, run.loop.optimizer, state)
    except StoreError as error:
        run.notes.append(f"the checkpoint of step {state.step} could not be saved: {error}")


def _interrupted(run: TrainRun) -> BaseException:
    error = run.stop[0]
    if not isinstance(error, Interrupted):
        return error
    text = f"{error} The run stands at step {run.loop.steps_done:,} of {run.loop.total_steps:,}; "
    return Interrupted(f"{text}run the same command to go on.", error.exit_code - 128)


def _result(run: TrainRun, begun_at: int) -> TrainResult:
    seen = run.telemetry.snapshot()
    bigram = None
    if len(run.val_rows):
        bigram = bigram_yield(
            run.store.samples,
            run.train_rows,
            run.val_rows,
            block_size=run.settings.block_size,
            vocab_size=run.settings.vocab_size,
        ).tau
    if run.loop.halvings:
        run.notes.append(
            f"a microbatch did not fit the memory and was cut in two, {counted(run.loop.halvings, 'time')}: lower "
            "--microbatch-tokens"
        )
    return TrainResult(
        run=run.config.out,
        steps=run.loop.steps_done - begun_at,
        total_steps=run.loop.total_steps,
        drafter=run.checkpoints.folder / ("best" if run.best else "last"),
        first=run.first_validation,
        last=run.newest_validation,
        best_walk_tau=run.best[0] if run.best else None,
        bigram_tau=bigram,
        seconds=seen.seconds,
        waited=run.loader.counters().waited,
        notes=tuple(run.notes),
    )


def _memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a CUDA device, or this process's peak of resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource  # noqa: PLC0415 - not everywhere

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
