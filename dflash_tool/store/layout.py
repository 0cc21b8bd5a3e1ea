"""Names and byte layout of a store.

    <root>/index/b2-r0-00007.parquet                   bucket 2, rank 0, shard 7
    <root>/shards/b2-r0-00007.zarr/zarr.json           zarr v3 group
                                   hidden/zarr.json    zarr v3 group
                                   hidden/<layer>/zarr.json, c/0/0     array [T, H], one a layer

An array is one zarr shard (sharding codec, uncompressed) of chunks of 64 full rows, so the file is

    T rows | zero rows up to a multiple of 64 | (offset, nbytes) uint64 LE a chunk | crc32c uint32 LE of those

Sources: zarr v3 core specification; its sharding codec (ZEP 2), index_location end, index codecs bytes and
crc32c. Documents and files equal those of zarr-python 3.1.6 byte for byte: tests/contract/test_store_zarr.py.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from dflash_tool.schemas.config import LayerId, StoreDtype
from dflash_tool.store.files import TEMP_PREFIX

CHUNK_ROWS = 64
MANIFEST = "manifest.json"
SAMPLES = "samples.arrow"
CHECKSUMS = "checksums.json"
CONFIG = "extract.yaml"
HEAD = "head"
# bfloat16 has no stable zarr type, nor a numpy one: its bits are kept as uint16.
NUMPY_DTYPE: dict[StoreDtype, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
_SHARD_NAME = re.compile(r"b(0|[1-9]\d{0,8})-r(0|[1-9]\d{0,8})-(\d{5}|[1-9]\d{5,8})", re.ASCII)


class ShardName(NamedTuple):
    """Names one shard: its bucket, the rank that wrote it, and its number in that pair."""

    bucket: int
    rank: int
    number: int

    def __str__(self) -> str:
        return f"b{self.bucket}-r{self.rank}-{self.number:05d}"

    @classmethod
    def parse(cls, text: str) -> "ShardName | None":
        """The name that `str` gives back as `text`, or None."""
        match = _SHARD_NAME.fullmatch(text)
        return cls(*(int(part) for part in match.groups())) if match else None


def shards_dir(root: Path) -> Path:
    """The folder of all shards."""
    return root / "shards"


def index_dir(root: Path) -> Path:
    """The folder of all indexes."""
    return root / "index"


def shard_path(root: Path, name: ShardName, *, temporary: bool = False) -> Path:
    """A shard's folder; while it is being written, under its temporary name."""
    return shards_dir(root) / f"{TEMP_PREFIX if temporary else ''}{name}.zarr"


def index_path(root: Path, name: ShardName, *, temporary: bool = False) -> Path:
    """A shard's index; while it is being written, under its temporary name."""
    return index_dir(root) / f"{TEMP_PREFIX if temporary else ''}{name}.parquet"


def array_dir(shard: Path, layer: LayerId) -> Path:
    """The folder of a layer's array in a shard's folder."""
    return shard / "hidden" / str(layer)


def array_file(shard: Path, layer: LayerId) -> Path:
    """The one file that holds a layer's rows."""
    return array_dir(shard, layer) / "c" / "0" / "0"


def padded_rows(rows: int) -> int:
    """Rows up to the end of the last chunk."""
    return -(-rows // CHUNK_ROWS) * CHUNK_ROWS


def array_file_bytes(rows: int, row_bytes: int) -> int:
    """Exact size of an array's file: rows with the padding of the last chunk, chunk index, crc."""
    return padded_rows(rows) * row_bytes + padded_rows(rows) // CHUNK_ROWS * 16 + 4


def chunk_index(rows: int, row_bytes: int) -> bytes:
    """The end of an array's file: chunk i is `64 * row_bytes` bytes at `i * 64 * row_bytes`; crc32c."""
    chunks = padded_rows(rows) // CHUNK_ROWS
    nbytes = CHUNK_ROWS * row_bytes
    entries = np.full((chunks, 2), nbytes, "<u8")
    entries[:, 0] = np.arange(chunks, dtype=np.uint64) * np.uint64(nbytes)
    raw = entries.tobytes()
    return raw + int(google_crc32c.value(raw)).to_bytes(4, "little")


def _document(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=2).encode()


def group_document(attributes: dict[str, Any] | None = None) -> bytes:
    """`zarr.json` of a group."""
    return _document({"attributes": attributes or {}, "zarr_format": 3, "node_type": "group"})


def array_document(rows: int, width: int, dtype: StoreDtype) -> bytes:
    """`zarr.json` of the array [rows, width]; the attribute `torch_dtype` says what the bits are."""
    bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
    return _document(
        {
            "shape": [rows, width],
            "data_type": NUMPY_DTYPE[dtype].name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [padded_rows(rows), width]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0 if dtype == "bfloat16" else 0.0,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [CHUNK_ROWS, width],
                        "codecs": [bytes_codec],
                        "index_codecs": [bytes_codec, {"name": "crc32c"}],
                        "index_location": "end",
                    },
                }
            ],
            "attributes": {"torch_dtype": dtype},
            "dimension_names": ["token", "feature"],
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }
    )
