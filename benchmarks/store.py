"""Is the store as fast as the disk? Writes and sample reads against raw files, and reads against zarr-python.

    python benchmarks/store.py [--mib 512] [--pairs 7] [--folder .] [--width H]

Each pair runs the two sides one after the other, in alternating order, on the same bytes; printed is the median
over pairs of (the other's seconds / ours): 1 is as fast, more is faster. Raw files are written and read the same
way: one file a layer, the same buffers, `write`, `fsync` at the end, one `preadv` a sample and layer. Cold reads
come after `posix_fadvise(DONTNEED)` on every file. Goals: at least 0.9 of raw, warm and cold, and at least
4 times zarr-python, warm (cold, both wait for the disk).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from store_kit import MadeStore, make_manifest, make_writer, random_rows, write_samples

from dflash_tool.store.layout import array_file
from dflash_tool.store.reader import HiddenStore

LAYERS = (1, 9, 17, 25, 33)
BATCH_SAMPLES = 16


class Bench:
    """The same samples as a store and as raw files, under one folder."""

    def __init__(self, folder: Path, mib: int, width: int) -> None:
        rng = np.random.default_rng(0)
        tokens = (mib << 20) // (width * 2 * len(LAYERS))
        lengths: list[int] = []
        while sum(lengths) < tokens:
            lengths.append(int(np.clip(rng.lognormal(5.5, 0.8), 16, 2048)))
        self.folder, self.width, self.lengths = folder, width, lengths
        self.bytes = sum(lengths) * width * 2 * len(LAYERS)
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        samples = write_samples(folder, lengths, (2048,))
        self.ids = [samples.sample_id(row) for row in range(len(samples))]
        self.manifest = make_manifest(samples, (2048,), LAYERS, width, "bfloat16")
        block = random_rows(rng, BATCH_SAMPLES * 2048, width, "bfloat16")
        self.block = {layer: np.roll(block, layer) for layer in LAYERS}
        self.store, self.raw = folder / "store", folder / "raw"
        self.order = rng.permutation(len(lengths)).tolist()
        self.buffers = {layer: np.empty((2048, width), np.uint16) for layer in LAYERS}

    def batches(self) -> list[tuple[list[bytes], list[int], dict[Any, Any]]]:
        """(ids, lengths, rows) of each batch; rows are slices of one block, so making them costs nothing."""
        made = []
        for first in range(0, len(self.lengths), BATCH_SAMPLES):
            part = slice(first, first + BATCH_SAMPLES)
            rows = {layer: self.block[layer][: sum(self.lengths[part])] for layer in LAYERS}
            made.append((self.ids[part], self.lengths[part], rows))
        return made

    def write_store(self) -> None:
        """All batches through `ShardWriter`, as one committed shard."""
        writer = make_writer(self.store, self.manifest, shard_bytes=1 << 62)
        for ids, lengths, rows in self.batches():
            writer.append(0, ids, lengths, rows)
        writer.commit_all()

    def write_raw(self) -> None:
        """The same rows with nothing around them."""
        self.raw.mkdir()
        files = [os.open(self.raw / str(layer), os.O_WRONLY | os.O_CREAT) for layer in LAYERS]
        for _, _, rows in self.batches():
            for layer, fd in zip(LAYERS, files, strict=True):
                data = rows[layer].data.cast("B")
                while data.nbytes:
                    data = data[os.write(fd, data) :]
        for fd in files:
            os.fsync(fd)
            os.close(fd)

    def read_store(self, store: HiddenStore, *, verify: bool = False) -> None:
        """Every sample in random order, into buffers that are used again."""
        for row in self.order:
            out = {layer: buffer[: self.lengths[row]] for layer, buffer in self.buffers.items()}
            store.read(row, out=out, verify=verify)

    def read_raw(self, files: dict[int, int]) -> None:
        """The same ranges of the raw files."""
        for row in self.order:
            offset = int(self.starts[row]) * self.width * 2
            for layer, fd in files.items():
                view = self.buffers[layer][: self.lengths[row]].data.cast("B")
                done = 0
                while done < view.nbytes:
                    done += os.preadv(fd, [view[done:]], offset + done)

    def read_zarr(self, arrays: dict[int, Any]) -> None:
        """The same samples through zarr-python, from the shards that we wrote."""
        for row in self.order:
            for layer, array in arrays.items():
                rows = slice(int(self.starts[row]), int(self.starts[row + 1]))
                self.buffers[layer][: self.lengths[row]] = array[rows]


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Put a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def compare(pairs: int, ours: Callable[[], None], other: Callable[[], None], before: Callable[[], None]) -> Any:
    """(median seconds of ours, of the other, median ratio other / ours); the order alternates."""
    times = []
    for pair in range(pairs):
        measured = {}
        for name, work in [("ours", ours), ("other", other)][:: 1 if pair % 2 else -1]:
            before()
            measured[name] = seconds(work)
        times.append((measured["ours"], measured["other"]))
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(b / a for a, b in times),
    )


def report(bench: Bench, what: str, result: tuple[float, float, float], goal: float | None) -> None:
    """One line of the table."""
    ours, other, ratio = result
    gib = bench.bytes / 2**30
    verdict = "" if goal is None else f"goal {goal:.1f} {'met' if ratio >= goal else 'MISSED'}"
    print(f"{what:44} {gib / ours:8.2f} {gib / other:8.2f} {ratio:7.3f}  {verdict}", flush=True)


def run(folder: Path, mib: int, width: int, pairs: int) -> None:
    """All comparisons for one shape of rows."""
    bench = Bench(folder, mib, width)
    print(f"\n{len(bench.lengths)} samples, {bench.bytes / 2**20:.0f} MiB, {len(LAYERS)} layers x {width} x bf16")
    print(f"{'':44} {'GiB/s':>8} {'other':>8} {'ratio':>7}")

    def clear() -> None:
        for path in (bench.store, bench.raw):
            shutil.rmtree(path, ignore_errors=True)
        os.sync()

    report(bench, "write, fsynced: over raw files", compare(pairs, bench.write_store, bench.write_raw, clear), 0.9)
    clear()
    bench.write_store()
    bench.write_raw()
    shard = next((bench.store / "shards").iterdir())
    made = MadeStore(bench.store, bench.manifest, write_samples(bench.store, bench.lengths, (2048,)), [])
    store = HiddenStore(bench.store, made.manifest, made.samples)
    files = {layer: os.open(bench.raw / str(layer), os.O_RDONLY) for layer in LAYERS}
    group = zarr.open_group(shard, mode="r")
    arrays: dict[int, Any] = {layer: group[f"hidden/{layer}"] for layer in LAYERS}
    for layer in LAYERS:  # both sides read the same bytes
        rows = bench.raw / str(layer)
        with array_file(shard, layer).open("rb") as ours, rows.open("rb") as other:
            assert ours.read(rows.stat().st_size) == other.read(), layer

    def cold() -> None:
        forget(bench.store)
        forget(bench.raw)

    def warm() -> None:
        """Everything has been read above."""

    for name, before in (("warm", warm), ("cold", cold)):
        many = pairs * 6 if name == "warm" else pairs  # a warm pass takes a tenth of a second
        ours, checked = (lambda: bench.read_store(store)), (lambda: bench.read_store(store, verify=True))
        raw = compare(many, ours, lambda: bench.read_raw(files), before)
        report(bench, f"read {name}: over raw files", raw, 0.9)
        raw = compare(many, checked, lambda: bench.read_raw(files), before)
        report(bench, f"read {name}, rows checked: over raw files", raw, None)
        through_zarr = compare(max(3, pairs // 3), ours, lambda: bench.read_zarr(arrays), before)
        report(bench, f"read {name}: over zarr-python, same shards", through_zarr, 4.0 if name == "warm" else None)
    for fd in files.values():
        os.close(fd)


def main() -> None:
    """Run it for the rows of a large, a small and a tiny target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="MiB of rows a side (default 512)")
    parser.add_argument(
        "--width",
        type=int,
        action="append",
        help="hidden size (default: an 8B target's, SmolLM2-135M's and the tiny target's: 4096, 576, 160)",
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write: the disk to measure")
    options = parser.parse_args()
    for width in options.width or (4096, 576, 160):
        with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-store-") as folder:
            run(Path(folder), options.mib, width, options.pairs)


if __name__ == "__main__":
    main()
