"""What a live run will be like, from its first epoch's step plan: padding, memory, time lost where steps end."""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import StepPlan, assign
from dflash_tool.drafter.config import drafter_config
from dflash_tool.drafter.files import read_drafter_config
from dflash_tool.errors import ConfigError, DataError, StoreError
from dflash_tool.lifecycle import check_out
from dflash_tool.loader import anchor_counts, epoch_plans, split_validation
from dflash_tool.pipeline.live_devices import devices_of, own_devices, window_limit
from dflash_tool.planning import ExtractionPlan, make_plan, plan_rows, prepare_samples
from dflash_tool.resolving import resolve
from dflash_tool.schemas.live import HELD_OUT, LiveConfig
from dflash_tool.schemas.run import LIVE_SETTINGS, TRAIN_SETTINGS
from dflash_tool.signals import StopSignals
from dflash_tool.store.files import TEMP_PREFIX, disk_errors
from dflash_tool.store.lock import LOCK
from dflash_tool.store.samples import Samples
from dflash_tool.target import resolve_device
from dflash_tool.telemetry import ExtractTelemetry
from dflash_tool.trainer.budget import microbatch_budgets

Int64s = NDArray[np.int64]
_STEPS_MEASURED = 200


@dataclass(frozen=True, kw_only=True)
class LiveFigures:
    """Measured on (at most 200 steps of) the first epoch's plan.

    padding: share of the targets' tokens; largest: bytes of the largest batch there can be; wanted: bytes that keep
    everybody busy, a largest batch for each target and drafter and two more; lost: share of the drafters' time that
    they wait for each other where steps end, by predicted cost; unmixed: G is too small for every bucket.
    """

    steps: int
    batches_a_step: float
    padding: float
    largest: int
    wanted: int
    limit: int
    lost: float
    unmixed: bool

    def warnings(self) -> Iterator[str]:
        """What the user should know before it starts."""
        if self.unmixed:
            yield (
                "--batch-samples is smaller than the number of buckets: a step can't hold every bucket, though over "
                "steps each gets its share; use a larger --batch-samples or fewer --buckets"
            )
        if self.limit < self.wanted:
            yield (
                f"the in-flight window holds {self.limit / 2**20:,.1f} MiB; {self.wanted / 2**20:,.1f} MiB would keep "
                "every target and drafter busy: raise --inflight-gib or lower --microbatch-tokens"
            )


def measure(
    plan: StepPlan, lengths: Int64s, buckets: Int64s, *, row_bytes: int, limit: int, parties: int, drafters: int
) -> LiveFigures:
    """Figures of a plan over samples with these lengths and buckets (int64 `[M]`, as the plan's rows).

    row_bytes: of one token over the captured layers; limit: bytes of the window; parties: targets and drafters of one
    process, and two; drafters: of all processes. Raises ConfigError for a window smaller than the largest batch.
    """
    longest = int(lengths.max())
    tokens = max(longest, min(plan.context_budget, plan.batch_samples * longest))
    if tokens * row_bytes > limit:
        raise ConfigError(
            f"the in-flight window holds {limit / 2**20:,.3f} MiB, but the largest batch can need "
            f"{tokens * row_bytes / 2**20:,.3f} MiB ({tokens:,} tokens of {row_bytes:,} bytes): raise --inflight-gib, "
            "or lower --microbatch-tokens or --max-length"
        )
    every = max(1, len(plan) // _STEPS_MEASURED)
    batches = padded = real = busy = whole = 0
    measured = range(0, len(plan), every)
    for index in measured:
        step = plan.step(index)
        costs = [sum(step.microbatches[place].cost for place in share) for share in assign(step, drafters)]
        busy, whole = busy + sum(costs), whole + drafters * max(costs)
        batches += len(step.microbatches)
        padded += sum(batch.padded_tokens for batch in step.microbatches)
        real += int(lengths[plan.samples(index)].sum())
    return LiveFigures(
        steps=len(plan),
        batches_a_step=batches / len(measured),
        padding=1 - real / padded,
        largest=tokens * row_bytes,
        wanted=parties * tokens * row_bytes,
        limit=limit,
        lost=1 - busy / whole,
        unmixed=plan.batch_samples < len(np.unique(buckets)),
    )


@dataclass(frozen=True, kw_only=True)
class LivePlan:
    """What `live` would do. extraction: the part of it that is captured and stored at the start."""

    extraction: ExtractionPlan
    figures: LiveFigures
    training: int
    held_out: int
    total_steps: int
    places: int
    devices: str
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One JSON document: the plan in numbers."""
        return {
            **self.extraction.as_json(),
            "training_samples": self.training,
            "held_out_samples": self.held_out,
            "total_steps": self.total_steps,
            "places": self.places,
            "devices": self.devices,
            "live": asdict(self.figures),
            "warnings": list(self.warnings),
        }


def places(config: LiveConfig) -> int:
    """Batches of one bucket in flight, at most."""
    targets = len(config.target_device) * config.targets
    return config.hs_queue_depth or default_places(targets, len(config.drafter_device) * config.drafters)


def default_places(targets: int, drafters: int) -> int:
    """Twice as many as are at work at once, and two.

    With one for each, targets can't run ahead while drafters wait for each other at a step's end, and drafters can't
    catch up (see `benchmarks/live_sim.py`).
    """
    return 2 * (targets + drafters) + 2


def parties(config: LiveConfig) -> int:
    """Targets and drafters of this process, and two batches to hand over: what keeps everybody busy."""
    return len(config.target_device) * config.targets + len(config.drafter_device) * config.drafters + 2


def kept_rows(config: LiveConfig, samples: Samples) -> Int64s:
    """Samples that are captured at the start: what is held out; with `--tee`, all that isn't trained on."""
    training, held_out = split(config, samples)
    return held_out if config.tee is None else np.setdiff1d(np.arange(len(samples)), training)


def split(config: LiveConfig, samples: Samples) -> tuple[Int64s, Int64s]:
    """Training rows and held-out rows: as `dflash train` would split the finished store."""
    every = np.ones(len(samples), np.bool_)
    return split_validation(
        samples.ids, every, seed=config.seed, fraction=config.val_fraction, at_most=config.val_samples
    )


def check_folders(config: LiveConfig) -> None:
    """StoreError where `--out` or `--tee` hold something else, or are one folder."""
    out = config.out
    with disk_errors(out, "look at"):
        if out.exists() and not out.is_dir():
            raise StoreError(f"--out: {out} is a file; give a new folder, or that of a run to go on with")
        names = (
            {path.name for path in out.iterdir() if not path.name.startswith(TEMP_PREFIX)} if out.exists() else set()
        )
    if names - {HELD_OUT, LOCK} and not {LIVE_SETTINGS, TRAIN_SETTINGS} & names:
        raise StoreError(f"--out: {out} holds something else; give a new folder, or that of a run to go on with")
    if config.tee is not None and config.tee.resolve() == out.resolve():
        raise StoreError(f"--tee: {config.tee} is the run's own folder; give the store another one")
    check_out(config.store, "--out" if config.tee is None else "--tee")


def plan_live(config: LiveConfig, telemetry: ExtractTelemetry | None = None, ranks: int = 1) -> LivePlan:
    """What `live` would do with this config, or refuse. Nothing is left on disk."""
    telemetry = telemetry or ExtractTelemetry()
    config = own_devices(config)
    check_folders(config)
    with StopSignals(), tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        resolved = resolve(config.extract(), telemetry)
        limit = window_limit(resolved, config)
        samples, edges, prepared = prepare_samples(resolved, Path(folder), telemetry)
        whole = make_plan(resolved, samples, edges, prepared=prepared)
        training, held_out = split(config, samples)
        if not len(training):
            raise DataError("no sample is left to train on: give more data, or hold out less")
        lengths, buckets = samples.lengths[training].astype(np.int64), samples.buckets[training].astype(np.int64)
        plan = _first_epoch(config, whole, training)
        figures = measure(
            plan, lengths, buckets,
            row_bytes=whole.manifest.row_bytes, limit=limit, parties=parties(config),
            drafters=ranks * len(config.drafter_device) * config.drafters,
        )  # fmt: skip
        total = math.ceil(len(training) / config.batch_samples) * config.epochs
        return LivePlan(
            extraction=plan_rows(whole, kept_rows(config, samples)),
            figures=figures,
            training=len(training),
            held_out=len(held_out),
            total_steps=min(total, config.max_steps or total),
            places=places(config),
            devices=devices_of(config),
            warnings=(*whole.warnings, *figures.warnings()),
        )


def _first_epoch(config: LiveConfig, whole: ExtractionPlan, training: Int64s) -> StepPlan:
    manifest, train = whole.manifest, config.train()
    if config.init_from is not None:
        settings = read_drafter_config(config.init_from)
    else:
        settings, _ = drafter_config(
            whole.resolved.target.config,
            target_layer_ids=config.aux_layers or manifest.layer_ids,
            mask_token_id=manifest.mask_token_id or 0,
            block_size=config.block_size,
            num_layers=config.draft_layers,
            vocab_size=manifest.target.vocab_size,
        )
    devices = {resolve_device(name, "--drafter-device") for name in config.drafter_device}
    context, blocks = (
        min(each) for each in zip(*(microbatch_budgets(train, settings, device) for device in devices), strict=True)
    )
    return epoch_plans(
        whole.samples,
        training,
        anchors_of=anchor_counts(whole.samples),
        anchors=config.anchors,
        block_size=settings.block_size,
        seed=config.seed,
        batch_samples=config.batch_samples,
        context_budget=context,
        block_budget=blocks,
    )(0)
