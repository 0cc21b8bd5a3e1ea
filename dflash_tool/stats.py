"""What is in a store, in numbers: read from the manifest, samples.arrow and the indexes; no row is read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.schemas.config import LayerId
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.store.files import bytes_of
from dflash_tool.store.layout import HEAD, MANIFEST, index_path, shard_path
from dflash_tool.store.lock import run_at_work
from dflash_tool.store.manifest import read_manifest
from dflash_tool.store.recover import read_index
from dflash_tool.store.samples import Samples

HISTOGRAM_BINS = 24
PERCENTILES = (0, 10, 50, 90, 99, 100)


@dataclass(frozen=True, kw_only=True)
class BucketStats:
    """One bucket's committed samples: lengths in (lower, upper] tokens.

    padded_share: share of the rows of a store that padded each sample to the bucket's edge and that would be padding.
    """

    bucket: int
    lower: int
    upper: int
    samples: int
    planned: int
    tokens: int
    token_share: float
    padded_share: float
    shards: int


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """A store at a glance. Bytes under `shards/` are `shard_bytes`; `overhead_bytes` of them are no real rows.

    at_work: the run that is writing to it, in words. histogram: (first length, last length, committed samples) of
    logarithmic bins. shard_sizes: bytes of each shard. layer_bytes: of all shards, by layer.
    """

    store: Path
    manifest: Manifest
    at_work: str | None
    samples: int
    tokens: int
    supervised_tokens: int
    shard_sizes: list[int]
    layer_bytes: dict[LayerId, int]
    overhead_bytes: int
    other_bytes: int
    buckets: list[BucketStats]
    histogram: list[tuple[int, int, int]]
    percentiles: dict[int, int]

    @property
    def shards(self) -> int:
        """How many are committed."""
        return len(self.shard_sizes)

    @property
    def shard_bytes(self) -> int:
        """All bytes under `shards/`."""
        return sum(self.shard_sizes)

    def as_json(self) -> dict[str, Any]:
        """One JSON document."""
        manifest = self.manifest
        return {
            "store": str(self.store),
            "complete": manifest.complete,
            "at_work": self.at_work,
            "samples": self.samples,
            "planned_samples": manifest.samples,
            "tokens": self.tokens,
            "planned_tokens": manifest.tokens,
            "supervised_tokens": self.supervised_tokens,
            "quarantined": list(manifest.quarantined),
            "skipped": manifest.skipped,
            "prepared": manifest.prepared,
            "target": manifest.target.model_dump(),
            "layers": list(manifest.layers),
            "store_dtype": manifest.store_dtype,
            "mask_token_id": manifest.mask_token_id,
            "max_length": manifest.max_length,
            "shards": self.shards,
            "shard_bytes": self.shard_bytes,
            "overhead_bytes": self.overhead_bytes,
            "other_bytes": self.other_bytes,
            "target_padding": target_padding(manifest),
            "buckets": [vars(bucket) for bucket in self.buckets],
            "length_histogram": [list(row) for row in self.histogram],
            "length_percentiles": self.percentiles,
            "run": manifest.run.model_dump() if manifest.run else None,
        }


def target_padding(manifest: Manifest) -> float:
    """Share of the tokens that the whole plan makes the target compute that is padding."""
    return 1 - manifest.tokens / manifest.planned_padded_tokens


def store_stats(root: Path) -> StoreStats:
    """Count what is committed. Raises StoreError for what is no store (yet), or one too damaged to count."""
    at_work = run_at_work(root)
    if at_work and not (root / MANIFEST).exists():
        raise StoreError(f"{root}: {at_work}, is still preparing it: nothing is committed yet; look again later")
    manifest = read_manifest(root)
    samples = Samples.open(root)
    index = read_index(root, manifest.layers)
    held = index.find(samples.sample_ids) >= 0
    lengths = samples.lengths[held].astype(np.int64)
    tokens = int(lengths.sum())
    sizes = [_shard_bytes(shard_path(root, name), manifest.layers) for name in index.shards]
    layers = dict(zip((None, *manifest.layers), map(sum, zip(*sizes, strict=True)), strict=True)) if sizes else {}
    shard_buckets = np.array([name.bucket for name in index.shards], np.int64)
    return StoreStats(
        store=root,
        manifest=manifest,
        at_work=at_work,
        samples=len(index),
        tokens=tokens,
        supervised_tokens=int(samples.supervised[held].astype(np.int64).sum()),
        shard_sizes=list(map(sum, sizes)),
        layer_bytes={layer: layers.get(layer, 0) for layer in manifest.layers},
        overhead_bytes=sum(map(sum, sizes)) - tokens * manifest.row_bytes,
        other_bytes=bytes_of(index_path(root, name) for name in index.shards)
        + _tree_bytes(root / HEAD)
        + bytes_of([samples.path]),
        buckets=_by_bucket(manifest, samples, held, shard_buckets),
        histogram=_histogram(lengths),
        percentiles=dict(zip(PERCENTILES, map(int, np.percentile(lengths, PERCENTILES)), strict=True))
        if len(lengths)
        else {},
    )


def _by_bucket(
    manifest: Manifest, samples: Samples, held: NDArray[np.bool_], shard_buckets: NDArray[np.int64]
) -> list[BucketStats]:
    count = len(manifest.edges)
    buckets = samples.buckets
    planned = np.bincount(buckets, minlength=count)
    here = np.bincount(buckets[held], minlength=count)
    tokens = np.bincount(buckets[held], weights=samples.lengths[held], minlength=count).astype(np.int64)
    shards = np.bincount(shard_buckets, minlength=count)
    every = max(1, int(tokens.sum()))
    return [
        BucketStats(
            bucket=bucket,
            lower=manifest.edges[bucket - 1] if bucket else 0,
            upper=edge,
            samples=int(here[bucket]),
            planned=int(planned[bucket]),
            tokens=int(tokens[bucket]),
            token_share=int(tokens[bucket]) / every,
            padded_share=1 - int(tokens[bucket]) / (int(here[bucket]) * edge) if here[bucket] else 0.0,
            shards=int(shards[bucket]),
        )
        for bucket, edge in enumerate(manifest.edges)
    ]


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Bins that grow by a constant factor from the shortest to the longest length, empty ones included."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.round(np.geomspace(low, high + 1, HISTOGRAM_BINS + 1)).astype(np.int64))
    edges[-1] = high + 1
    counts, _ = np.histogram(lengths, edges)
    return [
        (int(first), int(after) - 1, int(count))
        for first, after, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]


def _shard_bytes(shard: Path, layers: Sequence[LayerId]) -> list[int]:
    """Bytes of a shard's own documents, then of each layer; the files are looked up by name: a listing takes longer."""
    hidden = f"{shard}/hidden"
    own = (f"{shard}/zarr.json", f"{hidden}/zarr.json")
    files = [own, *((f"{hidden}/{layer}/zarr.json", f"{hidden}/{layer}/c/0/0") for layer in layers)]
    return [sum(map(_file_bytes, some)) for some in files]


def _file_bytes(file: str) -> int:
    try:
        return os.stat(file).st_size  # noqa: PTH116 - a Path each would double the time
    except OSError:
        return 0  # of a run at work: just removed or renamed


def _tree_bytes(folder: Path) -> int:
    return bytes_of(path for path in folder.rglob("*") if path.is_file())
