"""`live` from end to end: targets feed drafters directly, and nothing is stored but the held-out samples.

The run's folder holds a small store (prepared samples, the target's head, the hidden states of held-out samples), so
everything that trains from a store works here as it is; only the training batches come from a `LiveSource`. Under
torchrun every rank is a cell of targets and drafters: hidden states stay in it, gradients alone are summed up.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from dflash_tool.lifecycle import OpenStore, begin, check_quarantine, join_store, open_store
from dflash_tool.pipeline.extraction_run import Guards, make_writer, run_extraction
from dflash_tool.pipeline.flow import Flow, bottleneck, join, look
from dflash_tool.pipeline.live_devices import devices_of, own_devices, window_limit
from dflash_tool.pipeline.live_plan import check_folders, kept_rows, measure, parties, places
from dflash_tool.pipeline.live_source import LiveFeed
from dflash_tool.pipeline.targets import load_targets, target_notes
from dflash_tool.pipeline.tee import Tee
from dflash_tool.pipeline.tee_end import WholeTee
from dflash_tool.pipeline.train_run import TrainRun, open_run
from dflash_tool.pipeline.training import TrainResult, run_training
from dflash_tool.planning import ExtractionPlan, plan_rows
from dflash_tool.ranks import Ranks
from dflash_tool.resolving import Resolved, resolve
from dflash_tool.schemas.live import LiveConfig
from dflash_tool.schemas.run import LIVE_SETTINGS
from dflash_tool.signals import StopSignals
from dflash_tool.store.files import disk_errors, make_folder, replace_file
from dflash_tool.store.lock import RunLock
from dflash_tool.target import TargetModel, resolve_device
from dflash_tool.telemetry import ExtractTelemetry, TrainTelemetry
from dflash_tool.trainer.board import check_board

Int64s = NDArray[np.int64]


@dataclass
class LiveTelemetry:
    """What a live run says of itself: preparing, then training, and what flows between the two sides."""

    extract: ExtractTelemetry = field(default_factory=ExtractTelemetry)
    train: TrainTelemetry = field(default_factory=TrainTelemetry)
    feed: LiveFeed | None = None
    devices: str = ""

    def flow(self) -> Flow | None:
        """What flows now, once the targets feed the drafters."""
        source = self.feed.source if self.feed else None
        return look(source) if source else None


@dataclass(frozen=True, kw_only=True)
class LiveResult:
    """A finished live run. flow: None where nothing was left to do; bottleneck: who waited for whom, in words.

    quarantined: samples with NaN or Inf states that training left out, as `file:line`.
    """

    trained: TrainResult
    store: Path
    flow: Flow | None
    bottleneck: str
    quarantined: tuple[str, ...]
    devices: str

    def as_json(self) -> dict[str, Any]:
        """One JSON document."""
        return {
            **self.trained.as_json(),
            "store": str(self.store),
            "flow": self.flow.as_json() if self.flow else None,
            "bottleneck": self.bottleneck,
            "quarantined": list(self.quarantined),
            "devices": self.devices,
        }


class Quarantine:
    """Rows of samples.arrow whose states hold NaN or Inf, each once. Any drafter's thread may add."""

    def __init__(self, plan: ExtractionPlan) -> None:
        self._plan = plan
        self.rows: dict[int, None] = {}

    def add(self, rows: Int64s) -> None:
        """DflashError once there are more than `--max-bad` allows."""
        self.rows.update(dict.fromkeys(rows.tolist()))
        check_quarantine(self._plan, list(self.rows))


def live(config: LiveConfig, telemetry: LiveTelemetry | None = None) -> LiveResult:
    """Train a drafter beside its target, or go on with the run `config.out`.

    Raises a `DflashError` for all that a user can mend.
    """
    telemetry = telemetry or LiveTelemetry()
    ranks = Ranks.join()
    asked, config = config, own_devices(config)
    telemetry.devices = devices_of(config)
    if config.tensorboard:
        check_board()
    if ranks.rank == 0:
        check_folders(config)
    threads = torch.get_num_threads()
    resolved = resolve(config.extract(), telemetry.extract)
    with StopSignals() as stop, ranks.alive(), ExitStack() as stack:
        guards = Guards(check_lock=lambda: None, stop=stop)
        if ranks.rank == 0:
            stack.enter_context(_own(config.out, config.out / LIVE_SETTINGS))
            lock = stack.enter_context(_own(config.store, config.out / LIVE_SETTINGS))
            guards = replace(guards, check_lock=lock.check)
        return _live(asked, config, resolved, ranks, telemetry, guards, threads)


def _live(
    asked: LiveConfig,
    config: LiveConfig,
    resolved: Resolved,
    ranks: Ranks,
    telemetry: LiveTelemetry,
    guards: Guards,
    threads: int,
) -> LiveResult:
    """Open the store, load the targets, open the run, capture what is held out, train. config: with our devices."""
    limit = window_limit(resolved, config)

    def open_first() -> tuple[OpenStore, dict[str, TargetModel]]:
        store = open_store(resolved, telemetry.extract)
        if not store.finished:
            begin(replace(store, plan=plan_rows(store.plan, kept_rows(config, store.plan.samples))))
        return store, load_targets(resolved, telemetry.extract, write_head=True)

    opened = ranks.first(open_first)
    store, targets = opened or (join_store(resolved), load_targets(resolved, telemetry.extract, write_head=False))
    plan, quarantine = store.plan, Quarantine(store.plan)
    feed = LiveFeed(
        targets=targets,
        samples=plan.samples,
        layers=plan.manifest.layers,
        drafters=tuple(
            resolve_device(name, "--drafter-device") for name in config.drafter_device for _ in range(config.drafters)
        ),
        row_bytes=plan.manifest.row_bytes,
        limit_bytes=limit,
        places=places(config),
        steps_ahead=config.max_steps_ahead,
        on_quarantine=quarantine.add,
    )
    run = open_run(config.train(), telemetry.train, ranks, source_of=feed)
    share_threads(threads, resolved, run)
    figures = measure(
        run.plan_of(0),
        plan.samples.lengths[run.train_rows].astype(np.int64),
        plan.samples.buckets[run.train_rows].astype(np.int64),
        row_bytes=feed.row_bytes,
        limit=feed.limit_bytes,
        parties=parties(config),
        drafters=run.drafters,
    )
    ranks.first(lambda: _capture(asked, store, targets, telemetry.extract, guards))
    run.store.refresh()
    (whole,) = run.store.stores
    held_out = run.val_rows
    whole.quarantined[held_out[~whole.committed[held_out]]] = True  # captured just now, and not there
    quarantine.rows.update(dict.fromkeys(np.flatnonzero(whole.quarantined).tolist()))
    run.notes += [*plan.warnings, *figures.warnings(), *target_notes(targets)]
    telemetry.feed = feed
    run.more = lambda: flow.as_json() if (flow := telemetry.flow()) else {}
    whole_tee = None
    with ExitStack() as stack:
        if config.tee is not None and not store.finished:
            feed.tee = stack.enter_context(Tee(make_writer(plan, ranks), plan.samples, whole.committed))
            whole_tee = WholeTee(store, feed.tee, run, quarantine.rows, telemetry.flow)
            run.before_save, run.after_step = feed.tee.commit, whole_tee.look
        trained = run_training(run, guards.stop)
    flow, left_out = _joined(ranks, telemetry.flow(), list(quarantine.rows))
    if whole_tee is not None:  # every rank has committed what passed it
        note = ranks.first(lambda: whole_tee.finish(targets, telemetry.extract, guards))
        trained = replace(trained, notes=(*trained.notes, *([note] if note else [])))
    return LiveResult(
        trained=trained,
        store=config.store,
        flow=flow,
        bottleneck=bottleneck(trained.spent, flow) if flow else "",
        quarantined=tuple(plan.samples.source(row) for row in left_out),
        devices=telemetry.devices,
    )


def _joined(ranks: Ranks, flow: Flow | None, quarantined: list[int]) -> tuple[Flow | None, list[int]]:
    """What flowed and what was left out, over all ranks; they meet here."""
    reports = ranks.everyone("flow", {"flow": asdict(flow) if flow else None, "quarantined": quarantined})
    flows = [Flow.of(report["flow"]) for report in reports if report["flow"]]
    rows = sorted({row for report in reports for row in report["quarantined"]})
    return join(flows) if flows else None, rows


def _capture(
    config: LiveConfig,
    store: OpenStore,
    targets: dict[str, TargetModel],
    telemetry: ExtractTelemetry,
    guards: Guards,
) -> None:
    """Begin the run in its folder, and put what is held out into the store, unless it is there. Rank 0 alone."""
    settings = config.model_dump(mode="json", exclude_none=True)
    with disk_errors(config.out / LIVE_SETTINGS, "write"):
        replace_file(config.out / LIVE_SETTINGS, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
    job = plan_rows(store.plan, kept_rows(config, store.plan.samples))
    if any(not store.held[batch.rows].all() for batch in job.batches):
        _, quarantined = run_extraction(replace(store, plan=job), targets, Ranks(), telemetry, guards)
        del quarantined  # validation passes over what is not in the store


@contextmanager
def _own(folder: Path, begun: Path) -> Iterator[RunLock]:
    """Make and lock a folder. If the run is refused before it has begun, a new one is removed again."""
    made = make_folder(folder)
    with RunLock(folder) as lock:
        try:
            yield lock
        except BaseException:
            if made and not begun.exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise


def share_threads(threads: int, resolved: Resolved, run: TrainRun) -> None:
    """Targets and drafters on the CPU compute at the same time: they share its threads evenly."""
    parties = sum(device.type == "cpu" for device in (*resolved.devices, *run.loop.group.devices))
    if parties:
        torch.set_num_threads(max(1, threads // parties))
