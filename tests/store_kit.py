"""Small random stores, whole and true to the format: for tests and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_tool.schemas.arrow import SAMPLE_ID_BYTES, content_hash, make_sample_id
from dflash_tool.schemas.config import LayerId, StoreDtype
from dflash_tool.schemas.manifest import Manifest, TargetInfo
from dflash_tool.store.checksums import write_checksums
from dflash_tool.store.layout import HEAD, NUMPY_DTYPE
from dflash_tool.store.manifest import settings_fingerprint, write_manifest
from dflash_tool.store.samples import RAW_SAMPLES_SCHEMA, Samples, SamplesWriter
from dflash_tool.store.writer import ShardWriter


@dataclass(frozen=True)
class MadeStore:
    """A store on disk and what is in it: `rows[i][layer]` is [T, H], i being the row in samples.arrow."""

    root: Path
    manifest: Manifest
    samples: Samples
    rows: list[dict[LayerId, NDArray[Any]]]


def random_rows(rng: np.random.Generator, length: int, width: int, dtype: StoreDtype) -> NDArray[Any]:
    """[length, width] finite random numbers as stored; of bfloat16 the bits."""
    values = rng.standard_normal((length, width), np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMPY_DTYPE[dtype])


def write_samples(
    root: Path,
    lengths: Sequence[int],
    edges: Sequence[int],
    seed: int = 0,
    *,
    vocab: int = 1 << 30,
    answer: int | None = None,
) -> Samples:
    """A `samples.arrow` of random tokens below `vocab`, in batches of 7 rows.

    Supervised are the last `answer` tokens of each sample, or, without that, random ones.
    """
    rng = np.random.default_rng(seed)
    with SamplesWriter(root) as writer:
        for first in range(0, len(lengths), 7):
            part = lengths[first : first + 7]
            tokens = [rng.integers(0, vocab, length, np.int32) for length in part]
            masks = [rng.integers(0, 2, length, np.uint8) for length in part]
            if answer is not None:
                masks = [(np.arange(length) >= length - answer).astype(np.uint8) for length in part]
            ids = [make_sample_id(content_hash(t, m), 0) for t, m in zip(tokens, masks, strict=True)]
            columns = [
                pa.array(ids, pa.binary(SAMPLE_ID_BYTES)),
                pa.array(part, pa.int32()),
                pa.array([int(mask.sum()) for mask in masks], pa.int32()),
                pa.array(tokens, pa.list_(pa.int32())),
                pa.array(masks, pa.list_(pa.uint8())),
                pa.array([f"random.jsonl:{first + i + 1}" for i in range(len(part))]),
            ]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=RAW_SAMPLES_SCHEMA))
        return writer.finish(edges)


def make_manifest(
    samples: Samples, edges: Sequence[int], layers: Sequence[int], hidden_size: int, store_dtype: StoreDtype
) -> Manifest:
    """A manifest that fits the samples."""
    target = TargetInfo(
        name="random",
        model_type="random",
        num_layers=max(layers) + 2,
        hidden_size=hidden_size,
        vocab_size=1 << 30,
        config_fingerprint="0",
        weights_fingerprint="0",
        dtype="float32",
    )
    return Manifest(
        created="2026-01-01T00:00:00+00:00",
        target=target,
        tokenizer="0",
        template="0",
        template_args={},
        turns="each",
        data=(),
        layer_ids=tuple(layers),
        store_dtype=store_dtype,
        max_length=max(edges),
        overlength="skip",
        seed=0,
        edges=tuple(edges),
        batch_tokens=2048,
        mask_token_id=None,
        samples=len(samples),
        tokens=int(samples.lengths.sum()),
        supervised_tokens=int(samples.supervised.sum()),
        planned_padded_tokens=int(samples.lengths.sum()),
        skipped={},
        versions={},
    )


def make_store(
    root: Path,
    lengths: Sequence[int],
    *,
    edges: Sequence[int] = (32, 128, 4096),
    layers: Sequence[int] = (0, 2),
    hidden_size: int = 8,
    store_dtype: StoreDtype = "bfloat16",
    shard_bytes: int = 1 << 30,
    seed: int = 0,
    complete: bool = True,
    **tokens: Any,
) -> MadeStore:
    """Write a whole store of random rows, a sample an append; `complete=False` leaves out the last sample.

    tokens: what else `write_samples` takes.
    """
    samples = write_samples(root, lengths, edges, seed, **tokens)
    manifest = make_manifest(samples, edges, layers, hidden_size, store_dtype)
    (root / HEAD).mkdir()
    (root / HEAD / "head.safetensors").write_bytes(b"the head of a random target")
    (root / HEAD / "config.json").write_text('{"model_type": "random"}')
    write_checksums(root)
    write_manifest(root, manifest)
    rng = np.random.default_rng(seed)
    rows: list[dict[LayerId, NDArray[Any]]] = [
        {layer: random_rows(rng, length, hidden_size, store_dtype) for layer in layers} for length in lengths
    ]
    writer = make_writer(root, manifest, shard_bytes=shard_bytes)
    for row in range(len(lengths) - (not complete)):
        writer.append(int(samples.buckets[row]), [samples.sample_id(row)], [lengths[row]], rows[row])
    writer.commit_all()
    if complete:
        manifest = manifest.model_copy(update={"complete": True})
        write_manifest(root, manifest)
    return MadeStore(root, manifest, samples, rows)


def make_writer(root: Path, manifest: Manifest, **options: Any) -> ShardWriter:
    """A writer of the manifest's layers, width and dtype."""
    return ShardWriter(
        root,
        layer_ids=manifest.layers,
        hidden_size=manifest.target.hidden_size,
        store_dtype=manifest.store_dtype,
        settings=settings_fingerprint(manifest),
        **options,
    )
