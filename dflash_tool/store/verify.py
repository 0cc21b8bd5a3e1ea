"""Is every byte of a store what was written? Every file is read and held against a hash or its only form.

| file | held against |
|---|---|
| manifest.json | the checksum in it; samples.arrow's counts |
| samples.arrow, head/* | checksums.json (itself in canonical form) |
| index/*.parquet | the hash in its shard's group attributes |
| shards/*/zarr.json, hidden/*/zarr.json | the bytes the writer makes |
| hidden/<layer>/c/0/0 | rows: the index's hash of each sample; padding: zero; chunk index: its bytes |

and the whole: indexes without shards and the reverse, samples twice, samples absent from a complete store.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from dflash_tool.errors import StoreError
from dflash_tool.schemas.config import LayerId
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.store.arrays import DamagedArrayError, RawArray, ZarrArray, open_array
from dflash_tool.store.checksums import check_checksums, listed_files
from dflash_tool.store.files import bytes_of
from dflash_tool.store.index import (
    ShardIndex,
    join_indexes,
    read_attributes,
    read_shard_index,
    shard_attributes,
)
from dflash_tool.store.layout import (
    HEAD,
    MANIFEST,
    NUMPY_DTYPE,
    SAMPLES,
    ShardName,
    array_dir,
    array_document,
    array_file,
    array_file_bytes,
    chunk_index,
    group_document,
    index_path,
    padded_rows,
    shard_path,
)
from dflash_tool.store.manifest import read_manifest, settings_fingerprint
from dflash_tool.store.samples import Samples
from dflash_tool.store.scan import Scan, scan
from dflash_tool.wording import counted

_BLOCK_BYTES = 1 << 23


@dataclass(frozen=True)
class Damage:
    """One thing that isn't as it should be. `shard`: to be dropped (`recover.drop_shards`) and made again."""

    kind: str  # manifest, checksum, samples, missing, extra, index, document, array, rows, twice, absent
    path: Path
    detail: str
    shard: ShardName | None = None
    sample_ids: tuple[bytes, ...] = ()


def bytes_to_verify(root: Path) -> int:
    """Bytes that a full `verify` hashes: the total of its progress, unless it comes upon damage."""
    files = []
    with suppress(StoreError):
        files += listed_files(root)
        for name in scan(root).committed:
            files += shard_path(root, name).glob("hidden/*/c/*/*")
    return bytes_of(files)


def verify(root: Path, *, rehash: bool = True, progress: Callable[[int], None] | None = None) -> Iterator[Damage]:
    """Yield all damage in a store; nothing is changed.

    rehash: read and hash everything; without it only names, sizes, documents, indexes and chunk indexes are
    checked. progress: called with the bytes just hashed.
    """
    checked = _Checked(root, rehash, progress or _no_progress)
    yield from _root_files(checked)
    if checked.manifest is None:
        return
    try:
        found = scan(root)
    except StoreError as error:
        yield Damage("extra", root, str(error))
        return
    if checked.manifest.complete and not (root / HEAD / "head.safetensors").is_file():
        yield Damage("checksum", root / HEAD / "head.safetensors", "missing in a store that is complete")
    yield from _names(root, checked.manifest, found)
    parts: list[ShardIndex] = []
    for name in found.committed:
        try:
            index = read_shard_index(root, name, checked.manifest.layers)
        except StoreError as error:
            yield Damage("index", index_path(root, name), str(error), name)
            continue
        parts.append(index)
        yield from _documents(root, checked.manifest, index)
        for layer in checked.manifest.layers:
            yield from _array(checked, checked.manifest, index, layer)
    yield from _whole(root, checked.manifest, checked.samples, parts)


@dataclass
class _Checked:
    """What a verification is asked and has read so far."""

    root: Path
    rehash: bool
    progress: Callable[[int], None]
    samples: Samples | None = None
    manifest: Manifest | None = None


def _no_progress(count: int) -> None:
    """Nobody wants to know."""


def _root_files(checked: _Checked) -> Iterator[Damage]:
    root, samples_good = checked.root, True
    for path, what in check_checksums(root, checked.progress, rehash=checked.rehash):
        samples_good = samples_good and path != root / SAMPLES
        yield Damage("checksum", path, what)
    if samples_good:
        try:
            checked.samples = Samples.open(root)
        except StoreError as error:
            yield Damage("samples", root / SAMPLES, str(error))
    try:
        manifest = checked.manifest = read_manifest(root)
    except StoreError as error:
        yield Damage("manifest", root / MANIFEST, str(error))
        return
    if checked.samples is not None:
        lengths = checked.samples.lengths
        said, held = (manifest.samples, manifest.tokens), (len(lengths), int(lengths.sum()))
        if said != held:
            what = f"it says {counted(said[0], 'sample')} of {counted(said[1], 'token')}, "
            what += f"{SAMPLES} has {held[0]:,} of {held[1]:,}"
            yield Damage("manifest", root / MANIFEST, what)


def _names(root: Path, manifest: Manifest, found: Scan) -> Iterator[Damage]:
    for name in sorted(found.indexes - found.shards - found.temporary_names):  # a kill may fall between two renames
        ids: tuple[bytes, ...] = ()
        with suppress(StoreError):
            ids = tuple(read_shard_index(root, name, manifest.layers).sample_ids.to_pylist())
        yield Damage("missing", shard_path(root, name), "its index is there, the shard is missing", name, ids)
    for name in sorted(found.shards - found.indexes):
        yield Damage("missing", index_path(root, name), "the shard is there, its index is missing", name)
    for path in found.foreign:
        if path.suffix in (".zarr", ".parquet"):
            yield Damage("extra", path, "no name that dflash gives")
    if manifest.complete:
        for path in found.temporary:
            yield Damage("extra", path, "unfinished, in a store that is complete")


def _documents(root: Path, manifest: Manifest, index: ShardIndex) -> Iterator[Damage]:
    shard = shard_path(root, index.name)
    settings = read_attributes(root, index.name).get("dflash_settings")
    if settings and settings != settings_fingerprint(manifest):
        yield Damage("document", shard / "zarr.json", "it is of a store with other settings", index.name)
    try:
        data = index_path(root, index.name).read_bytes()
    except OSError as error:
        yield Damage("index", index_path(root, index.name), f"can't be read: {error.strerror or error}", index.name)
        return
    group = group_document(shard_attributes(data, str(settings or ""), index.quarantined))
    for path, expected in ((shard / "zarr.json", group), (shard / "hidden" / "zarr.json", group_document())):
        if what := _differs(path, expected):
            yield Damage("document", path, what, index.name)


def _array(checked: _Checked, manifest: Manifest, index: ShardIndex, layer: LayerId) -> Iterator[Damage]:
    shard, width, dtype = shard_path(checked.root, index.name), manifest.target.hidden_size, manifest.store_dtype
    everything = tuple(index.sample_ids.to_pylist())
    path = array_file(shard, layer)
    try:
        array = open_array(shard, layer, width, dtype)
        if array.rows != index.rows:
            what = f"{counted(array.rows, 'row')}, its index has {index.rows:,}"
            yield Damage("array", array_dir(shard, layer), what, index.name, everything)
            return
        if isinstance(array, RawArray) or _is_linear(path, index.rows, manifest.layer_row_bytes):
            document = array_dir(shard, layer) / "zarr.json"
            if what := _differs(document, array_document(index.rows, width, dtype)):
                yield Damage("document", document, what, index.name)
        if isinstance(array, RawArray):
            rows_end, row_bytes = index.rows * manifest.layer_row_bytes, manifest.layer_row_bytes
            if any(array.read_bytes(rows_end, (padded_rows(index.rows) - index.rows) * row_bytes)):
                yield Damage("array", path, "the padding after its last row isn't zero", index.name)
        if checked.rehash:
            bad = tuple(_changed_samples(array, manifest, index, layer, checked.progress))
            checked.progress(max(0, path.stat().st_size - index.rows * manifest.layer_row_bytes))
            if bad:
                what = f"{counted(len(bad), 'sample')} without the rows that were written, the first {bad[0].hex()}"
                yield Damage("rows", path, what, index.name, bad)
    except DamagedArrayError as error:
        yield Damage("array", error.path, error.what, index.name, everything)
    except OSError as error:
        yield Damage("array", path, f"can't be read: {error.strerror or error}", index.name, everything)


def _is_linear(path: Path, rows: int, row_bytes: int) -> bool:
    """Whether an array's file has the writer's form, so that its document must have it too."""
    end = chunk_index(rows, row_bytes)
    if not path.is_file() or path.stat().st_size != array_file_bytes(rows, row_bytes):
        return False
    with path.open("rb") as file:
        file.seek(-len(end), os.SEEK_END)
        return file.read() == end


def _changed_samples(
    array: RawArray | ZarrArray,
    manifest: Manifest,
    index: ShardIndex,
    layer: LayerId,
    progress: Callable[[int], None],
) -> Iterator[bytes]:
    """Ids of samples whose rows don't have their hash; whole samples are read in blocks of some MiB."""
    column = manifest.layers.index(layer)
    ends = index.row_start + index.length
    block_rows = max(1, _BLOCK_BYTES // manifest.layer_row_bytes)
    first = 0
    while first < len(ends):
        start = int(index.row_start[first])
        last = max(first + 1, int(np.searchsorted(ends, start + block_rows, side="right")))
        block = np.empty((int(ends[last - 1]) - start, array.width), NUMPY_DTYPE[manifest.store_dtype])
        array.read_into(start, block.data.cast("B"))
        progress(block.nbytes)
        for i in range(first, last):
            rows = block[index.row_start[i] - start : ends[i] - start]
            if xxhash.xxh3_64_intdigest(rows.data) != index.hashes[i, column]:
                yield index.sample_ids[i].as_py()
        first = last


def _whole(root: Path, manifest: Manifest, samples: Samples | None, parts: list[ShardIndex]) -> Iterator[Damage]:
    try:
        index = join_indexes(manifest.layers, parts)
    except StoreError as error:
        yield Damage("twice", root / "index", str(error))
        return
    if samples is None:
        return
    located = index.find(samples.sample_ids)
    here = located >= 0
    unknown = np.setdiff1d(np.arange(len(index)), located[here])
    wrong = np.zeros(len(samples), bool)
    wrong[here] = index.length[located[here]] != samples.lengths[here]
    buckets = np.array([name.bucket for name in index.shards], np.int32)
    wrong[here] |= buckets[index.shard[located[here]]] != samples.buckets[here]
    findings = ((unknown, f"not in {SAMPLES}"), (located[wrong], f"length or bucket not as in {SAMPLES}"))
    for places, what in findings:
        for position in np.unique(index.shard[places]):
            name = index.shards[position]
            ids = [index.sample_ids[int(i)].as_py() for i in places if index.shard[i] == position]
            detail = f"{counted(len(ids), 'sample')}: {what}, the first {ids[0].hex()}"
            yield Damage("index", index_path(root, name), detail, name, tuple(ids))
    if manifest.complete:
        quarantined = {bytes.fromhex(sample_id) for sample_id in manifest.quarantined}
        missing = [samples.sample_id(int(row)) for row in np.flatnonzero(~here)]
        absent = [sample_id for sample_id in missing if sample_id not in quarantined]
        if absent:
            what = f"{counted(len(absent), 'sample')} of a complete store in no shard, the first {absent[0].hex()}"
            yield Damage("absent", root / "shards", what, None, tuple(absent))


def _differs(path: Path, expected: bytes) -> str:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    return "" if found == expected else "its content isn't as it was written"
