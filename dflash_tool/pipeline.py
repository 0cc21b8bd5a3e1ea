"""The only file that wires parts together.

`extract` = plan -> prefetcher -> target queue -> target loop -> bucketed queue -> shard writer, all under one in-flight
window. The caller's thread is the shard writer; every other part has a thread of its own.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dflash_tool.errors import DflashError, Interrupted, StoreError
from dflash_tool.extractor import BatchPrefetcher, HiddenStates, StateQueue, TargetForwardLoop, TargetQueue, iter_queue
from dflash_tool.planning import ExtractionPlan, make_plan, prepare_samples
from dflash_tool.resolving import Resolved, resolve
from dflash_tool.resuming import OpenStore, check_left, check_out, open_store
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.manifest import Manifest, RunSummary
from dflash_tool.signals import StopSignals
from dflash_tool.store.checksums import write_checksums
from dflash_tool.store.files import disk_errors, replace_file
from dflash_tool.store.layout import HEAD, MANIFEST
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import settings_fingerprint, write_manifest
from dflash_tool.store.recover import read_index
from dflash_tool.store.writer import ShardWriter
from dflash_tool.target import TargetModel
from dflash_tool.telemetry import ExtractTelemetry, Gauges
from dflash_tool.window import InflightWindow

_CONFIG = "extract.yaml"


@dataclass(frozen=True, kw_only=True)
class ExtractResult:
    """A finished store. `held_samples` were there before this run; `run` is None when there was nothing to do."""

    store: Path
    manifest: Manifest
    held_samples: int
    run: RunSummary | None
    plan: ExtractionPlan
    removed: tuple[str, ...]

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
            "run": self.run.model_dump() if self.run else None,
        }


def plan(config: ExtractConfig, telemetry: ExtractTelemetry | None = None) -> ExtractionPlan:
    """What `extract` would do with this config. Nothing is left on disk."""
    telemetry = telemetry or ExtractTelemetry()
    check_out(config.out)
    resolved = resolve(config, telemetry)
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        samples, edges, stats = prepare_samples(resolved, Path(folder), telemetry)
        return make_plan(resolved, samples, edges, prepared=stats)


def extract(config: ExtractConfig, telemetry: ExtractTelemetry | None = None) -> ExtractResult:
    """Make, or go on with, the store `config.out`. Raises a `DflashError` for all that a user can mend.

    At any moment the store is good as far as it is committed: after a kill the same call goes on.
    """
    telemetry = telemetry or ExtractTelemetry()
    check_out(config.out)
    resolved = resolve(config, telemetry)
    made = not config.out.exists()
    with disk_errors(config.out, "create"):
        config.out.mkdir(parents=True, exist_ok=True)
    try:
        with RunLock(config.out) as lock, StopSignals() as stop:
            return _extract(resolved, telemetry, lock, stop)
    except BaseException:
        if made and not (config.out / MANIFEST).exists():  # refused before it began: leave no trace
            shutil.rmtree(config.out, ignore_errors=True)
        raise


def _extract(resolved: Resolved, telemetry: ExtractTelemetry, lock: RunLock, stop: StopSignals) -> ExtractResult:
    store = open_store(resolved, telemetry)
    manifest, run = store.finished, None
    if manifest is None:
        check_left(store.plan, store.held)
        _save_settings(store.plan)
        target = _load_target(resolved, telemetry)
        manifest, run = _run(store, target, telemetry, lock, stop)
    return ExtractResult(
        store=resolved.config.out,
        manifest=manifest,
        held_samples=int(store.held.sum()),
        run=run,
        plan=store.plan,
        removed=store.removed,
    )


def _save_settings(job: ExtractionPlan) -> None:
    root = job.resolved.config.out
    write_manifest(root, job.manifest)
    resolved = job.resolved.config.model_dump(mode="json", exclude_none=True)
    resolved |= {name: job.resolved.settings[name] for name in ("max_length", "batch_tokens", "mask_token_id")}
    resolved |= {"layers": list(job.manifest.layer_ids), "dtype": job.manifest.target.dtype}
    with disk_errors(root, "write"):
        replace_file(root / _CONFIG, yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).encode())


def _load_target(resolved: Resolved, telemetry: ExtractTelemetry) -> TargetModel:
    """Load the target; write `head/` and the checksums where they are missing."""
    telemetry.stage("loading the target")
    root = resolved.config.out
    temporary = root / f".tmp-{HEAD}"
    write_head = not (root / HEAD).is_dir()
    with disk_errors(root / HEAD, "write"):
        target = TargetModel.load(
            resolved.target,
            layers=resolved.settings["layer_ids"],
            device=resolved.device,
            dtype=resolved.dtype,
            store_dtype=resolved.config.store_dtype,
            head=temporary if write_head else None,
            trust_remote_code=resolved.config.trust_remote_code,
        )
        if write_head:
            resolved.tokenizer.save_pretrained(temporary)
            temporary.rename(root / HEAD)
    write_checksums(root)
    return target


def _run(
    store: OpenStore,
    target: TargetModel,
    telemetry: ExtractTelemetry,
    lock: RunLock,
    stop: StopSignals,
) -> tuple[Manifest, RunSummary]:
    """Carry the plan out; the caller's thread writes. Returns the completed manifest."""
    job, held = store.plan, store.held
    config, manifest, samples = job.resolved.config, job.manifest, job.samples
    lengths = samples.lengths.astype(np.int64)
    window = InflightWindow(job.resolved.inflight_limit, job.resolved.places)
    targets: TargetQueue = TargetQueue()
    states: StateQueue = StateQueue()

    def abort(error: BaseException) -> None:
        for part in (window, targets, states):
            part.abort(error)

    prefetcher = BatchPrefetcher(
        batches=[batch for batch in job.batches if not held[batch.rows].all()],
        held=held,
        lengths=lengths,
        tokens=samples.tokens,
        row_bytes=manifest.row_bytes,
        window=window,
        out=targets,
    )
    loop = TargetForwardLoop(target=target, source=targets, out=states)

    def run_target() -> None:
        loop.run()
        states.close()

    writer = ShardWriter(
        config.out,
        layer_ids=manifest.layers,
        hidden_size=manifest.target.hidden_size,
        store_dtype=manifest.store_dtype,
        shard_bytes=int(config.shard_mib * 2**20),
        commit_every=config.commit_every,
        settings=settings_fingerprint(manifest),
    )
    threads = [
        _start("prefetcher", prefetcher.run, abort),
        _start("target", run_target, abort),
    ]
    telemetry.start(
        samples=len(samples),
        tokens=manifest.tokens,
        held_samples=int(held.sum()),
        held_tokens=int(lengths[held].sum()),
        gauges=Gauges(
            inflight=lambda: window.in_flight,
            peak=lambda: window.peak,
            queued=states.bucket_sizes,
            waited=lambda: {
                "target for batches": targets.counters().get_seconds,
                "writer for states": states.counters().get_seconds,
                "dispatch for memory": window.waits().bytes,
                "dispatch for places": window.waits().places,
            },
            limit=job.resolved.inflight_limit,
        ),
    )
    quarantined: list[int] = []
    try:
        with stop.forward_to(abort):
            for item in iter_queue(states):
                _write(writer, job, item.bucket, item.payload)
                window.release(item.bucket, item.nbytes)
                quarantined += item.payload.quarantined.tolist()
                _check_quarantine(job, quarantined)
                _count(telemetry, writer, item.payload)
                lock.check()
                writer.commit_due()
        writer.commit_all()
    except BaseException as error:
        abort(error)
        for thread in threads:
            thread.join()
        with suppress(StoreError):
            writer.commit_all()
        writer.abandon()
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
    return _complete(job, quarantined, telemetry)


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


def _check_quarantine(job: ExtractionPlan, quarantined: list[int]) -> None:
    allowed = job.resolved.config.max_bad * len(job.samples)
    if len(quarantined) > allowed:
        named = ", ".join(job.samples.source(row) for row in quarantined[:3])
        raise DflashError(
            f"{len(quarantined)} samples have NaN or Inf hidden states, more than --max-bad allows "
            f"({job.resolved.config.max_bad:g} of {len(job.samples)}); the first: {named}. Try another --dtype or "
            "--store-dtype (float16 overflows at 65504), or look at those samples"
        )


def _complete(job: ExtractionPlan, quarantined: list[int], telemetry: ExtractTelemetry) -> tuple[Manifest, RunSummary]:
    """Check that every sample is committed or quarantined, and say so in the manifest."""
    root, seen = job.resolved.config.out, telemetry.snapshot()
    committed = len(read_index(root, job.manifest.layers))
    if committed + len(quarantined) != len(job.samples):
        raise StoreError(
            f"{root}: {committed} samples are committed and {len(quarantined)} quarantined, {len(job.samples)} were "
            "planned: the store was changed while this ran; run the same command again"
        )
    run = RunSummary(
        seconds=seen.seconds,
        samples=seen.samples,
        real_tokens=seen.real_tokens,
        padded_tokens=seen.padded_tokens,
        peak_inflight_bytes=seen.peak_inflight,
        inflight_limit_bytes=seen.inflight_limit,
        waited=seen.waited,
    )
    manifest = job.manifest.model_copy(
        update={
            "complete": True,
            "run": run,
            "quarantined": tuple(sorted(job.samples.sample_id(row).hex() for row in quarantined)),
        }
    )
    write_manifest(root, manifest)
    return manifest, run
