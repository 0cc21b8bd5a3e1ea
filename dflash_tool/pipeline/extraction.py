"""`extract` from end to end.

`extract` = plan -> prefetcher -> target queue -> target loops -> bucketed queue -> shard writer, all under one
in-flight window. The caller's thread is the shard writer; every other part has a thread of its own.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_tool.errors import Interrupted, StoreError
from dflash_tool.extractor import BatchPrefetcher, HiddenStates, StateQueue, TargetForwardLoop, TargetQueue, iter_queue
from dflash_tool.lifecycle import (
    OpenStore,
    begin,
    check_out,
    check_quarantine,
    complete,
    join_store,
    open_store,
    sum_up,
)
from dflash_tool.planning import ExtractionPlan, make_plan, prepare_samples
from dflash_tool.ranks import Ranks
from dflash_tool.resolving import Resolved, resolve
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.manifest import Manifest, RunSummary
from dflash_tool.signals import StopSignals
from dflash_tool.store.checksums import write_checksums
from dflash_tool.store.disk import check_room
from dflash_tool.store.files import disk_errors, fsync_path, make_folder
from dflash_tool.store.layout import HEAD, MANIFEST
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import check_same_settings, read_manifest, settings_fingerprint
from dflash_tool.store.recover import read_index
from dflash_tool.store.writer import ShardWriter
from dflash_tool.target import TargetModel
from dflash_tool.telemetry import ExtractTelemetry, Gauges
from dflash_tool.window import InflightWindow


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
            made.warnings.append(f"{held:,} of {len(samples):,} samples are in {config.out} already")
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
            return _extract(resolved, ranks, telemetry, _Guards(check_lock=lambda: None, stop=stop))
        made = make_folder(config.out)
        with RunLock(config.out) as lock:
            try:
                return _extract(resolved, ranks, telemetry, _Guards(check_lock=lock.check, stop=stop))
            except BaseException:
                if made and not (config.out / MANIFEST).exists():  # refused before it began: leave no trace
                    shutil.rmtree(config.out, ignore_errors=True)
                raise


@dataclass(frozen=True, kw_only=True)
class _Guards:
    """What may end a run from outside: the store's lock (held by rank 0) and signals."""

    check_lock: Callable[[], None]
    stop: StopSignals


def _extract(resolved: Resolved, ranks: Ranks, telemetry: ExtractTelemetry, guards: _Guards) -> ExtractResult:
    def open_and_begin() -> OpenStore:
        store = open_store(resolved, telemetry)
        if not store.finished:
            begin(store)
        return store

    store = ranks.first(open_and_begin) or join_store(resolved)
    manifest, run, notes = store.earlier, None, list(store.plan.warnings)
    if manifest is None or not store.finished:
        targets = _load_targets(resolved, telemetry, write_head=ranks.rank == 0)
        ranks.barrier()  # from here on shards are committed: everybody has seen what was held
        summary, quarantined = _run(store, targets, ranks, telemetry, guards)
        manifest, run = _finish(store.plan, store.earlier, ranks, summary, quarantined)
        notes += _notes(targets)
    return ExtractResult(
        store=resolved.config.out,
        manifest=manifest,
        held_samples=int(store.held.sum()),
        run=run,
        plan=store.plan,
        removed=store.removed,
        notes=tuple(notes),
    )


def _notes(targets: dict[str, TargetModel]) -> Iterator[str]:
    for name, target in targets.items():
        if target.halvings:
            yield f"{name} ran out of memory and cut a batch in two {target.halvings} times: lower --batch-tokens"
    if any(target.masked for target in targets.values()):
        yield "this target's attention looks ahead: a drafter trained on its states would see what it is to predict"


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


def _load_targets(resolved: Resolved, telemetry: ExtractTelemetry, *, write_head: bool) -> dict[str, TargetModel]:
    """A target for each device, replicas sharing their weights; by name. Writes `head/` where it is missing."""
    telemetry.stage("loading the target")
    on_cpu = sum(device.type == "cpu" for device in resolved.devices)
    if on_cpu > 1:  # they compute at the same time and share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // on_cpu))
    root = resolved.config.out
    temporary = root / f".tmp-{HEAD}" if write_head and not (root / HEAD / "head.safetensors").is_file() else None
    targets: dict[str, TargetModel] = {}
    loaded: dict[str, TargetModel] = {}
    for number, device in enumerate(resolved.devices):
        targets[f"target {number} on {device}"] = loaded[str(device)] = (
            loaded[str(device)].replica()
            if str(device) in loaded
            else TargetModel.load(
                resolved.target,
                layers=resolved.layers,
                device=device,
                dtype=resolved.dtype,
                store_dtype=resolved.config.store_dtype,
                head=temporary if not targets else None,
                trust_remote_code=resolved.config.trust_remote_code,
            )
        )
    if write_head:
        with disk_errors(root / HEAD, "write"):
            if temporary is not None:
                resolved.tokenizer.save_pretrained(temporary)
                for file in (*temporary.iterdir(), temporary):
                    fsync_path(file)
                shutil.rmtree(root / HEAD, ignore_errors=True)
                temporary.rename(root / HEAD)
                fsync_path(root)
        write_checksums(root, *([root / HEAD] if temporary else []))
    return targets


def _run(
    store: OpenStore, targets: dict[str, TargetModel], ranks: Ranks, telemetry: ExtractTelemetry, guards: _Guards
) -> tuple[RunSummary, list[int]]:
    """Carry this rank's share of the plan out; the caller's thread writes. Returns what was done and quarantined."""
    job, held = store.plan, store.held
    manifest, samples = job.manifest, job.samples
    lengths = samples.lengths.astype(np.int64)
    window = InflightWindow(job.resolved.inflight_limit, job.resolved.places)
    # Few wait for a target: what one rank has drawn, no other can take.
    batches: TargetQueue = TargetQueue(max_items_per_bucket=len(targets) + 1)
    states: StateQueue = StateQueue()

    def abort(error: BaseException) -> None:
        for part in (window, batches, states):
            part.abort(error)

    prefetcher = BatchPrefetcher(
        batches=ranks.share([batch for batch in job.batches if not held[batch.rows].all()]),
        held=held,
        lengths=lengths,
        tokens=samples.tokens,
        row_bytes=manifest.row_bytes,
        window=window,
        out=batches,
    )
    loops = {name: TargetForwardLoop(target=target, source=batches, out=states) for name, target in targets.items()}
    writer = _make_writer(job, ranks)
    telemetry.start(
        samples=len(samples),
        tokens=manifest.tokens,
        held_samples=int(held.sum()),
        held_tokens=int(lengths[held].sum()),
        gauges=Gauges(
            inflight=lambda: window.in_flight,
            peak=lambda: window.peak,
            queued=states.bucket_sizes,
            targets=lambda: {name: loop.counters.tokens for name, loop in loops.items()},
            waited=lambda: {
                **{f"{name} for batches": loop.counters.waiting for name, loop in loops.items()},
                "writer for targets": states.counters().get_seconds,
                "dispatch for memory": window.waits().bytes,
                "dispatch for places": window.waits().places,
            },
            limit=job.resolved.inflight_limit,
        ),
    )
    threads = [_start("prefetcher", prefetcher.run, abort), *_start_targets(loops, states, abort)]
    quarantined: list[int] = []
    try:
        with guards.stop.forward_to(abort):
            for item in iter_queue(states):
                _write(writer, job, item.bucket, item.payload)
                window.release(item.bucket, item.nbytes)
                quarantined += item.payload.quarantined.tolist()
                check_quarantine(job, quarantined)
                _count(telemetry, writer, item.payload)
                guards.check_lock()
                writer.commit_due()
            writer.commit_all()
    except BaseException as error:
        abort(error)
        for thread in threads:
            thread.join()
        _keep_what_is_good(writer)
        if isinstance(error, Interrupted):
            kept = int(held.sum()) + writer.counters.samples_committed
            raise Interrupted(
                f"{error} {kept:,} of {len(samples):,} samples are committed; run the same command to go on.",
                error.exit_code - 128,
            ) from None
        raise
    for thread in threads:
        thread.join()
    telemetry.stop()
    seen = telemetry.snapshot()
    summary = RunSummary(
        seconds=seen.seconds,
        samples=seen.samples,
        real_tokens=seen.real_tokens,
        padded_tokens=seen.padded_tokens,
        peak_inflight_bytes=seen.peak_inflight,
        inflight_limit_bytes=seen.inflight_limit,
        ranks=1,
        targets=seen.targets,
        waited=seen.waited,
    )
    return summary, quarantined


def _make_writer(job: ExtractionPlan, ranks: Ranks) -> ShardWriter:
    config, manifest = job.resolved.config, job.manifest
    return ShardWriter(
        config.out,
        layer_ids=manifest.layers,
        hidden_size=manifest.target.hidden_size,
        store_dtype=manifest.store_dtype,
        rank=ranks.rank,
        shard_bytes=int(config.shard_mib * 2**20),
        commit_every=config.commit_every,
        settings=settings_fingerprint(manifest),
    )


def _start_targets(
    loops: dict[str, TargetForwardLoop], states: StateQueue, abort: Callable[[BaseException], None]
) -> list[threading.Thread]:
    """A thread for each target loop; the last one to end closes the queue."""
    left, lock = len(loops), threading.Lock()

    def run(loop: TargetForwardLoop) -> None:
        nonlocal left
        loop.run()
        with lock:
            left -= 1
            last = left == 0
        if last:
            states.close()

    return [_start(name, partial(run, loop), abort) for name, loop in loops.items()]


def _start(name: str, run: Callable[[], object], abort: Callable[[BaseException], None]) -> threading.Thread:
    """A thread whose failure stops everybody with the first error."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            abort(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def _write(writer: ShardWriter, job: ExtractionPlan, bucket: int, states: HiddenStates) -> None:
    ids = [job.samples.sample_id(int(row)) for row in states.samples]
    writer.append(bucket, ids, states.lengths.tolist(), states.states)


def _count(telemetry: ExtractTelemetry, writer: ShardWriter, states: HiddenStates) -> None:
    telemetry.add(
        samples=len(states.samples) + len(states.quarantined),
        real_tokens=states.real_tokens,
        padded_tokens=states.padded_tokens,
    )
    telemetry.set(bytes_written=writer.counters.bytes_written, shards=writer.counters.shards_committed)


def _keep_what_is_good(writer: ShardWriter) -> None:
    """After a failure: commit what the open shards hold, as far as the disk lets us."""
    with suppress(StoreError):
        writer.commit_all()
    writer.abandon()
