"""How long `dflash stats` takes on a store of a million samples, and how much memory: a synthetic store, real indexes.

    python benchmarks/stats.py [--samples 1000000] [--shards 1000] [--keep FOLDER]

`samples.arrow`, the indexes, the manifest and the shards' documents are what `extract` would have written; the rows
themselves are files of the right size without a block on the disk. The command runs three times in a process of its
own; the best times count, and the worst memory. Goals, without --html: below 3 s and 500 MB.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from store_kit import make_manifest

from dflash_tool.buckets import choose_edges
from dflash_tool.schemas.arrow import SAMPLE_ID_BYTES
from dflash_tool.store.index import encode_index, shard_attributes
from dflash_tool.store.layout import (
    ShardName,
    array_dir,
    array_document,
    array_file,
    array_file_bytes,
    group_document,
    index_path,
    shard_path,
)
from dflash_tool.store.manifest import settings_fingerprint, write_manifest
from dflash_tool.store.samples import RAW_SAMPLES_SCHEMA, Samples, SamplesWriter

LAYERS, WIDTH = (1, 9, 17, 25, 33), 4096
LONGEST, MEAN = 3072, 250
ROWS_A_BATCH = 20_000
GOAL_SECONDS, GOAL_BYTES = 3.0, 500e6


def main() -> None:
    """Make the store, time the command, print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=1_000_000)
    options.add_argument("--shards", type=int, default=1_000)
    options.add_argument("--keep", type=Path, help="make the store here, or take the one that is here")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflash-stats-") as folder:
        root = chosen.keep or Path(folder) / "store"
        if not root.exists():  # in another process: a child's peak counts from that of its parent
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                pool.submit(make, root, chosen.samples, chosen.shards).result()
        print(f"{'command':<26}{'wall':>9}{'CPU':>9}{'peak memory':>14}")
        page = ["stats", "--html", f"{folder}/page.html"]
        for words in (["stats"], ["stats", "--json"], page):
            runs = [timed(root, words) for _ in range(3)]
            wall, cpu = (min(run[number] for run in runs) for number in (0, 1))
            memory = max(run[2] for run in runs)
            missed = words != page and (wall >= GOAL_SECONDS or memory >= GOAL_BYTES)
            print(
                f"{' '.join(['dflash', *words[:2]]):<26}{wall:>7.2f} s{cpu:>7.2f} s{memory / 1e6:>11.0f} MB"
                + "   missed: 3 s, 500 MB" * missed
            )


def timed(root: Path, words: list[str]) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak resident bytes of one run of the command."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "dflash_tool", words[0], str(root), *words[1:]]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(run.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def make(root: Path, count: int, shards: int) -> None:
    """A complete store of `count` samples in about `shards` shards."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEAN), 0.9, count), 4, LONGEST).astype(np.int32)
    edges = choose_edges(lengths.astype(np.int64), 6)
    samples = write_samples(root, lengths, edges, rng)
    manifest = make_manifest(samples, edges, LAYERS, WIDTH, "bfloat16").model_copy(update={"complete": True})
    (root / "head").mkdir()
    (root / "index").mkdir()
    settings = settings_fingerprint(manifest)
    for bucket in range(len(edges)):
        rows = np.flatnonzero(samples.buckets == bucket)
        for number, part in enumerate(np.array_split(rows, max(1, round(shards * len(rows) / count)))):
            write_shard(root, ShardName(bucket, 0, number), samples, part, rng, settings)
    write_manifest(root, manifest)


def write_samples(root: Path, lengths: NDArray[np.int32], edges: tuple[int, ...], rng: np.random.Generator) -> Samples:
    """`samples.arrow`, all tokens 0, random ids."""
    with SamplesWriter(root) as writer:
        for first in range(0, len(lengths), ROWS_A_BATCH):
            part = lengths[first : first + ROWS_A_BATCH]
            offsets = pa.array(np.concatenate([[0], np.cumsum(part)]).astype(np.int32))
            ids = pa.py_buffer(rng.bytes(len(part) * SAMPLE_ID_BYTES))
            columns = [
                pa.FixedSizeBinaryArray.from_buffers(pa.binary(SAMPLE_ID_BYTES), len(part), [None, ids]),
                pa.array(part),
                pa.array(part // 2),
                pa.ListArray.from_arrays(offsets, pa.array(np.zeros(part.sum(), np.int32))),
                pa.ListArray.from_arrays(offsets, pa.array(np.zeros(part.sum(), np.uint8))),
                pa.array([f"chats.jsonl:{first + row + 1}" for row in range(len(part))]),
            ]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=RAW_SAMPLES_SCHEMA))
        return writer.finish(edges)


def write_shard(
    root: Path, name: ShardName, samples: Samples, rows: NDArray[np.int64], rng: np.random.Generator, settings: str
) -> None:
    """An index, and a shard whose arrays are holes of the right size."""
    lengths = samples.lengths[rows]
    hashes = rng.integers(0, 1 << 63, (len(rows), len(LAYERS))).astype(np.uint64)
    index = encode_index(LAYERS, [samples.sample_id(row) for row in rows], lengths, hashes)
    index_path(root, name).write_bytes(index)
    shard, tokens = shard_path(root, name), int(lengths.sum())
    for layer in LAYERS:
        file = array_file(shard, layer)
        file.parent.mkdir(parents=True)
        with file.open("wb") as rows_file:
            rows_file.truncate(array_file_bytes(tokens, WIDTH * 2))
        (array_dir(shard, layer) / "zarr.json").write_bytes(array_document(tokens, WIDTH, "bfloat16"))
    (shard / "zarr.json").write_bytes(group_document(shard_attributes(index, settings)))
    (shard / "hidden" / "zarr.json").write_bytes(group_document({}))


if __name__ == "__main__":
    main()
