"""One rank's share of an extraction, from the plan to committed shards.

prefetcher -> target queue -> target loops -> bucketed queue -> shard writer, all under one in-flight window. The
caller's thread is the shard writer; every other part has a thread of its own.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from dflash_tool.errors import Interrupted, StoreError
from dflash_tool.extractor import (
    BatchPrefetcher,
    HiddenStates,
    StateQueue,
    TargetForwardLoop,
    TargetQueue,
    capture_rows,
    iter_queue,
)
from dflash_tool.lifecycle import (
    OpenStore,
    check_quarantine,
)
from dflash_tool.pipeline.targets import start_targets, start_thread
from dflash_tool.planning import ExtractionPlan
from dflash_tool.ranks import Ranks
from dflash_tool.schemas.manifest import RunSummary
from dflash_tool.signals import StopSignals
from dflash_tool.store.manifest import settings_fingerprint
from dflash_tool.store.writer import ShardWriter
from dflash_tool.target import TargetModel
from dflash_tool.telemetry import ExtractTelemetry, Gauges
from dflash_tool.window import InflightWindow
from dflash_tool.wording import counted, verb


@dataclass(frozen=True, kw_only=True)
class Guards:
    """What may end a run from outside: the store's lock (held by rank 0) and signals."""

    check_lock: Callable[[], None]
    stop: StopSignals


def run_extraction(
    store: OpenStore, targets: dict[str, TargetModel], ranks: Ranks, telemetry: ExtractTelemetry, guards: Guards
) -> tuple[RunSummary, list[int]]:
    """Carry out this rank's share of the plan's batches; the caller's thread writes.

    Returns what was done, and the quarantined samples (rows of samples.arrow).
    """
    job, held = store.plan, store.held
    manifest, samples = job.manifest, job.samples
    lengths = samples.lengths.astype(np.int64)
    rows = np.concatenate([batch.rows for batch in job.batches])  # all samples, or those that a live run keeps
    held_rows = rows[held[rows]]
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
    loops = {
        name: TargetForwardLoop(capture=partial(capture_rows, target), source=batches, out=states)
        for name, target in targets.items()
    }
    writer = make_writer(job, ranks)
    telemetry.start(
        samples=len(rows),
        tokens=int(lengths[rows].sum()),
        held_samples=len(held_rows),
        held_tokens=int(lengths[held_rows].sum()),
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
    threads = [start_thread("prefetcher", prefetcher.run, abort), *start_targets(loops, states, abort)]
    quarantined: list[int] = []
    try:
        with guards.stop.forward_to(abort):
            for item in iter_queue(states):
                _write(writer, job, item.bucket, item.payload)
                quarantined += item.payload.quarantined.tolist()
                _count(telemetry, writer, item.payload)
                credit = item.bucket, item.nbytes
                del item  # its memory, before it is counted as free
                window.release(*credit)
                check_quarantine(job, quarantined)
                guards.check_lock()
                writer.commit_due()
            writer.commit_all()
    except BaseException as error:
        abort(error)
        for thread in threads:
            thread.join()
        _keep_what_is_good(writer)
        if isinstance(error, Interrupted):
            kept = len(held_rows) + writer.counters.samples_committed
            raise Interrupted(
                f"{error} {kept:,} of {counted(len(rows), 'sample')} {verb(kept, 'is', 'are')} committed; "
                "run the same command to go on.",
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


def make_writer(job: ExtractionPlan, ranks: Ranks) -> ShardWriter:
    """This rank's writer of the plan's store."""
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


def _write(writer: ShardWriter, job: ExtractionPlan, bucket: int, states: HiddenStates) -> None:
    ids = [job.samples.sample_id(int(row)) for row in states.samples]
    writer.quarantine(bucket, [job.samples.sample_id(int(row)) for row in states.quarantined])
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
