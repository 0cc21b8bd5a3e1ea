"""Arrow schemas of the files in a store. A sample id is 16 bytes: see `make_sample_id`.

samples.arrow holds a row for each prepared sample, index/*.parquet one for each committed sample.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from dflash_tool.schemas.config import LayerId

SAMPLE_ID_BYTES = 16
CONTENT_BYTES = 12

SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.binary(SAMPLE_ID_BYTES), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ],
    metadata={"format": "dflash-samples", "format_version": "1"},
)


def index_schema(layers: Sequence[LayerId]) -> pa.Schema:
    """Schema of one shard's index: where each sample's rows are and what they hash to, by layer.

    `xxh3_64` holds one hash a layer, in the order of `layers` (also kept in the metadata).
    """
    return pa.schema(
        [
            pa.field("sample_id", pa.binary(SAMPLE_ID_BYTES), nullable=False),
            pa.field("row_start", pa.int64(), nullable=False),
            pa.field("length", pa.int32(), nullable=False),
            pa.field("xxh3_64", pa.list_(pa.uint64(), len(layers)), nullable=False),
        ],
        metadata={
            "format": "dflash-index",
            "format_version": "1",
            "layers": ",".join(str(layer) for layer in layers),
        },
    )


def content_hash(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> bytes:
    """12 bytes (96 bits of XXH3-128) over token ids [T] int32 little-endian, then the mask [T] uint8."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(input_ids, "<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, np.uint8).tobytes())
    return digest.digest()[:CONTENT_BYTES]


def make_sample_id(content: bytes, occurrence: int) -> bytes:
    """Sample id = content hash (12 bytes) + occurrence number (uint32, little-endian).

    The first row with this content has occurrence 0, its first duplicate 1, ...: ids are unique, and the
    content can be told from the id alone.
    """
    return content + occurrence.to_bytes(SAMPLE_ID_BYTES - CONTENT_BYTES, "little")


def id_words(sample_ids: pa.ChunkedArray | pa.Array) -> NDArray[np.uint64]:
    """Ids as [N, 2] uint64 (little-endian words), the form in which the plan hashes them."""
    if isinstance(sample_ids, pa.ChunkedArray):
        parts = [id_words(chunk) for chunk in sample_ids.chunks]
        return np.concatenate(parts) if parts else np.empty((0, 2), np.uint64)
    raw = np.frombuffer(sample_ids.buffers()[1], np.uint8)
    start = sample_ids.offset * SAMPLE_ID_BYTES
    raw = raw[start : start + len(sample_ids) * SAMPLE_ID_BYTES]
    return raw.view("<u8").reshape(-1, 2).astype(np.uint64)
