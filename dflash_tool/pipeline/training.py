"""`train` from end to end: store -> mixing loader -> drafter, with validation, metrics and checkpoints.

The loop reads as three lines: step; log; now and then validate and save. Everything before it is `_open`: what is
refused is refused there, before the run's folder is touched.
"""

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from dflash_tool.drafter.config import DrafterConfig, drafter_config
from dflash_tool.drafter.head import TargetHead, load_head
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import ConfigError, DataError, Interrupted, StoreError
from dflash_tool.loader import LoadedStep, MixingLoader, anchor_counts, epoch_plans, split_validation
from dflash_tool.schemas.train import MAY_CHANGE, TrainConfig, TrainState
from dflash_tool.signals import StopSignals
from dflash_tool.store.files import disk_errors, make_folder, replace_file
from dflash_tool.store.layout import HEAD
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import settings_fingerprint
from dflash_tool.store.reader import HiddenStore
from dflash_tool.target import resolve_device
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer import Checkpoint, Checkpoints, DrafterTrainLoop, MetricsLog, StepResult, Validation, Validator
from dflash_tool.trainer.budget import microbatch_budgets
from dflash_tool.trainer.validate import bigram_yield
from dflash_tool.window import default_limit
from dflash_tool.wording import counted

SETTINGS = "train.yaml"
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


@dataclass
class _Run:
    """Everything that a run needs, opened and checked."""

    config: TrainConfig
    store: HiddenStore
    settings: DrafterConfig
    device: torch.device
    head: TargetHead
    model: DFlashDraftModel
    loader: MixingLoader
    loop: DrafterTrainLoop
    validator: Validator | None
    train_rows: NDArray[np.int64]
    val_rows: NDArray[np.int64]
    checkpoints: Checkpoints
    telemetry: TrainTelemetry
    notes: list[str]
    best: tuple[float, int] | None = None
    newest_validation: dict[str, Any] | None = None
    first_validation: dict[str, Any] | None = None
    stop: list[BaseException] = field(default_factory=list)


def train(config: TrainConfig, telemetry: TrainTelemetry | None = None) -> TrainResult:
    """Train a drafter, or go on with the run `config.out`. Raises a `DflashError` for all that a user can mend."""
    telemetry = telemetry or TrainTelemetry()
    _check_out(config.out)
    run = _open(config, telemetry)
    with StopSignals() as stop:
        made = make_folder(config.out)
        with RunLock(config.out), run.loader:
            try:
                resumed = _resume(run)
                kept = resumed.state.step if resumed else -1
                with stop.forward_to(run.stop.append), MetricsLog(config.out, after_step=kept) as metrics:
                    return _train(run, resumed, metrics)
            except BaseException:
                if made and not (config.out / SETTINGS).exists():  # refused before it began: leave no trace
                    shutil.rmtree(config.out, ignore_errors=True)
                raise


def _train(run: _Run, resumed: Checkpoint | None, metrics: MetricsLog) -> TrainResult:
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
            run.newest_validation = _validate(run, metrics)
        if last or done % config.save_every == 0 or run.stop:
            _save(run)
        if run.stop:
            raise _interrupted(run)
    telemetry.stop()
    return _result(run, begun_at)


def _steps_left(run: _Run) -> Iterator[LoadedStep]:
    if run.loop.steps_done >= run.loop.total_steps:
        return
    for step in run.loader:
        yield step
        if run.loop.steps_done >= run.loop.total_steps:
            return


class _Log:
    """Rows of metrics.jsonl: every `log_every` steps, with the seconds spent and waited since the last row."""

    def __init__(self, run: _Run, metrics: MetricsLog) -> None:
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


def _validate(run: _Run, metrics: MetricsLog) -> dict[str, Any] | None:
    if run.validator is None:
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


def _save(run: _Run) -> None:
    """Write a checkpoint; a disk that refuses is said, and the run goes on."""
    run.loop.check()
    best_tau, best_step = run.best or (None, None)
    state = TrainState(
        step=run.loop.steps_done,
        total_steps=run.loop.total_steps,
        loader=run.loader.state_dict(),
        config=run.config.model_dump(mode="json"),
        store_settings=settings_fingerprint(run.store.manifest),
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


def _interrupted(run: _Run) -> BaseException:
    error = run.stop[0]
    if not isinstance(error, Interrupted):
        return error
    text = f"{error} The run stands at step {run.loop.steps_done:,} of {run.loop.total_steps:,}; "
    return Interrupted(f"{text}run the same command to go on.", error.exit_code - 128)


def _result(run: _Run, begun_at: int) -> TrainResult:
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


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / SETTINGS).is_file())):
        raise StoreError(f"--out: {out} holds something else; give a new folder, or that of a run to go on with")


def _open(config: TrainConfig, telemetry: TrainTelemetry) -> _Run:
    """Open the store, choose what the config leaves open, and make everything that a run needs."""
    telemetry.stage("opening the store")
    store = HiddenStore.open(config.store)
    manifest = store.manifest
    if not manifest.complete:
        raise StoreError(
            f"the store {config.store} is unfinished "
            f"({int(store.committed.sum()):,} of {counted(manifest.samples, 'sample')}): "
            "run the `dflash extract` that made it again to finish it"
        )
    layers = config.aux_layers or manifest.layer_ids
    if lacking := sorted(set(layers) - set(manifest.layer_ids)):
        raise ConfigError(
            f"--aux-layers: the store {config.store} lacks layer {', '.join(map(str, lacking))}; it holds "
            f"{', '.join(map(str, manifest.layer_ids))}"
        )
    device = resolve_device(config.drafter_device)
    mask_token = _mask_token(config, store)
    telemetry.stage("loading the target's head")
    head = load_head(
        config.store / HEAD, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    settings, notes = _drafter_settings(config, layers, mask_token, head.vocab_size)
    telemetry.stage("planning")
    train_rows, val_rows = split_validation(
        store.samples.ids, store.committed, seed=config.seed, fraction=config.val_fraction, at_most=config.val_samples
    )
    anchors = anchor_counts(store.samples)
    context_budget, block_budget = microbatch_budgets(config, settings, device)
    plan_of = epoch_plans(
        store.samples,
        train_rows,
        anchors_of=anchors,
        anchors=config.anchors,
        block_size=config.block_size,
        seed=config.seed,
        batch_samples=config.batch_samples,
        context_budget=context_budget,
        block_budget=block_budget,
    )
    if not len(train_rows):
        raise DataError(f"the store {config.store} has no sample to train on: extract more, or hold out less")
    total = math.ceil(len(train_rows) / config.batch_samples) * config.epochs
    total = min(total, config.max_steps or total)
    resolved = config.model_copy(update={"aux_layers": tuple(layers), "mask_token_id": mask_token})
    model = DFlashDraftModel(settings, seed=config.seed).to(device)
    model.gradient_checkpointing = config.grad_checkpointing
    validator = Validator(store, val_rows, head, layers=layers, gamma=config.gamma, batch_tokens=context_budget)
    return _Run(
        config=resolved,
        store=store,
        settings=settings,
        device=device,
        head=head,
        model=model,
        loader=MixingLoader(
            store,
            train_rows,
            plan_of,
            layers=tuple(layers),
            epochs=config.epochs,
            window_bytes=int(config.inflight_gib * 2**30) if config.inflight_gib else default_limit(),
            threads=config.loader_threads,
            verify=config.verify_reads,
            pin=device.type == "cuda",
        ),
        loop=DrafterTrainLoop(
            model,
            head,
            total_steps=total,
            lr=config.lr,
            warmup=config.warmup,
            weight_decay=config.weight_decay,
            clip=config.clip,
            anchors=config.anchors,
            gamma=config.gamma,
            seed=config.seed,
        ),
        validator=validator if len(val_rows) else None,
        train_rows=train_rows,
        val_rows=val_rows,
        checkpoints=Checkpoints(config.out, keep=config.keep),
        telemetry=telemetry,
        notes=list(notes),
    )


def _drafter_settings(
    config: TrainConfig, layers: tuple[int, ...], mask_token: int, vocab_size: int
) -> tuple[DrafterConfig, tuple[str, ...]]:
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    target = AutoConfig.from_pretrained(config.store / HEAD)
    return drafter_config(
        target,
        target_layer_ids=layers,
        mask_token_id=mask_token,
        block_size=config.block_size,
        num_layers=config.draft_layers,
        vocab_size=vocab_size,
    )


def _mask_token(config: TrainConfig, store: HiddenStore) -> int:
    """The store's mask token, or the one asked for, which must not occur in the data."""
    ours = store.manifest.mask_token_id
    wanted = ours if config.mask_token_id is None else config.mask_token_id
    if wanted is None:
        raise ConfigError("--mask-token-id is needed: the target's tokenizer has no mask token and no unused row")
    if wanted == ours:
        return wanted  # extraction left out every sample that holds it
    if wanted >= store.manifest.target.vocab_size:
        raise ConfigError(f"--mask-token-id {wanted}: the target has ids 0..{store.manifest.target.vocab_size - 1}")
    for row in range(len(store.samples)):
        if (store.samples.tokens(row) == wanted).any():
            raise ConfigError(
                f"--mask-token-id {wanted}: this token occurs in the data ({store.samples.source(row)}); choose one "
                f"that doesn't{'' if ours is None else f', such as the store own {ours}'}"
            )
    return wanted


def _resume(run: _Run) -> Checkpoint | None:
    """Go on from the newest checkpoint, or begin: write the settings. ConfigError where the config differs."""
    path = run.config.out / SETTINGS
    now = run.config.model_dump(mode="json")
    if path.exists():
        _check_same(yaml.safe_load(path.read_text(encoding="utf-8")), now, path)
    with disk_errors(path, "write"):
        replace_file(path, yaml.safe_dump(now, sort_keys=False, allow_unicode=True).encode())
    checkpoint = run.checkpoints.newest()
    if checkpoint is None:
        return None
    state = checkpoint.state
    if state.store_settings != settings_fingerprint(run.store.manifest):
        raise ConfigError(f"--store: the checkpoint {checkpoint.folder} is of another store, or of one made anew")
    checkpoint.load(run.model, run.loop.optimizer)
    run.loader.load_state_dict(state.loader)
    run.loop.steps_done = state.step
    if state.best_walk_tau is not None and state.best_step is not None:
        run.best = (state.best_walk_tau, state.best_step)
    run.newest_validation = state.validation
    if state.threads != torch.get_num_threads():
        run.notes.append(
            f"the checkpoint was made with {state.threads} torch threads, this run has {torch.get_num_threads()}: "
            "losses agree to rounding, not to the bit"
        )
    return checkpoint


def _check_same(before: Any, now: dict[str, Any], path: Path) -> None:
    if not isinstance(before, dict):
        raise StoreError(f"{path} is damaged; restore it, or choose another --out")
    changed = [name for name in now if name not in MAY_CHANGE and before.get(name) != now[name]]
    if changed:
        lines = [f"  --{name.replace('_', '-')}: the run has {before.get(name)}, now {now[name]}" for name in changed]
        raise ConfigError(
            f"{path.parent} is a run with other settings:\n"
            + "\n".join(lines)
            + "\nrun again with the settings of the run, or choose another --out"
        )


def _memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a CUDA device, or this process's peak of resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource  # noqa: PLC0415 - not everywhere

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
