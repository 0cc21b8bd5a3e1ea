"""Hidden states -> committed shards: rows are streamed to disk as they come, padding never is.

One open shard a bucket, in `shards/.tmp-<name>.zarr`. Commit of a shard, each step durable before the next:

1. array files: zero rows up to the end of the last chunk, chunk index, crc; `zarr.json` documents; the index, as a
   temporary file; fsync of all those files and the shard's folders, together
2. index: rename, fsync of `index/`
3. the shard's folder: rename, fsync of `shards/`

A shard is committed iff index and folder are both there, so a kill between any two steps leaves leftovers
that `recover` deletes, never a shard that looks whole and isn't.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.schemas.config import STORE_ITEMSIZE, LayerId, StoreDtype
from dflash_tool.store.files import disk_errors, fsync_all, fsync_path, want_open_files, write_all, write_file
from dflash_tool.store.index import encode_index, shard_attributes
from dflash_tool.store.layout import (
    NUMPY_DTYPE,
    ShardName,
    array_dir,
    array_document,
    array_file,
    array_file_bytes,
    chunk_index,
    group_document,
    index_dir,
    index_path,
    padded_rows,
    shard_path,
    shards_dir,
)
from dflash_tool.store.scan import scan

_SPARE_FILES = 256
# Small enough to stay in the cache between hash and write; smaller writes make the page cache slow to read.
_WRITE_BYTES = 4 << 20
_FLUSH_BYTES = 8 << 20


@dataclass
class WriterCounters:
    """What a writer has done so far; read by progress displays from other threads."""

    bytes_written: int = 0  # into array files: rows, then padding and chunk index at the commit
    rows: int = 0  # appended, one a token
    samples: int = 0  # appended
    shards_committed: int = 0
    samples_committed: int = 0


@dataclass
class _OpenShard:
    name: ShardName
    opened: float
    files: dict[LayerId, int]
    sample_ids: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    hashes: list[list[int]] = field(default_factory=list)  # one list a layer
    rows: int = 0
    flushed: int = 0  # bytes of each array file that the disk was told to begin with


class ShardWriter:
    """Writes the rows of samples into shards under `root`. Owned by one thread; no two writers share a rank.

    layer_ids: the stored layers, in the order of the index's hashes. shard_bytes: a shard is committed once
    its rows (over all layers) reach this size; it may pass it by one batch. commit_every: age in seconds
    at which `commit_due` commits a shard. settings: fingerprint of the settings, kept in each shard.

    Disk errors raise `StoreError`; the shard that was being written is dropped, committed ones stay good, and
    the other open shards can still be committed.
    """

    def __init__(
        self,
        root: Path,
        *,
        layer_ids: Sequence[LayerId],
        hidden_size: int,
        store_dtype: StoreDtype,
        rank: int = 0,
        shard_bytes: int = 1 << 30,
        commit_every: float = 120.0,
        settings: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root
        self.layers = tuple(layer_ids)
        self.hidden_size = hidden_size
        self.store_dtype = store_dtype
        self.rank = rank
        self.shard_bytes = shard_bytes
        self.commit_every = commit_every
        self.settings = settings
        self.counters = WriterCounters()
        self._clock = clock
        self._dtype: np.dtype[Any] = NUMPY_DTYPE[store_dtype]
        self._row_bytes = hidden_size * STORE_ITEMSIZE[store_dtype]
        self._open: dict[int, _OpenShard] = {}
        self._quarantined: dict[int, list[bytes]] = {}  # by bucket, since its last commit
        with disk_errors(root, "create the store's folders in"):
            shards_dir(root).mkdir(parents=True, exist_ok=True)
            index_dir(root).mkdir(exist_ok=True)
            fsync_path(root)
        self._next_number = scan(root).next_number

        # Numbers this writer has given out, by bucket: an abandoned one isn't used again.
        self._numbers: dict[int, int] = {}

    def append(
        self,
        bucket: int,
        sample_ids: Sequence[bytes],
        lengths: Sequence[int],
        rows: Mapping[LayerId, NDArray[Any]],
    ) -> None:
        """Write the rows of some samples of one bucket.

        rows: a layer's array [sum(lengths), H] of the store dtype (uint16 bits for bfloat16), C-contiguous,
        real rows only, in the order of `sample_ids`. When this returns the rows are in the shard's files.
        Raises `ValueError` for arrays of another form and `StoreError` when the disk refuses.
        """
        if not sample_ids:
            return
        total = self._check(bucket, sample_ids, lengths, rows)
        shard = self._open.get(bucket)
        try:
            if shard is None:
                shard = self._start_shard(bucket)
            with disk_errors(self.root, "write to"):
                for position, layer in enumerate(self.layers):
                    data = rows[layer].data.cast("B")
                    shard.hashes[position] += self._write_rows(shard.files[layer], data, lengths)
                    self.counters.bytes_written += data.nbytes
                self._start_flush(shard, (shard.rows + total) * self._row_bytes)
        except BaseException:
            self._drop(bucket)
            raise
        shard.sample_ids += sample_ids
        shard.lengths += (int(length) for length in lengths)
        shard.rows += total
        self.counters.rows += total
        self.counters.samples += len(sample_ids)
        if shard.rows * self._row_bytes * len(self.layers) >= self.shard_bytes:
            self._commit(bucket)

    def quarantine(self, bucket: int, sample_ids: Sequence[bytes]) -> None:
        """Say in the bucket's next commit that these samples will never come: who follows the store waits for them."""
        if sample_ids:
            self._quarantined.setdefault(bucket, []).extend(sample_ids)

    def commit_due(self) -> None:
        """Commit the shards that were opened at least `commit_every` seconds ago."""
        now = self._clock()
        for bucket in [b for b, shard in self._open.items() if now - shard.opened >= self.commit_every]:
            self._commit(bucket)

    def commit_all(self) -> None:
        """Commit every open shard: at the end of a run, or when a signal ends it.

        One that the disk refuses is dropped, which may make room for the others; then its error is raised.
        """
        refused: StoreError | None = None
        for bucket in list(self._open):
            try:
                self._commit(bucket)
            except StoreError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def abandon(self) -> None:
        """Drop every open shard and its files; committed shards stay."""
        for bucket in list(self._open):
            self._drop(bucket)

    def seconds_until_due(self) -> float | None:
        """Seconds until `commit_due` has something to do (0 if now); None without an open shard."""
        if not self._open:
            return None
        oldest = min(shard.opened for shard in self._open.values())
        return max(0.0, oldest + self.commit_every - self._clock())

    def _check(
        self,
        bucket: int,
        sample_ids: Sequence[bytes],
        lengths: Sequence[int],
        rows: Mapping[LayerId, NDArray[Any]],
    ) -> int:
        total = sum(int(length) for length in lengths)
        if bucket < 0 or len(sample_ids) != len(lengths) or min(lengths) < 1:
            raise ValueError(f"bucket {bucket}: {len(sample_ids)} sample ids with lengths {list(lengths)}")
        expected = (total, self.hidden_size)
        for layer in self.layers:
            array = rows[layer]
            if array.shape != expected or array.dtype != self._dtype or not array.flags.c_contiguous:
                raise ValueError(
                    f"layer {layer}: got {array.dtype} {array.shape} (C-contiguous: "
                    f"{array.flags.c_contiguous}), expected C-contiguous {self._dtype} {expected}"
                )
        return total

    def _write_rows(self, fd: int, data: memoryview, lengths: Sequence[int]) -> list[int]:
        """Hash each sample, and write it while it is in the cache; small samples share a write."""
        hashes = []
        written = end = 0
        for length in lengths:
            start, end = end, end + int(length) * self._row_bytes
            hashes.append(xxhash.xxh3_64_intdigest(data[start:end]))
            if end - written >= _WRITE_BYTES or end == data.nbytes:
                write_all(fd, data[written:end])
                written = end
        return hashes

    def _start_flush(self, shard: _OpenShard, written: int) -> None:
        """Let the disk begin with the first `written` bytes of each array file, so that the commit waits less.

        On dirty pages this advice starts their writing and nothing else: they stay in the page cache.
        """
        if written - shard.flushed >= _FLUSH_BYTES:
            for fd in shard.files.values():
                os.posix_fadvise(fd, shard.flushed, written - shard.flushed, os.POSIX_FADV_DONTNEED)
            shard.flushed = written

    def _start_shard(self, bucket: int) -> _OpenShard:
        if bucket not in self._numbers:
            self._numbers[bucket] = self._next_number(bucket, self.rank)
        name = ShardName(bucket, self.rank, self._numbers[bucket])
        self._numbers[bucket] += 1
        shard = _OpenShard(name, self._clock(), {}, hashes=[[] for _ in self.layers])
        self._open[bucket] = shard
        want_open_files((len(self._open) + 1) * len(self.layers) + _SPARE_FILES)
        folder = shard_path(self.root, name, temporary=True)
        with disk_errors(folder, "create"):
            folder.mkdir()
            for layer in self.layers:
                path = array_file(folder, layer)
                path.parent.mkdir(parents=True)
                shard.files[layer] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        return shard

    def _commit(self, bucket: int) -> None:
        shard = self._open[bucket]
        try:
            with disk_errors(self.root, f"commit shard {shard.name} to"):
                self._finish_files(shard)
                index = encode_index(
                    self.layers,
                    shard.sample_ids,
                    np.array(shard.lengths, np.int32),
                    np.array(shard.hashes, np.uint64).T,
                )
                self._write_documents(shard, index)
                self._publish(shard.name)
        except BaseException:
            self._drop(bucket)
            raise
        del self._open[bucket]
        self._quarantined.pop(bucket, None)
        self.counters.shards_committed += 1
        self.counters.samples_committed += len(shard.sample_ids)

    def _finish_files(self, shard: _OpenShard) -> None:
        padding = bytes((padded_rows(shard.rows) - shard.rows) * self._row_bytes)
        end = padding + chunk_index(shard.rows, self._row_bytes)
        for layer, fd in shard.files.items():
            write_all(fd, memoryview(end))
            size = os.fstat(fd).st_size
            if size != array_file_bytes(shard.rows, self._row_bytes):
                raise OSError(f"array file of layer {layer} has {size} bytes after writing")
            self.counters.bytes_written += len(end)
        self._close_files(shard)

    def _write_documents(self, shard: _OpenShard, index: bytes) -> None:
        folder = shard_path(self.root, shard.name, temporary=True)
        attributes = shard_attributes(index, self.settings, self._quarantined.get(shard.name.bucket, ()))
        write_file(folder / "zarr.json", group_document(attributes))
        write_file(folder / "hidden" / "zarr.json", group_document())
        document = array_document(shard.rows, self.hidden_size, self.store_dtype)
        for layer in self.layers:
            write_file(array_dir(folder, layer) / "zarr.json", document)
        temporary_index = index_path(self.root, shard.name, temporary=True)
        write_file(temporary_index, index)
        fsync_all([temporary_index, folder, *sorted(folder.rglob("*"))])

    def _publish(self, name: ShardName) -> None:
        """Steps 2 and 3 of a commit: from a finished temporary shard to a committed one."""
        index_path(self.root, name, temporary=True).rename(index_path(self.root, name))
        fsync_path(index_dir(self.root))
        shard_path(self.root, name, temporary=True).rename(shard_path(self.root, name))
        fsync_path(shards_dir(self.root))

    def _close_files(self, shard: _OpenShard) -> None:
        while shard.files:
            os.close(shard.files.popitem()[1])

    def _drop(self, bucket: int) -> None:
        """Forget an open shard and delete what is there of it; a failure to delete is left to `recover`."""
        shard = self._open.pop(bucket, None)
        if shard is None:
            return
        with suppress(OSError):
            self._close_files(shard)
        shutil.rmtree(shard_path(self.root, shard.name, temporary=True), ignore_errors=True)
        with suppress(OSError):
            index_path(self.root, shard.name, temporary=True).unlink(missing_ok=True)
            if not shard_path(self.root, shard.name).exists():
                index_path(self.root, shard.name).unlink(missing_ok=True)
