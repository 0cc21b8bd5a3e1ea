"""How much room a store will need, before anything is computed or written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_tool.errors import StoreError
from dflash_tool.schemas.arrow import SAMPLE_ID_BYTES
from dflash_tool.schemas.config import STORE_ITEMSIZE, LayerId, StoreDtype
from dflash_tool.store.files import free_bytes
from dflash_tool.store.index import encode_index, shard_attributes
from dflash_tool.store.layout import CHUNK_ROWS, array_document, array_file_bytes, group_document

_INDEX_SAMPLES = 4096  # a longer index is scaled from one of this length


@dataclass(frozen=True)
class DiskPrediction:
    """Bytes under `shards/` and `index/`, and the number of shards; `rows` is the part that is real rows."""

    rows: int
    shards_bytes: int
    index_bytes: int
    shards: int

    @property
    def total(self) -> int:
        """All bytes under `shards/` and `index/`."""
        return self.shards_bytes + self.index_bytes


def predict_bytes(
    tokens: Sequence[int],
    samples: Sequence[int],
    *,
    layers: Sequence[LayerId],
    hidden_size: int,
    store_dtype: StoreDtype,
    shard_bytes: int,
) -> DiskPrediction:
    """Size of the shards of a whole run, from the tokens and samples of each bucket.

    Exact but for what isn't known yet: where shards are cut, by size or by `--commit-every` (each shard more
    costs its documents and on average half a chunk of padding a layer). Within 1 % for anything but toys.
    """
    row_bytes = hidden_size * STORE_ITEMSIZE[store_dtype]
    shards_bytes = index_bytes = shards = 0
    for bucket_tokens, bucket_samples in zip(tokens, samples, strict=True):
        if not bucket_tokens:
            continue
        count = -(-bucket_tokens * row_bytes * len(layers) // shard_bytes)
        documents = len(array_document(bucket_tokens, hidden_size, store_dtype)) * len(layers)
        documents += len(group_document(shard_attributes(b"", "0" * 32))) + len(group_document())
        arrays = array_file_bytes(bucket_tokens, row_bytes)
        arrays += (count - 1) * (CHUNK_ROWS // 2) * row_bytes  # where the cuts fall, half a chunk is padding
        shards_bytes += arrays * len(layers) + documents * count
        index_bytes += sum(times * _index_bytes(n, layers) for n, times in _split(bucket_samples, count))
        shards += count
    return DiskPrediction(sum(tokens) * row_bytes * len(layers), shards_bytes, index_bytes, shards)


def check_room(path: Path, needed: int) -> None:
    """Raise `StoreError` with both numbers if the file system of `path` has less than `needed` bytes free."""
    free = free_bytes(path)
    if needed > free:
        raise StoreError(
            f"the store {path} needs {needed:,} bytes more, its file system has {free:,} bytes free; free "
            "some space, choose another --out, or store less (--layers, --max-length)"
        )


def _split(total: int, parts: int) -> list[tuple[int, int]]:
    """`total` in `parts` nearly equal parts, as (size, how many of them); none is empty."""
    parts = max(1, min(parts, total))
    small, larger = divmod(total, parts)
    return [(small, parts - larger), (small + 1, larger)]


def _index_bytes(samples: int, layers: Sequence[LayerId]) -> int:
    measured = min(samples, _INDEX_SAMPLES)
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 1 << 64, (measured, len(layers)), np.uint64)
    ids = [bytes(SAMPLE_ID_BYTES)] * measured
    size = len(encode_index(layers, ids, np.ones(measured, np.int32), hashes))
    return size * samples // measured
