"""The sample index: which committed shard holds which sample, and what its rows hash to.

One small parquet file a shard (see `schemas.arrow.index_schema`), read into numpy columns here. Rows of a
shard stand without a gap in the order of its index: `row_start` is the running sum of `length`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.schemas.arrow import SAMPLE_ID_BYTES, id_words, index_schema
from dflash_tool.schemas.config import LayerId
from dflash_tool.store.files import disk_errors, read_regular
from dflash_tool.store.layout import ShardName, index_path, shard_path
from dflash_tool.wording import counted, verb

_ID_TYPE = pa.binary(SAMPLE_ID_BYTES)
_INDEX_HASH, _QUARANTINED = "dflash_index_xxh3", "dflash_quarantined"
_INDEX_BYTES = 1 << 32  # sizes beyond which a file can't be ours
_DOCUMENT_BYTES = 1 << 20


class DamagedIndexError(StoreError):
    """The index of a shard isn't what was committed: the shard has to be made again."""


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard with n samples. `hashes[i, k]`: xxh3_64 of sample i's rows of layer k.

    quarantined: ids that this shard's run left out since its last commit in this bucket.
    """

    name: ShardName
    sample_ids: pa.Array  # [n] binary(16)
    row_start: NDArray[np.int64]  # [n]
    length: NDArray[np.int32]  # [n]
    hashes: NDArray[np.uint64]  # [n, layers]
    quarantined: tuple[bytes, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the shard: the tokens of its samples."""
        return int(self.row_start[-1] + self.length[-1])


@dataclass(frozen=True)
class CommittedIndex:
    """All committed samples (N) of a store; `shard[i]` counts in `shards`."""

    layers: tuple[LayerId, ...]
    shards: tuple[ShardName, ...]
    sample_ids: pa.Array = field(repr=False)  # [N] binary(16)
    shard: NDArray[np.int32] = field(repr=False)
    row_start: NDArray[np.int64] = field(repr=False)
    length: NDArray[np.int32] = field(repr=False)
    hashes: NDArray[np.uint64] = field(repr=False)  # [N, layers]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def find(self, sample_ids: pa.Array | pa.ChunkedArray | Sequence[bytes]) -> NDArray[np.int64]:
        """[M] positions of the given ids in this index, -1 where a sample isn't committed."""
        if not isinstance(sample_ids, pa.Array | pa.ChunkedArray):
            sample_ids = pa.array(sample_ids, _ID_TYPE)
        positions = pc.index_in(sample_ids, value_set=self.sample_ids)
        filled = pc.fill_null(positions, -1)
        return np.asarray(filled.to_numpy(), np.int64)

    def ids(self) -> set[bytes]:
        """The committed sample ids as a set (about 100 bytes of memory each)."""
        return set(self.sample_ids.to_pylist())


def encode_index(
    layers: Sequence[LayerId],
    sample_ids: Sequence[bytes],
    lengths: NDArray[np.int32],
    hashes: NDArray[np.uint64],
) -> bytes:
    """Parquet bytes of a shard's index, uncompressed (hashes don't compress). hashes: [n, layers]."""
    starts = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    schema = index_schema(layers)
    hash_lists = pa.FixedSizeListArray.from_arrays(pa.array(hashes.reshape(-1), pa.uint64()), len(layers))
    table = pa.Table.from_arrays(
        [pa.array(sample_ids, _ID_TYPE), pa.array(starts), pa.array(lengths, pa.int32()), hash_lists],
        schema=schema,
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_page_checksum=True)
    return bytes(sink.getvalue())


def shard_attributes(index: bytes, settings: str, quarantined: Sequence[bytes] = ()) -> dict[str, Any]:
    """Attributes of a shard's group: what its index hashes to, the fingerprint of the settings, quarantined ids."""
    attributes: dict[str, Any] = {_INDEX_HASH: xxhash.xxh3_128_hexdigest(index), "dflash_settings": settings}
    return attributes | ({_QUARANTINED: [each.hex() for each in quarantined]} if quarantined else {})


def read_attributes(root: Path, name: ShardName) -> dict[str, Any]:
    """Attributes of a committed shard's group; empty if its document can't be read."""
    try:
        document = read_regular(shard_path(root, name) / "zarr.json", _DOCUMENT_BYTES)
        attributes = json.loads(document)["attributes"]
    except (OSError, StoreError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return attributes if isinstance(attributes, dict) else {}


def read_shard_index(root: Path, name: ShardName, layers: Sequence[LayerId]) -> ShardIndex:
    """Read and check one shard's index.

    Raises `DamagedIndexError` if its bytes are not those that were committed or don't add up, and another
    `StoreError` if it can't be read at all or is of other layers.
    """
    path = index_path(root, name)
    with disk_errors(path, "read"):
        data = read_regular(path, _INDEX_BYTES)
    attributes = read_attributes(root, name)
    recorded = attributes.get(_INDEX_HASH)
    if recorded is not None and recorded != xxhash.xxh3_128_hexdigest(data):
        raise _damaged(path, f"its hash isn't the one in {shard_path(root, name) / 'zarr.json'}")
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            table = file.read(use_threads=False)  # small: starting threads would take longer than reading
    except (OSError, pa.ArrowException) as error:
        first_line = str(error).partition("\n")[0]
        raise _damaged(path, first_line) from error
    expected = _expected(tuple(layers))
    if (table.schema.metadata or {}).get(b"layers") != expected.metadata[b"layers"]:
        held = (table.schema.metadata or {}).get(b"layers", b"none").decode(errors="replace")
        wanted = expected.metadata[b"layers"].decode()
        raise StoreError(
            f"the index {path} is of layers {held}, expected {wanted}: the store was made with other --layers"
        )
    if not table.schema.equals(expected):
        raise _damaged(path, f"columns {_columns(table.schema)}, expected {_columns(expected)}")
    if table.num_rows == 0 or any(column.null_count for column in table.columns):
        raise _damaged(path, "it is empty or has nulls")
    ids, starts, lengths, hashes = (column.combine_chunks() for column in table.columns)
    index = ShardIndex(
        name=name,
        sample_ids=_one_chunk(ids),
        row_start=_one_chunk(starts).to_numpy(),
        length=_one_chunk(lengths).to_numpy(),
        hashes=_one_chunk(hashes).flatten().to_numpy().reshape(-1, len(layers)),
        quarantined=_quarantined(attributes),
    )
    ends = np.cumsum(index.length, dtype=np.int64)
    if index.length.min() < 1 or not np.array_equal(index.row_start, ends - index.length):
        raise _damaged(path, "row_start isn't the running sum of length")
    return index


@cache  # one schema for the shards of a store
def _expected(layers: tuple[LayerId, ...]) -> pa.Schema:
    return index_schema(layers)


def _quarantined(attributes: dict[str, Any]) -> tuple[bytes, ...]:
    try:
        ids = tuple(bytes.fromhex(each) for each in attributes.get(_QUARANTINED, ()))
    except (TypeError, ValueError):
        return ()  # `verify` finds that the document is damaged
    return ids if all(len(each) == SAMPLE_ID_BYTES for each in ids) else ()


def join_indexes(layers: Sequence[LayerId], parts: Sequence[ShardIndex]) -> CommittedIndex:
    """Put the indexes of shards together. Raises `StoreError` if a sample is there more than once."""
    if not parts:
        return CommittedIndex(
            layers=tuple(layers),
            shards=(),
            sample_ids=pa.array([], _ID_TYPE),
            shard=np.empty(0, np.int32),
            row_start=np.empty(0, np.int64),
            length=np.empty(0, np.int32),
            hashes=np.empty((0, len(layers)), np.uint64),
        )
    index = CommittedIndex(
        layers=tuple(layers),
        shards=tuple(part.name for part in parts),
        sample_ids=pa.concat_arrays([part.sample_ids for part in parts]),
        shard=np.repeat(np.arange(len(parts), dtype=np.int32), [len(part.length) for part in parts]),
        row_start=np.concatenate([part.row_start for part in parts]),
        length=np.concatenate([part.length for part in parts]),
        hashes=np.concatenate([part.hashes for part in parts]),
    )
    _refuse_duplicates(index)
    return index


def _refuse_duplicates(index: CommittedIndex) -> None:
    words = id_words(index.sample_ids)[:, 0]
    ordered = np.sort(words)  # ids whose first half stands alone can't be there twice: few are left to compare
    suspects = np.flatnonzero(np.isin(words, ordered[1:][ordered[1:] == ordered[:-1]]))
    ids = index.sample_ids.take(pa.array(suspects))
    first = pc.index_in(ids, value_set=ids).to_numpy()  # position of the first equal id
    repeated = np.flatnonzero(first != np.arange(len(suspects)))
    if len(repeated):
        again, original = int(suspects[repeated[0]]), int(suspects[first[repeated[0]]])
        one, other = (index.shards[index.shard[i]] for i in (original, again))
        raise StoreError(
            f"sample {index.sample_ids[again].as_py().hex()} is in shard {one} and again in {other} "
            f"({counted(len(repeated), 'sample')} in all {verb(len(repeated), 'is', 'are')} there twice); "
            f"each must be there once: remove index/{other}.parquet and shards/{other}.zarr, then run extract again"
        )


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name}: {column.type}" for column in schema)


def _damaged(path: Path, what: str) -> DamagedIndexError:
    return DamagedIndexError(f"the index {path} is damaged: {what}; run extract again: it replaces the shard")
