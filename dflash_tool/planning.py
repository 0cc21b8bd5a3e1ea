"""From prepared samples to a plan: what `extract` will do, as a value that it carries out and `--dry-run` prints.

1. `prepare_samples`   data -> samples.arrow in a folder (the store, or a temporary one), bucket edges
2. `make_plan`         samples -> batches, bytes in flight, bytes on disk
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import (
    Batch,
    check_edges,
    choose_edges,
    epoch_order,
    extraction_batches,
    padding_share,
)
from dflash_tool.errors import ConfigError
from dflash_tool.prompts import Preparation, PrepareOptions, PrepareStats
from dflash_tool.resolving import Resolved
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.store.disk import predict_bytes
from dflash_tool.store.samples import Samples, SamplesWriter
from dflash_tool.target import head_bytes
from dflash_tool.telemetry import ExtractTelemetry

_PACKAGES = ("dflash-tool", "torch", "transformers", "tokenizers", "zarr", "pyarrow", "numpy")


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """Bytes that a finished store takes, by part."""

    shards: int
    samples: int
    index: int
    head: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.shards + self.samples + self.index + self.head


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """One bucket: lengths in (lower, upper], its samples, their tokens, its batches."""

    bucket: int
    lower: int
    upper: int
    samples: int
    tokens: int
    batches: int


@dataclass(frozen=True, kw_only=True)
class ExtractionPlan:
    """What `extract` will do. `padding` is the share of the target's tokens; bytes are exact to 1 %."""

    resolved: Resolved
    manifest: Manifest
    samples: Samples
    batches: list[Batch]
    buckets: list[BucketPlan]
    padding: float
    disk: DiskNeed
    largest_batch_bytes: int
    peak_inflight_bytes: int
    warnings: list[str]
    prepared: PrepareStats | None

    def as_json(self) -> dict[str, Any]:
        """One JSON document: the plan in numbers."""
        manifest = self.manifest
        return {
            "samples": manifest.samples,
            "tokens": manifest.tokens,
            "supervised_tokens": manifest.supervised_tokens,
            "skipped": manifest.skipped,
            "prepared": manifest.prepared,
            "layers": list(manifest.layer_ids),
            "dtype": manifest.target.dtype,
            "store_dtype": manifest.store_dtype,
            "mask_token_id": manifest.mask_token_id,
            "buckets": [vars(bucket) for bucket in self.buckets],
            "batches": len(self.batches),
            "padded_tokens": manifest.planned_padded_tokens,
            "padding": self.padding,
            "disk_bytes": vars(self.disk) | {"total": self.disk.total},
            "largest_batch_bytes": self.largest_batch_bytes,
            "peak_inflight_bytes": self.peak_inflight_bytes,
            "inflight_limit_bytes": self.resolved.inflight_limit,
            "warnings": self.warnings,
        }


def prepare_samples(
    resolved: Resolved, root: Path, telemetry: ExtractTelemetry
) -> tuple[Samples, tuple[int, ...], PrepareStats]:
    """Read the data, write `root/samples.arrow`, and choose the bucket edges over all lengths."""
    config, settings = resolved.config, resolved.settings
    options = PrepareOptions(
        vocab_size=resolved.target.vocab_size,
        max_length=settings["max_length"],
        overlength=config.overlength,
        turns=config.turns,
        template_args=config.template_args,
        mask_token_id=settings["mask_token_id"],
        strict=config.strict,
    )
    stream = Preparation(
        config.data,
        resolved.tokenizer,
        options,
        on_progress=lambda done, total, _samples: telemetry.stage("tokenising", done, total),
    )
    with SamplesWriter(root) as writer:
        for batch in stream:
            writer.write(batch)
        telemetry.stage("choosing buckets")
        edges = bucket_edges(config, writer.lengths().astype(np.int64))
        return writer.finish(edges), edges, stream.stats


def bucket_edges(config: ExtractConfig, lengths: NDArray[np.int64]) -> tuple[int, ...]:
    """The edges that `--buckets` gives for these lengths. ConfigError when the last one is too low."""
    if isinstance(config.buckets, int):
        return choose_edges(lengths, config.buckets)
    edges = check_edges(config.buckets)
    if lengths.max() > edges[-1]:
        raise ConfigError(
            f"--buckets: the last edge is {edges[-1]} tokens, but the longest sample has {lengths.max()}; "
            f"raise the edge, or set --max-length {edges[-1]}"
        )
    return edges


def make_plan(
    resolved: Resolved,
    samples: Samples,
    edges: tuple[int, ...],
    *,
    prepared: PrepareStats | None = None,
    earlier: Manifest | None = None,
) -> ExtractionPlan:
    """Lay out the batches and count what they need.

    `prepared` says how the samples came about; on a resume `earlier` is the manifest that knew it.
    Raises ConfigError when the window can't hold the largest batch.
    """
    lengths, buckets = samples.lengths.astype(np.int64), samples.buckets.astype(np.int64)
    order = epoch_order(samples.ids, buckets, seed=resolved.config.seed, epoch=0)
    batches = extraction_batches(order, lengths, buckets, batch_tokens=resolved.settings["batch_tokens"])
    known = {"skipped": prepared.skipped, "prepared": _counts(prepared)} if prepared else {}
    if earlier is not None and prepared is None:
        known = {"skipped": earlier.skipped, "prepared": earlier.prepared}
    manifest = Manifest(
        **resolved.settings,
        **known,
        created=earlier.created if earlier else datetime.now(UTC).isoformat(timespec="seconds"),
        edges=edges,
        samples=len(samples),
        tokens=int(lengths.sum()),
        supervised_tokens=int(samples.supervised.astype(np.int64).sum()),
        planned_padded_tokens=sum(batch.padded_tokens for batch in batches),
        versions={name: version(name) for name in _PACKAGES},
    )
    largest = max(batch.padded_tokens for batch in batches) * manifest.row_bytes
    _check_window(resolved, largest)
    by_bucket = _bucket_plans(edges, lengths, buckets, batches)
    return ExtractionPlan(
        resolved=resolved,
        manifest=manifest,
        samples=samples,
        batches=batches,
        buckets=by_bucket,
        padding=padding_share(batches, lengths),
        disk=_disk_need(resolved, manifest, samples, by_bucket),
        largest_batch_bytes=largest,
        peak_inflight_bytes=_peak_bound(resolved, batches, manifest.row_bytes),
        warnings=_warnings(resolved, largest),
        prepared=prepared,
    )


def plan_rows(plan: ExtractionPlan, rows: NDArray[np.int64]) -> ExtractionPlan:
    """The part of a plan that captures only these rows of samples.arrow; the manifest stays that of all samples."""
    resolved, manifest, samples = plan.resolved, plan.manifest, plan.samples
    lengths, buckets = samples.lengths.astype(np.int64), samples.buckets.astype(np.int64)
    order = epoch_order(samples.ids[rows], buckets[rows], seed=resolved.config.seed, epoch=0)
    batches = extraction_batches(rows[order], lengths, buckets, batch_tokens=resolved.settings["batch_tokens"])
    by_bucket = _bucket_plans(manifest.edges, lengths[rows], buckets[rows], batches)
    return replace(
        plan,
        batches=batches,
        buckets=by_bucket,
        padding=padding_share(batches, lengths),
        disk=_disk_need(resolved, manifest, samples, by_bucket),
        largest_batch_bytes=max((batch.padded_tokens for batch in batches), default=0) * manifest.row_bytes,
        peak_inflight_bytes=_peak_bound(resolved, batches, manifest.row_bytes),
    )


def _counts(prepared: PrepareStats) -> dict[str, int]:
    names = ("rows", "duplicates", "truncated", "split_rows", "split_parts")
    counts = {name: getattr(prepared, name) for name in names}
    return counts | {"unsupervised_turns": sum(prepared.unsupervised.values())}


def _size(nbytes: int) -> str:
    """GiB, or KiB where that would be nothing."""
    return f"{nbytes / 2**30:.3f} GiB" if nbytes >= 2**24 else f"{nbytes / 2**10:,.1f} KiB"


def _check_window(resolved: Resolved, largest: int) -> None:
    if largest > resolved.inflight_limit:
        raise ConfigError(
            f"the in-flight window holds {_size(resolved.inflight_limit)}, but the largest batch needs "
            f"{_size(largest)}: raise --inflight-gib, or lower --batch-tokens or --max-length"
        )


def _warnings(resolved: Resolved, largest: int) -> list[str]:
    warnings = []
    wanted = resolved.parties * largest
    if resolved.inflight_limit < wanted:
        warnings.append(
            f"the in-flight window holds {_size(resolved.inflight_limit)}, less than {resolved.parties} of the largest "
            f"batches ({_size(wanted)}): targets may have to wait"
        )
    if resolved.settings["mask_token_id"] is None:
        warnings.append(
            "the tokenizer has no mask token and every embedding row is used: training will need --mask-token-id"
        )
    return warnings


def _bucket_plans(
    edges: tuple[int, ...], lengths: NDArray[np.int64], buckets: NDArray[np.int64], batches: list[Batch]
) -> list[BucketPlan]:
    count = len(edges)
    samples = np.bincount(buckets, minlength=count)
    tokens = np.bincount(buckets, weights=lengths, minlength=count)
    cut = np.bincount([batch.bucket for batch in batches], minlength=count)
    return [
        BucketPlan(
            bucket=bucket,
            lower=edges[bucket - 1] if bucket else 0,
            upper=edge,
            samples=int(samples[bucket]),
            tokens=int(tokens[bucket]),
            batches=int(cut[bucket]),
        )
        for bucket, edge in enumerate(edges)
    ]


def _disk_need(resolved: Resolved, manifest: Manifest, samples: Samples, buckets: list[BucketPlan]) -> DiskNeed:
    """Sizes of a store whose shards are cut by size alone (commits by age add at most 63 rows a shard and layer)."""
    shards = predict_bytes(
        [bucket.tokens for bucket in buckets],
        [bucket.samples for bucket in buckets],
        layers=manifest.layers,
        hidden_size=manifest.target.hidden_size,
        store_dtype=manifest.store_dtype,
        shard_bytes=int(resolved.config.shard_mib * 2**20),
    )
    return DiskNeed(
        shards=shards.shards_bytes,
        samples=samples.path.stat().st_size,
        index=shards.index_bytes,
        head=head_bytes(resolved.target),
    )


def _peak_bound(resolved: Resolved, batches: list[Batch], row_bytes: int) -> int:
    """The most that can be in flight: the largest batches of each bucket on all its places, within the window."""
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for batch in batches:
        sizes[batch.bucket].append(batch.padded_tokens)
    tokens = sum(sum(sorted(values)[-resolved.places :]) for values in sizes.values())
    return min(resolved.inflight_limit, tokens * row_bytes)
