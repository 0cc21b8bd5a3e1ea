"""`extract` from end to end: look at the store, prepare, plan, carry out, complete."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_tool.lifecycle import (
    OpenStore,
    begin,
    check_out,
    complete,
    join_store,
    open_store,
    sum_up,
)
from dflash_tool.pipeline.extraction_run import Guards, run_extraction
from dflash_tool.pipeline.targets import load_targets, target_notes
from dflash_tool.planning import ExtractionPlan, make_plan, prepare_samples
from dflash_tool.ranks import Ranks
from dflash_tool.resolving import Resolved, resolve
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.manifest import Manifest, RunSummary
from dflash_tool.signals import StopSignals
from dflash_tool.store.disk import check_room
from dflash_tool.store.files import make_folder
from dflash_tool.store.layout import MANIFEST
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import check_same_settings, read_manifest
from dflash_tool.store.recover import read_index
from dflash_tool.telemetry import ExtractTelemetry
from dflash_tool.wording import counted, verb


@dataclass(frozen=True, kw_only=True)
class ExtractResult:
    """A finished store. `held_samples` were there before this run; `run` is None when there was nothing to do.

    removed: leftovers cleaned up; notes: what the user should know of the plan and the run.
    """

    store: Path
    manifest: Manifest
    held_samples: int
    run: RunSummary | None
    plan: ExtractionPlan
    removed: tuple[str, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One JSON document: where the store is and what the run did."""
        return {
            "store": str(self.store),
            "samples": self.manifest.samples,
            "tokens": self.manifest.tokens,
            "held_samples": self.held_samples,
            "quarantined": list(self.manifest.quarantined),
            "skipped": self.manifest.skipped,
            "prepared": self.manifest.prepared,
            "removed_leftovers": list(self.removed),
            "notes": list(self.notes),
            "run": self.run.model_dump() if self.run else None,
        }


def plan(config: ExtractConfig, telemetry: ExtractTelemetry | None = None) -> ExtractionPlan:
    """What `extract` would do with this config, or refuse. Nothing is left on disk."""
    telemetry = telemetry or ExtractTelemetry()
    check_out(config.out)
    with StopSignals(), tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        resolved = resolve(config, telemetry)
        samples, edges, stats = prepare_samples(resolved, Path(folder), telemetry)
        made = make_plan(resolved, samples, edges, prepared=stats)
        earlier = read_manifest(config.out) if (config.out / MANIFEST).exists() else None
        held = len(read_index(config.out, earlier.layers)) if earlier else 0
        if earlier and (held or earlier.complete):
            check_same_settings(config.out, earlier, made.manifest)
            made.warnings.append(
                f"{held:,} of {counted(len(samples), 'sample')} {verb(held, 'is', 'are')} in {config.out} already"
            )
        if not held:
            check_room(config.out, made.disk.total)
        return made


def extract(config: ExtractConfig, telemetry: ExtractTelemetry | None = None) -> ExtractResult:
    """Make, or go on with, the store `config.out`. Raises a `DflashError` for all that a user can mend.

    At any moment the store is good as far as it is committed: after a kill the same call goes on.
    """
    telemetry = telemetry or ExtractTelemetry()
    ranks = Ranks.join()
    check_out(config.out)
    resolved = resolve(config, telemetry)
    with StopSignals() as stop:
        if ranks.rank > 0:
            return _extract(resolved, ranks, telemetry, Guards(check_lock=lambda: None, stop=stop))
        made = make_folder(config.out)
        with RunLock(config.out) as lock:
            try:
                return _extract(resolved, ranks, telemetry, Guards(check_lock=lock.check, stop=stop))
            except BaseException:
                if made and not (config.out / MANIFEST).exists():  # refused before it began: leave no trace
                    shutil.rmtree(config.out, ignore_errors=True)
                raise


def _extract(resolved: Resolved, ranks: Ranks, telemetry: ExtractTelemetry, guards: Guards) -> ExtractResult:
    def open_and_begin() -> OpenStore:
        store = open_store(resolved, telemetry)
        if not store.finished:
            begin(store)
        return store

    store = ranks.first(open_and_begin) or join_store(resolved)
    manifest, run, notes = store.earlier, None, list(store.plan.warnings)
    if manifest is None or not store.finished:
        targets = load_targets(resolved, telemetry, write_head=ranks.rank == 0)
        ranks.barrier()  # from here on shards are committed: everybody has seen what was held
        summary, quarantined = run_extraction(store, targets, ranks, telemetry, guards)
        manifest, run = _finish(store.plan, store.earlier, ranks, summary, quarantined)
        notes += target_notes(targets)
    return ExtractResult(
        store=resolved.config.out,
        manifest=manifest,
        held_samples=int(store.held.sum()),
        run=run,
        plan=store.plan,
        removed=store.removed,
        notes=tuple(notes),
    )


def _finish(
    job: ExtractionPlan, earlier: Manifest | None, ranks: Ranks, summary: RunSummary, quarantined: list[int]
) -> tuple[Manifest, RunSummary]:
    """Rank 0 adds up what the ranks report and completes the store; the others return what they did themselves."""
    reports = ranks.gather({"run": summary.model_dump(), "quarantined": quarantined})
    if not reports:
        return job.manifest, summary
    total = sum_up([RunSummary(**report["run"]) for report in reports])
    if not total.samples and earlier is not None and earlier.run is not None:
        total = earlier.run  # nothing but the head or the manifest was made again
    manifest = complete(job, total, [row for report in reports for row in report["quarantined"]])
    ranks.finish()
    return manifest, total
