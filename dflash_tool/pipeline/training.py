"""`train` from end to end: store -> mixing loader -> drafters, with validation, metrics and checkpoints.

The loop reads as three lines: step; log; now and then validate and save. What comes before it is in `train_run`, the
rows of metrics.jsonl are in `train_log`. Under torchrun every rank runs this; rank 0 alone writes and validates.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dflash_tool.errors import DflashError, Interrupted, StoreError
from dflash_tool.loader import LoadedStep
from dflash_tool.pipeline.train_log import TrainLog
from dflash_tool.pipeline.train_run import TrainRun, check_out, check_together, open_run, resume
from dflash_tool.ranks import Ranks
from dflash_tool.schemas.run import TRAIN_SETTINGS
from dflash_tool.schemas.train import TrainConfig, TrainState
from dflash_tool.signals import StopSignals
from dflash_tool.store.files import make_folder
from dflash_tool.store.lock import RunLock
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer import MetricsLog, StepResult, Validation
from dflash_tool.trainer.board import board, check_board
from dflash_tool.trainer.metrics import Write
from dflash_tool.trainer.timing import bottleneck
from dflash_tool.trainer.validate import bigram_yield
from dflash_tool.wording import counted

_PACKAGES = ("dflash-tool", "torch", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run. taus are walk taus of the held-out answers; `steps` counts what this call took.

    waited: seconds for data, the mean over drafters; spent: seconds by part of the step, the same; bottleneck: what
    held the run up, in words.
    """

    run: Path
    steps: int
    total_steps: int
    drafter: Path
    drafters: int
    ranks: int
    first: dict[str, Any] | None
    last: dict[str, Any] | None
    best_walk_tau: float | None
    bigram_tau: float | None
    seconds: float
    waited: float
    spent: dict[str, float]
    bottleneck: str
    memory_bytes: int
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One JSON document."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


def train(config: TrainConfig, telemetry: TrainTelemetry | None = None) -> TrainResult:
    """Train a drafter, or go on with the run `config.out`. Raises a `DflashError` for all that a user can mend."""
    telemetry = telemetry or TrainTelemetry()
    ranks = Ranks.join()
    with StopSignals() as stop, ranks.alive():
        if config.tensorboard:
            check_board()
        if ranks.rank > 0:
            return run_training(open_run(config, telemetry, ranks), stop)
        check_out(config.out)
        run = open_run(config, telemetry, ranks)
        made = make_folder(config.out)
        with RunLock(config.out):
            try:
                return run_training(run, stop)
            except BaseException:
                if made and not (config.out / TRAIN_SETTINGS).exists():  # refused before it began: leave no trace
                    shutil.rmtree(config.out, ignore_errors=True)
                raise


def run_training(run: TrainRun, stop: StopSignals) -> TrainResult:
    """Resume or begin, then train; whatever happens, threads and connections end."""
    resumed = run.ranks.first(lambda: resume(run))
    if not run.leads:
        resumed = resume(run)
    check_together(run.ranks, run.config.out, run.loader.state_dict())
    kept = resumed.state.step if resumed else -1
    with ExitStack() as stack:
        stack.enter_context(stop.forward_to(run.interrupt))  # outlives the rest: no signal disturbs its end
        stack.enter_context(run.loader)
        stack.enter_context(run.loop.group)
        stack.callback(run.all_reduce.close)
        writers: list[Write] = []
        if run.leads:
            writers.append(stack.enter_context(MetricsLog(run.config.out, after_step=kept, say=run.notes.append)).write)
            if run.config.tensorboard:
                writers.append(stack.enter_context(board(run.config.out, after_step=kept)))
        return _train(run, TrainLog(run, writers))


def _train(run: TrainRun, log: TrainLog) -> TrainResult:
    config, loop, telemetry = run.config, run.loop, run.telemetry
    begun_at = loop.steps_done
    run.stands = run.loader.state_dict()
    if not begun_at:
        run.first_validation = _validate(run, log)
    telemetry.start(step=begun_at, total_steps=loop.total_steps)
    for step in _steps_left(run, log):
        try:
            result = loop.step(step, stop=run.stop)
        except DflashError:  # a sample that can't be read, here or on another rank: the steps before it are good
            if loop.steps_done:
                _save(run, log)
            raise
        run.stands = run.loader.state_dict()
        log.step(step, result)
        run.after_step()
        done = loop.steps_done
        last = done == loop.total_steps
        if last or done % config.val_every == 0:
            _validate(run, log)
        stopped = _asked_to_stop(run, result)
        if last or done % config.save_every == 0 or stopped or _best(run) != run.best:
            _save(run, log)
        if stopped:
            run.ranks.everyone("stop", None, stop=run.stop)  # nobody leaves before rank 0 has saved
            raise _interrupted(run, stopped)
    run.ranks.everyone("end", None, stop=run.stop)
    telemetry.stop()
    if run.leads and run.saved_step != loop.steps_done:
        raise StoreError(
            f"all {loop.total_steps:,} steps are taken, but the last checkpoint is not on disk: {run.unsaved}. Free "
            f"some space and run the same command again: it goes on from step {run.saved_step:,}"
        )
    return _result(run, log, begun_at)


def _steps_left(run: TrainRun, log: TrainLog) -> Iterator[LoadedStep]:
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
        if loop.steps_done:
            _save(run, log)
        if isinstance(error, Interrupted):
            raise _interrupted(run, error) from None
        raise


def _asked_to_stop(run: TrainRun, result: StepResult) -> Interrupted | None:
    """The same answer on every rank. A single one needn't wait for the next step to hear of its own signal."""
    if run.ranks.world > 1:
        return result.stop
    return next((error for error in run.stop if isinstance(error, Interrupted)), None)


def _validate(run: TrainRun, log: TrainLog) -> dict[str, Any] | None:
    if run.validator is None or not run.leads:
        return None
    if run.follower is not None and not run.follower.here(run.val_rows):
        if run.loop.steps_done == 0:
            run.notes.append("validation began once all held-out samples were extracted, not at step 0")
        return None
    run.telemetry.stage("validating")
    with log.charge("validation"):
        found: Validation = run.validator.run(run.model)
    row = {"step": run.loop.steps_done, **found.as_row()}
    log.write(row)
    run.newest_validation = row
    run.telemetry.tau(run.loop.steps_done, found.walk_tau)
    run.telemetry.stage("training")
    return row


def _best(run: TrainRun) -> tuple[float, int] | None:
    """(walk tau, step) of the best checkpoint, counting one that is yet to be saved of the step just validated."""
    row = run.newest_validation
    if row is None or row["step"] != run.loop.steps_done or (run.best is not None and row["walk_tau"] <= run.best[0]):
        return run.best
    return row["walk_tau"], row["step"]


def _save(run: TrainRun, log: TrainLog) -> None:
    """Write a checkpoint; a disk that refuses is said, and the run goes on. Best is what is on disk."""
    run.loop.check()
    run.before_save()
    if not run.leads or run.saved_step == run.loop.steps_done:
        return
    best = _best(run)
    best_tau, best_step = best or (None, None)
    state = TrainState(
        step=run.loop.steps_done,
        total_steps=run.loop.total_steps,
        loader=run.stands,
        config=run.config.model_dump(mode="json"),
        store_settings=run.store.fingerprint,
        best_walk_tau=best_tau,
        best_step=best_step,
        validation=run.newest_validation,
        threads=torch.get_num_threads(),
        drafters=run.drafters,
        versions={name: version(name) for name in _PACKAGES},
    )
    try:
        with log.charge("saving"):
            run.checkpoints.save(run.model, run.loop.optimizer, state)
    except StoreError as error:
        run.unsaved = f"the checkpoint of step {state.step} could not be saved: {error}"
        run.notes.append(run.unsaved)
    else:
        run.best, run.saved_step, run.unsaved = best, state.step, None
    run.telemetry.update(trouble=run.unsaved)


def _interrupted(run: TrainRun, error: Interrupted) -> Interrupted:
    if not run.leads:
        text = f"rank {run.ranks.rank} stops with the others."
    else:
        text = (
            f"{error} The run stands at step {run.saved_step:,} of {run.loop.total_steps:,}; run the same command "
            "to go on."
        )
        if run.unsaved:
            text += f" {run.loop.steps_done - run.saved_step:,} more steps are lost: {run.unsaved}."
    return Interrupted(text, error.exit_code - 128)


def _result(run: TrainRun, log: TrainLog, begun_at: int) -> TrainResult:
    seen = run.telemetry.snapshot()
    bigram = None
    if len(run.val_rows) and run.leads:
        bigram = bigram_yield(
            run.store.samples,
            run.train_rows,
            run.val_rows,
            block_size=run.settings.block_size,
            vocab_size=run.settings.vocab_size,
        ).tau
    if run.loop.group.halvings:
        run.notes.append(
            "a microbatch did not fit the memory and was cut in two, "
            f"{counted(run.loop.group.halvings, 'time')}: lower --microbatch-tokens"
        )
    return TrainResult(
        run=run.config.out,
        steps=run.loop.steps_done - begun_at,
        total_steps=run.loop.total_steps,
        drafter=run.checkpoints.folder / ("best" if run.best else "last"),
        drafters=run.drafters,
        ranks=run.ranks.world,
        first=run.first_validation,
        last=run.newest_validation,
        best_walk_tau=run.best[0] if run.best else None,
        bigram_tau=bigram,
        seconds=seen.seconds,
        waited=log.spent.get("data", 0.0),
        spent=log.spent,
        bottleneck=bottleneck(log.spent),
        memory_bytes=log.memory,
        notes=(*run.notes, *log.notes()),
    )
