"""Does the loader keep up with the disk? Collated batches against bare reads, and against one file a sample.

    python benchmarks/loader.py [--mib 1024] [--rounds 7] [--threads 2] [--folder .] [--width H]

Everything reads the same samples in the same order (the step plan's: random access) from the page cache, with the
same number of threads. Printed is the median over rounds of (the other's seconds / ours); each round runs every
contender once, in alternating order. Ours are microbatches `[n, B, S, H]` with token ids and masks, padded, in plan
order, from a window of four of the largest; the last line puts the layers side by side as well, on the consumer's
thread. The others:

- `preadv`: one a sample and layer, one after the other into recycled memory as large as the loader's window;
  nothing is collated, no padding, no ids. `preadv, same buffer`: into the room of one layer of the longest sample,
  again and again, which stays in the cache: no loader could hand that out.
- one safetensors file a sample, one torch.save file a sample: hidden states `[T, n*H]`, ids and mask, loaded by a
  pool of threads and copied into a batch of zeros `[B, S, n*H]`, as the usual dataset and collate function do.

Goals: 0.6 of preadv with every row held against its hash, 0.8 without; at least as fast as safetensors, twice as
fast as torch.save (ours hash every row).
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from store_kit import make_manifest, make_writer, random_rows, write_samples

from dflash_tool.buckets import Microbatch, choose_edges
from dflash_tool.loader import MixingLoader, VerifyReads, anchor_counts, epoch_plans
from dflash_tool.store.checksums import write_checksums
from dflash_tool.store.layout import array_file, shard_path
from dflash_tool.store.manifest import write_manifest
from dflash_tool.store.reader import HiddenStore

LAYERS = (1, 9, 17, 25, 33)
LONGEST, BUDGET, STEP = 2048, 2048, 64


class Bench:
    """The same samples as a store and as one file each, and whatever reads them."""

    def __init__(self, folder: Path, mib: int, width: int, threads: int) -> None:
        rng = np.random.default_rng(0)
        token_bytes = width * 2 * len(LAYERS)
        lengths: list[int] = []
        while sum(lengths) * token_bytes < mib << 20:
            lengths.append(int(np.clip(rng.lognormal(5.5, 0.8), 16, LONGEST)))
        self.lengths, self.width, self.threads = lengths, width, threads
        self.bytes = sum(lengths) * token_bytes
        self.window = 4 * (BUDGET * (token_bytes + 9) + 256)
        self.folder = folder
        self._write(rng)
        self.store = HiddenStore.open(folder / "store")
        rows = np.arange(len(lengths))
        self.rows = rows
        self.plan_of = epoch_plans(
            self.store.samples,
            rows,
            anchors_of=anchor_counts(self.store.samples),
            anchors=512,
            block_size=16,
            seed=0,
            batch_samples=STEP,
            context_budget=BUDGET,
            block_budget=1 << 30,
        )
        self.batches = [batch for step in self.plan_of(0) for batch in step.microbatches]
        self.context = torch.empty(BUDGET * width * len(LAYERS), dtype=torch.bfloat16)

    def _write(self, rng: np.random.Generator) -> None:
        root = self.folder / "store"
        edges = choose_edges(np.array(self.lengths), 6)
        samples = write_samples(root, self.lengths, edges)
        manifest = make_manifest(samples, edges, LAYERS, self.width, "bfloat16")
        (root / "head").mkdir()
        (root / "head" / "config.json").write_text("{}")
        write_checksums(root)
        write_manifest(root, manifest)
        writer = make_writer(root, manifest, shard_bytes=256 << 20)
        block = random_rows(rng, LONGEST + 64, self.width, "bfloat16")
        for kind in ("safetensors", "pt"):
            (self.folder / kind).mkdir()
        for row, length in enumerate(self.lengths):
            hidden = {layer: block[(row + layer) % 64 :][:length] for layer in LAYERS}
            writer.append(int(samples.buckets[row]), [samples.sample_id(row)], [length], hidden)
            side_by_side = torch.from_numpy(np.concatenate(list(hidden.values()), axis=1)).view(torch.bfloat16)
            sample = {
                "hidden": side_by_side,
                "input_ids": torch.from_numpy(samples.tokens(row).astype(np.int64)),
                "loss_mask": torch.from_numpy(samples.mask(row).copy()),
            }
            save_file(sample, self.folder / "safetensors" / str(row))
            torch.save(sample, self.folder / "pt" / str(row))
        writer.commit_all()

    def loader(self, verify: VerifyReads) -> MixingLoader:
        """To be used for many epochs: its memory is allocated once, as in a training."""
        return MixingLoader(
            self.store,
            self.rows,
            self.plan_of,
            layers=LAYERS,
            epochs=1,
            window_bytes=self.window,
            threads=self.threads,
            verify=verify,
        )

    def ours(self, loader: MixingLoader, *, side_by_side: bool = False) -> None:
        """One epoch through the loader, with its plan: the loader remembers the one of the epoch before."""
        self.plan_of(0)
        loader.load_state_dict({**loader.state_dict(), "step": 0})
        for step in loader:
            for batch in step:
                if side_by_side:
                    count, width = batch.input_ids.shape
                    features = self.width * len(LAYERS)
                    batch.context(out=self.context[: count * width * features].view(count, width, features))

    def preadv(self, files: dict[tuple[int, int], int], memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """The rows alone: threads draw the next sample of the same order. `memory` [threads, bytes]."""
        index, located = self.store.index, self.store.located
        order = iter([int(row) for batch in self.batches for row in batch.rows])
        drawing = threading.Lock()

        def work(buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
            free = 0
            while True:
                with drawing:
                    row = next(order, None)
                if row is None:
                    return
                place = located[row]
                size = self.lengths[row] * self.width * 2
                offset = int(index.row_start[place]) * self.width * 2
                shard = int(index.shard[place])
                for layer in LAYERS:
                    if free + size > len(buffer):
                        free = 0
                    read = os.preadv(files[shard, layer], [buffer[free : free + size]], offset)
                    assert read == size
                    free += size

        pool = [threading.Thread(target=work, args=(buffer,)) for buffer in memory]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()

    def one_file_a_sample(self, load: Callable[[int], dict[str, torch.Tensor]]) -> None:
        """Microbatches of the same samples; the pool loads a few batches ahead, as a data loader does."""

        def collate(batch: Microbatch) -> dict[str, torch.Tensor]:
            shape = (len(batch.rows), batch.width)
            made = {
                "hidden": torch.zeros(*shape, self.width * len(LAYERS), dtype=torch.bfloat16),
                "input_ids": torch.zeros(shape, dtype=torch.int64),
                "loss_mask": torch.zeros(shape, dtype=torch.uint8),
            }
            for place, row in enumerate(batch.rows.tolist()):
                for name, values in load(row).items():
                    made[name][place, : len(values)] = values
            return made

        with ThreadPoolExecutor(self.threads) as pool:
            ahead: list[Any] = []
            for batch in self.batches:
                ahead.append(pool.submit(collate, batch))
                if len(ahead) > 2 * self.threads:
                    ahead.pop(0).result()
            for future in ahead:
                future.result()


def open_files(bench: Bench) -> dict[tuple[int, int], int]:
    """(shard, layer) -> descriptor."""
    root, shards = bench.store.root, bench.store.index.shards
    return {
        (number, layer): os.open(array_file(shard_path(root, name), layer), os.O_RDONLY)
        for number, name in enumerate(shards)
        for layer in LAYERS
    }


def run(folder: Path, mib: int, width: int, threads: int, rounds: int) -> None:
    """All contenders for one shape of rows."""
    bench = Bench(folder, mib, width, threads)
    files = open_files(bench)
    plain, hashing = bench.loader("never"), bench.loader("always")
    large = np.zeros((threads, bench.window // threads), np.uint8)
    small = np.zeros((threads, LONGEST * width * 2), np.uint8)
    safetensors, pickles = folder / "safetensors", folder / "pt"
    contenders: dict[str, Callable[[], None]] = {
        "loader": lambda: bench.ours(plain),
        "loader, rows hashed": lambda: bench.ours(hashing),
        "loader, hashed, layers side by side": lambda: bench.ours(hashing, side_by_side=True),
        "preadv": lambda: bench.preadv(files, large),
        "preadv, same buffer": lambda: bench.preadv(files, small),
        "safetensors": lambda: bench.one_file_a_sample(lambda row: load_file(safetensors / str(row))),
        "torch.save": lambda: bench.one_file_a_sample(lambda row: torch.load(pickles / str(row), weights_only=True)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for once in contenders.values():  # everything into the page cache
        once()
    for round_number in range(rounds):
        for name, once in alternating(contenders, round_number):
            start = time.perf_counter()
            once()
            seconds[name].append(time.perf_counter() - start)
    for file in files.values():
        os.close(file)

    padded = sum(batch.padded_tokens for batch in bench.batches)
    print(
        f"\n{len(bench.lengths)} samples, {bench.bytes / 2**20:.0f} MiB, {len(LAYERS)} layers x {width} x bf16,"
        f" {len(bench.batches)} microbatches, {1 - sum(bench.lengths) / padded:.1%} padding, {threads} threads"
    )
    for name, took in seconds.items():
        print(f"  {name:40} {bench.bytes / 2**30 / statistics.median(took):6.2f} GiB/s")
    for ours, other, goal in (
        ("loader, rows hashed", "preadv", 0.6),
        ("loader", "preadv", 0.8),
        ("loader, hashed, layers side by side", "preadv", None),
        ("loader", "preadv, same buffer", None),
        ("loader, rows hashed", "safetensors", 1.0),
        ("loader, rows hashed", "torch.save", 2.0),
    ):
        ratio = statistics.median(b / a for a, b in zip(seconds[ours], seconds[other], strict=True))
        verdict = "" if goal is None else f"goal {goal:.1f} {'met' if ratio >= goal else 'MISSED'}"
        print(f"  {ours + ' / ' + other:52} {ratio:6.2f}  {verdict}", flush=True)


def alternating(contenders: dict[str, Callable[[], None]], number: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Forwards in even rounds, backwards in odd ones."""
    yield from list(contenders.items())[:: 1 if number % 2 == 0 else -1]


def main() -> None:
    """Run it for the rows of a large and of a small target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of rows, kept three times (default 1024)")
    parser.add_argument(
        "--width", type=int, action="append", help="hidden size (default: an 8B target's and SmolLM2-135M's: 4096, 576)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width in options.width or (4096, 576):
        with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-loader-") as folder:
            run(Path(folder), options.mib, width, options.threads, options.rounds)


if __name__ == "__main__":
    main()
