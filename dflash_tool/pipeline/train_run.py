"""A training run's parts, opened and checked: what is refused is refused here, before its folder is touched."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from dflash_tool.buckets import StepPlan
from dflash_tool.drafter.config import DrafterConfig, drafter_config
from dflash_tool.drafter.files import read_drafter_config
from dflash_tool.drafter.head import TargetHead, load_head
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import ConfigError, DataError, StoreError
from dflash_tool.loader import MixingLoader, SourceOf, anchor_counts, epoch_plans, split_validation
from dflash_tool.loader.prefetch import batch_bytes
from dflash_tool.pipeline.drafters import adopt, agree, check_fits, drafter_devices, make_group
from dflash_tool.pipeline.stores import choose_layers, open_stores
from dflash_tool.ranks import Ranks
from dflash_tool.schemas.run import TRAIN_SETTINGS
from dflash_tool.schemas.train import MAY_CHANGE, TrainConfig
from dflash_tool.store.files import disk_errors, replace_file
from dflash_tool.store.follow import Follower
from dflash_tool.store.joined import JoinedStore
from dflash_tool.store.layout import HEAD
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer import Checkpoint, Checkpoints, DrafterTrainLoop, GradientSum, Validator
from dflash_tool.window import default_limit

_AHEAD = 16
"""Microbatches of the largest size read ahead by default: the disk is far faster than a drafter, more would idle."""


@dataclass
class TrainRun:
    """Everything that a run needs, opened and checked. `head` and `model` are those of the first local drafter.

    best: walk tau and step of the best checkpoint on disk; saved_step: of the newest one, 0 without any; unsaved: why
    there is no newer one, if the disk refused it.
    stands: where the loader stood after the newest finished step.
    more: further fields of a training row of metrics.jsonl; after_step: done by every rank after each step;
    before_save: done before a checkpoint.
    """

    config: TrainConfig
    ranks: Ranks
    store: JoinedStore
    settings: DrafterConfig
    head: TargetHead
    model: DFlashDraftModel
    loader: MixingLoader
    loop: DrafterTrainLoop
    all_reduce: GradientSum
    validator: Validator | None
    follower: Follower | None
    train_rows: NDArray[np.int64]
    val_rows: NDArray[np.int64]
    plan_of: Callable[[int], StepPlan]
    checkpoints: Checkpoints
    telemetry: TrainTelemetry
    notes: list[str]
    best: tuple[float, int] | None = None
    saved_step: int = 0
    unsaved: str | None = None
    newest_validation: dict[str, Any] | None = None
    first_validation: dict[str, Any] | None = None
    stop: list[BaseException] = field(default_factory=list)
    stands: dict[str, Any] = field(default_factory=dict)
    more: Callable[[], dict[str, Any]] = dict
    after_step: Callable[[], None] = lambda: None
    before_save: Callable[[], None] = lambda: None

    @property
    def leads(self) -> bool:
        """Rank 0 writes, validates and speaks."""
        return self.ranks.rank == 0

    @property
    def drafters(self) -> int:
        """Of all ranks."""
        return self.ranks.world * len(self.loop.group)

    def interrupt(self, error: BaseException) -> None:
        """End after the step at hand, also while waiting for samples to be extracted. From any thread."""
        self.stop.append(error)
        if self.follower is not None:
            self.loader.end_early(error)


def check_out(out: Path) -> None:
    """Refuse a folder that holds something else than a run (StoreError)."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / TRAIN_SETTINGS).is_file())):
        raise StoreError(f"--out: {out} holds something else; give a new folder, or that of a run to go on with")


def open_run(
    config: TrainConfig,
    telemetry: TrainTelemetry,
    ranks: Ranks | None = None,
    *,
    source_of: SourceOf | None = None,
) -> TrainRun:
    """Open the store, choose what the config leaves open, and make everything that a run needs.

    source_of: where batches come from, if not from the store, which then may be unfinished.
    """
    ranks = ranks or Ranks()
    telemetry.stage("waiting for an extraction to begin" if config.follow else "opening the store")
    store = open_stores(config, unfinished=source_of is not None)
    begun_from = _begun_from(config)
    start = read_drafter_config(begun_from) if begun_from is not None else None
    if start is not None:
        config = adopt(config, start)
    layers = choose_layers(config, store, option="--aux-layers" if start is None else "--init-from")
    devices = drafter_devices(config)
    mask_token = _mask_token(config, store)
    telemetry.stage("loading the target's head")
    on_cuda = devices[0].type == "cuda"
    heads = {
        device: load_head(store.root / HEAD, device=device, dtype=torch.bfloat16 if on_cuda else torch.float32)
        for device in dict.fromkeys(devices)
    }
    head = heads[devices[0]]
    settings, notes = _drafter_settings(config, layers, mask_token, head.vocab_size)
    if start is not None:
        check_fits(config, start, settings)
        settings = start
    telemetry.stage("planning")
    train_rows, val_rows = split_validation(
        store.samples.ids,
        np.ones(len(store.samples), np.bool_),  # quarantined or not there yet: a plan with holes, the same for ever
        seed=config.seed,
        fraction=config.val_fraction,
        at_most=config.val_samples,
    )
    growing = not all(each.manifest.complete for each in store.stores)
    follower = Follower(store) if growing and source_of is None else None
    anchors = anchor_counts(store.samples)
    context_budget, block_budget = agree(config, settings, devices, ranks)
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
        raise DataError("the stores have no sample to train on: extract more, hold out less, or raise --weight")
    total = math.ceil(len(train_rows) / config.batch_samples) * config.epochs
    total = min(total, config.max_steps or total)
    resolved = config.model_copy(update={"aux_layers": layers, "mask_token_id": mask_token, "weight": store.weights})
    group = make_group(resolved, settings, devices, [heads[device] for device in devices], begun_from)
    all_reduce = GradientSum(ranks, devices[0])
    validator = Validator(store, val_rows, head, layers=layers, gamma=config.gamma, batch_tokens=context_budget)
    return TrainRun(
        config=resolved,
        ranks=ranks,
        store=store,
        settings=settings,
        head=head,
        model=group.model,
        all_reduce=all_reduce,
        loader=MixingLoader(
            store,
            train_rows,
            plan_of,
            layers=layers,
            epochs=config.epochs,
            max_steps=config.max_steps,
            window_bytes=_window(
                config, store, layers, max(context_budget, int(store.samples.lengths.max())), len(group)
            ),
            threads=config.loader_threads,
            verify=config.verify_reads,
            pin=on_cuda,
            rank=ranks.rank,
            world=ranks.world,
            drafters=len(group),
            source_of=source_of,
            follower=follower,
        ),
        loop=DrafterTrainLoop(
            group,
            total_steps=total,
            lr=config.lr,
            warmup=config.warmup,
            weight_decay=config.weight_decay,
            clip=config.clip,
            ranks=ranks,
            all_reduce=all_reduce,
        ),
        validator=validator if len(val_rows) else None,
        follower=follower,
        train_rows=train_rows,
        val_rows=val_rows,
        plan_of=plan_of,
        checkpoints=Checkpoints(config.out, keep=config.keep),
        telemetry=telemetry,
        notes=list(notes),
    )


def _window(config: TrainConfig, store: JoinedStore, layers: tuple[int, ...], budget: int, drafters: int) -> int:
    """Bytes of batches read ahead: as asked for, else a few of the largest that `budget` tokens allow, if they fit."""
    if config.inflight_gib:
        return int(config.inflight_gib * 2**30)
    tokens = max(budget, int(store.samples.lengths.max()))
    largest = batch_bytes(tokens, store.manifest.layer_row_bytes * len(layers))
    return min(default_limit(), (drafters + _AHEAD) * largest)


def _begun_from(config: TrainConfig) -> Path | None:
    """The drafter that a run starts from; one that goes on has its shape in a checkpoint, should it be gone."""
    if config.init_from is not None and not config.init_from.exists():
        newest = Checkpoints(config.out, keep=config.keep).newest()
        return newest.folder if newest else config.init_from
    return config.init_from


def _drafter_settings(
    config: TrainConfig, layers: tuple[int, ...], mask_token: int, vocab_size: int
) -> tuple[DrafterConfig, tuple[str, ...]]:
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    target = AutoConfig.from_pretrained(config.store[0] / HEAD)
    return drafter_config(
        target,
        target_layer_ids=layers,
        mask_token_id=mask_token,
        block_size=config.block_size,
        num_layers=config.draft_layers,
        vocab_size=vocab_size,
    )


def _mask_token(config: TrainConfig, store: JoinedStore) -> int:
    """The store's mask token, or the one asked for, which must not occur in the data."""
    ours = store.manifest.mask_token_id
    for each in store.stores[1:]:
        if config.mask_token_id is None and each.manifest.mask_token_id != ours:
            raise ConfigError(
                f"--mask-token-id is needed: that of {store.root} is {ours}, of {each.root} "
                f"{each.manifest.mask_token_id}; choose one that occurs in neither"
            )
    wanted = ours if config.mask_token_id is None else config.mask_token_id
    if wanted is None:
        raise ConfigError("--mask-token-id is needed: the target's tokenizer has no mask token and no unused row")
    if all(each.manifest.mask_token_id == wanted for each in store.stores):
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


def resume(run: TrainRun) -> Checkpoint | None:
    """Go on from the newest checkpoint, or begin; rank 0 writes the settings. ConfigError where they differ."""
    path = run.config.out / TRAIN_SETTINGS
    now = run.config.model_dump(mode="json")
    if path.exists():
        _check_same(_read_settings(path), now, path)
    checkpoint = run.checkpoints.newest()
    if checkpoint is not None:
        _go_on(run, checkpoint)
    if run.leads:
        with disk_errors(path, "write"):
            replace_file(path, yaml.safe_dump(now, sort_keys=False, allow_unicode=True).encode())
    return checkpoint


def _go_on(run: TrainRun, checkpoint: Checkpoint) -> None:
    state = checkpoint.state
    if state.store_settings != run.store.fingerprint:
        raise ConfigError(
            f"--store: the checkpoint {checkpoint.folder} is of other stores, of others' order, or of one made anew"
        )
    checkpoint.load(run.model, run.loop.optimizer)
    run.loop.group.copy_weights()
    run.loader.load_state_dict(state.loader)
    run.loop.steps_done = run.saved_step = state.step
    if state.best_walk_tau is not None and state.best_step is not None:
        run.best = (state.best_walk_tau, state.best_step)
    run.newest_validation = state.validation
    made_with, now_with = (state.threads, state.drafters), (torch.get_num_threads(), run.drafters)
    if made_with != now_with:
        run.notes.append(
            f"the checkpoint was made with {made_with[0]} torch threads and {made_with[1]} drafters, this run has "
            f"{now_with[0]} and {now_with[1]}: losses agree to rounding, not to the bit"
        )


def check_together(ranks: Ranks, out: Path, stands: dict[str, Any]) -> None:
    """Refuse ranks that would begin at different steps or of different plans (StoreError). stands: the loader's."""
    for rank, other in enumerate(ranks.everyone("begin", stands)):
        if other != stands:
            what = "step" if other["samples_fingerprint"] == stands["samples_fingerprint"] else "plan of steps"
            raise StoreError(
                f"rank {rank} begins with another {what} than rank {ranks.rank}: every rank must see the same stores "
                f"and the same folder {out}; share it between the machines"
            )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        raise StoreError(f"{path} is damaged; restore it, or choose another --out")
    return settings


def _check_same(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    before = {name: field.default for name, field in TrainConfig.model_fields.items()} | before
    changed = [name for name in now if name not in MAY_CHANGE and before[name] != now[name]]
    if changed:
        lines = [f"  --{name.replace('_', '-')}: the run has {before[name]}, now {now[name]}" for name in changed]
        raise ConfigError(
            f"{path.parent} is a run with other settings:\n"
            + "\n".join(lines)
            + "\nrun again with the settings of the run, or choose another --out"
        )
