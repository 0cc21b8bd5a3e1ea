"""`samples.arrow`: the prepared samples, written in two streamed passes and read through a memory map.

The file can hold many GB of token ids, so nothing here reads them all: the small columns become numpy arrays,
a sample's tokens are views into the map.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.schemas.arrow import SAMPLES_SCHEMA, id_words
from dflash_tool.store.files import TEMP_PREFIX, disk_errors, fsync_path
from dflash_tool.store.layout import SAMPLES

BUCKET_COLUMN = SAMPLES_SCHEMA.get_field_index("bucket")
RAW_SAMPLES_SCHEMA = SAMPLES_SCHEMA.remove(BUCKET_COLUMN)  # what the first pass writes


def bucket_of(lengths: NDArray[np.int32], edges: Sequence[int]) -> NDArray[np.int32]:
    """[N] bucket of each length; `edges` are inclusive upper edges. A longer sample raises `ValueError`."""
    buckets = np.searchsorted(np.asarray(edges, np.int64), lengths, side="left").astype(np.int32)
    if len(buckets) and buckets.max() >= len(edges):
        raise ValueError(f"a sample of {lengths.max()} tokens is longer than the last edge {edges[-1]}")
    return buckets


class SamplesWriter:
    """Writes `samples.arrow`: `write` batches without buckets, then `finish` with the edges.

    Used as a context manager, it removes its temporary files if it is left without `finish`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._raw = root / f"{TEMP_PREFIX}raw-{SAMPLES}"
        self._temporary = root / f"{TEMP_PREFIX}{SAMPLES}"
        self._lengths: list[NDArray[np.int32]] = []
        with disk_errors(self._raw, "write"):
            root.mkdir(parents=True, exist_ok=True)
            self._file = pa.OSFile(str(self._raw), "wb")
            self._stream = pa.ipc.new_file(self._file, RAW_SAMPLES_SCHEMA)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append prepared samples; the batch has `RAW_SAMPLES_SCHEMA`."""
        with disk_errors(self._raw, "write"):
            self._stream.write_batch(batch)
        self._lengths.append(np.array(batch.column("length").to_numpy()))

    def lengths(self) -> NDArray[np.int32]:
        """[N] tokens of every sample written so far: what the bucket edges are chosen from."""
        return np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int32)

    def finish(self, edges: Sequence[int]) -> "Samples":
        """Add the bucket column, put the file in its place, and open it."""
        with disk_errors(self._temporary, "write"):
            self._stream.close()
            self._file.close()
            with pa.memory_map(str(self._raw)) as raw, pa.OSFile(str(self._temporary), "wb") as target:
                reader = pa.ipc.open_file(raw)
                with pa.ipc.new_file(target, SAMPLES_SCHEMA) as stream:
                    for position in range(reader.num_record_batches):
                        batch = reader.get_batch(position)
                        buckets = pa.array(bucket_of(batch.column("length").to_numpy(), edges))
                        columns = batch.columns
                        columns.insert(BUCKET_COLUMN, buckets)
                        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SAMPLES_SCHEMA))
            fsync_path(self._temporary)
            self._temporary.rename(self._root / SAMPLES)
            self._raw.unlink()
            fsync_path(self._root)
        return Samples.open(self._root)

    def abandon(self) -> None:
        """Close and remove what was written; nothing happens after `finish`."""
        if not self._file.closed:
            self._file.close()
        for path in (self._raw, self._temporary):
            path.unlink(missing_ok=True)

    def __enter__(self) -> "SamplesWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


class Samples:
    """The prepared samples of a store (N of them); row r is the r-th row of `samples.arrow`.

    ids [N, 2] uint64 words, lengths / supervised / buckets [N] int32. `tokens` and `mask` are views. strata, copies:
    what `JoinedSamples` has in their place; in a store alone the buckets, and 0.
    """

    def __init__(self, path: Path, table: pa.Table) -> None:
        self.path = path
        self.sample_ids: pa.ChunkedArray = table.column("sample_id")
        self.ids: NDArray[np.uint64] = id_words(self.sample_ids)
        self.lengths: NDArray[np.int32] = table.column("length").to_numpy()
        self.supervised: NDArray[np.int32] = table.column("supervised").to_numpy()
        self.buckets: NDArray[np.int32] = table.column("bucket").to_numpy()
        self.strata = self.buckets
        self.copies: NDArray[np.int64] = np.zeros(len(self.lengths), np.int64)
        self._tokens = _Lists(table.column("input_ids"), np.dtype(np.int32))
        self._masks = _Lists(table.column("loss_mask"), np.dtype(np.uint8))
        self._sources = _Lists(table.column("source"), np.dtype(np.uint8))

    @classmethod
    def open(cls, root: Path) -> "Samples":
        """Map `samples.arrow`. Raises `StoreError` if it is missing, damaged or has another schema."""
        path = root / SAMPLES
        if path.is_symlink():
            raise StoreError(f"{path} is a link; a store holds no links: copy the file there")
        if not path.exists():
            raise StoreError(f"{path} is missing: the store is not prepared; run extract again")
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            if not table.schema.equals(SAMPLES_SCHEMA, check_metadata=True):
                raise _damaged(path, f"columns {table.schema.names}, expected {SAMPLES_SCHEMA.names}")
            for column in table.columns:
                column.validate()
                if column.null_count:
                    raise _damaged(path, "a value is missing")
        except (pa.ArrowException, OSError) as error:
            first_line = str(error).partition("\n")[0]
            raise _damaged(path, first_line) from error
        samples = cls(path, table)
        if len(samples) and samples.lengths.min() < 1:
            raise _damaged(path, "a sample without tokens")
        return samples

    def __len__(self) -> int:
        return len(self.lengths)

    def sample_id(self, row: int) -> bytes:
        """The 16 bytes of a sample's id."""
        return bytes(self.ids[row].astype("<u8"))

    def tokens(self, row: int) -> NDArray[np.int32]:
        """[T] token ids."""
        return self._list(self._tokens, row)

    def mask(self, row: int) -> NDArray[np.uint8]:
        """[T] 1 where the token is supervised."""
        return self._list(self._masks, row)

    def source(self, row: int) -> str:
        """`file:line` the sample comes from."""
        text = self._sources.get(row)
        return "?" if text is None else bytes(text).decode(errors="replace")

    def _list(self, lists: "_Lists", row: int) -> NDArray[Any]:
        values = lists.get(row)
        if values is None or len(values) != self.lengths[row]:
            raise _damaged(self.path, f"row {row} doesn't have its {self.lengths[row]} tokens")
        return values


class _Lists:
    """A list or string column as views. A map isn't checked when opened, so offsets are at each use."""

    def __init__(self, column: pa.ChunkedArray, dtype: np.dtype[Any]) -> None:
        self._starts = [0, *accumulate(len(chunk) for chunk in column.chunks)]
        self._parts: list[tuple[NDArray[np.int32], NDArray[Any]]] = []
        for chunk in column.chunks:
            offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset :][: len(chunk) + 1]
            raw = chunk.buffers()[-1]  # the values; a list's come after their own validity
            values = np.frombuffer(raw, dtype) if raw is not None and raw.size else np.empty(0, dtype)
            self._parts.append((offsets, values))

    def get(self, row: int) -> NDArray[Any] | None:
        part = bisect_right(self._starts, row) - 1
        offsets, values = self._parts[part]
        place = row - self._starts[part]
        start, end = int(offsets[place]), int(offsets[place + 1])
        return values[start:end] if 0 <= start <= end <= len(values) else None


def _damaged(path: Path, what: str) -> StoreError:
    return StoreError(f"{path} is damaged: {what}; run extract again: it prepares the data again")
