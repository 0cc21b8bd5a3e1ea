"""Read the hidden states of single samples, by any number of threads, straight into the caller's buffers.

bfloat16 rows come as uint16 (numpy has no bfloat16): `torch.from_numpy(rows).view(torch.bfloat16)` shows them
as what they are, without a copy.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.schemas.arrow import SAMPLE_ID_BYTES
from dflash_tool.schemas.config import LayerId
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.store.arrays import RawArray, ZarrArray, open_array
from dflash_tool.store.files import want_open_files
from dflash_tool.store.index import CommittedIndex, ShardIndex, join_indexes, read_shard_index
from dflash_tool.store.layout import NUMPY_DTYPE, ShardName, shard_path
from dflash_tool.store.manifest import read_manifest, settings_fingerprint
from dflash_tool.store.samples import Samples
from dflash_tool.store.scan import scan
from dflash_tool.wording import counted

_WANTED_FILES = 4096
_SPARE_FILES = 256


def most_open_files() -> int:
    """How many array files may stay open, over all stores of this process."""
    return want_open_files(_WANTED_FILES) - _SPARE_FILES


class Located(NamedTuple):
    """Where the rows of one sample are: `length` rows from row `start` of a shard on; `place` counts in `committed`."""

    store: "HiddenStore"
    committed: CommittedIndex
    place: int
    shard: ShardName
    start: int
    length: int


class HiddenStore:
    """A store opened for reading. `samples` has N rows, numbered as in `samples.arrow`.

    manifest: what the numbers are. index: the committed samples. layers: what is stored. located [N] int64:
    the place of each sample in `index`, -1 where it isn't committed. quarantined [N] bool: samples that never will be.
    At most `max_open` array files stay open.
    """

    def __init__(self, root: Path, manifest: Manifest, samples: Samples, max_open: int | None = None) -> None:
        self.root = root
        self.manifest = manifest
        self.samples = samples
        self.layers: tuple[LayerId, ...] = manifest.layers
        self.width = manifest.target.hidden_size
        self.dtype: np.dtype[Any] = NUMPY_DTYPE[manifest.store_dtype]
        self._format = np.empty(0, self.dtype).data.format
        self.index: CommittedIndex
        self.located: NDArray[np.int64]
        self.quarantined: NDArray[np.bool_]
        self._parts: dict[ShardName, ShardIndex] = {}  # while the store grows
        self._max_shards = max(1, (max_open or most_open_files()) // len(self.layers))
        self._arrays: OrderedDict[ShardName, dict[LayerId, RawArray | ZarrArray]] = OrderedDict()
        self._lock = threading.Lock()
        self._sorted: tuple[NDArray[np.int64], NDArray[np.uint64]] | None = None
        self._look(manifest)

    @classmethod
    def open(cls, root: Path | str, *, max_open: int | None = None) -> "HiddenStore":
        """Open a store, complete or still growing.

        Raises `StoreError` if the manifest, the samples or an index is missing or damaged.
        """
        root = Path(root)
        return cls(root, read_manifest(root), Samples.open(root), max_open)

    @property
    def committed(self) -> NDArray[np.bool_]:
        """[N] whether each sample's rows are there."""
        return self.located >= 0

    def refresh(self) -> int:
        """Look for newly committed shards; returns how many samples are committed now. One thread at a time.

        While the store isn't complete its manifest is read again too; raises `StoreError` if it is of another store.
        """
        manifest = self.manifest
        if not manifest.complete:
            manifest = read_manifest(self.root)  # before the shards: of a complete store all of them are seen
            if settings_fingerprint(manifest) != settings_fingerprint(self.manifest):
                raise StoreError(f"the store {self.root} was made anew, with other settings: begin again with it")
        return self._look(manifest)

    def settled(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n] whether no extraction will change what is known of these rows: committed, quarantined, or all done."""
        if self.manifest.complete:
            return np.ones(len(rows), np.bool_)
        return (self.located[rows] >= 0) | self.quarantined[rows]

    def holes(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n] whether the samples of these rows are quarantined: a plan leaves them out where they stand."""
        return self.quarantined[rows]

    def row_of(self, sample_id: bytes) -> int:
        """The row of a sample id. Raises `StoreError` if the store has no such sample."""
        words = np.frombuffer(sample_id, "<u8")
        with self._lock:
            if self._sorted is None:
                order = np.argsort(self.samples.ids[:, 0], kind="stable")
                self._sorted = order, self.samples.ids[order, 0]
            order, first_words = self._sorted
        left, right = (np.searchsorted(first_words, words[0], side) for side in ("left", "right"))
        for row in order[left:right]:
            if self.samples.ids[row, 1] == words[1]:
                return int(row)
        raise StoreError(f"the store {self.root} has no sample {sample_id.hex()}")

    def read(
        self,
        sample: int | bytes,
        layers: Sequence[LayerId] | None = None,
        out: Mapping[LayerId, NDArray[Any]] | None = None,
        *,
        verify: bool = False,
    ) -> dict[LayerId, NDArray[Any]]:
        """The rows of one sample: a layer's array [T, H] of the store dtype.

        sample: its row or its id. layers: default all. out: a layer's C-contiguous array [T, H] to read into;
        without it new arrays are made. verify: check the rows against their hash. Thread-safe.
        Raises `StoreError` (naming sample, shard, rows, file) if it isn't committed, damaged or unreadable,
        and `ValueError` for an `out` of another form or a layer that isn't stored.
        """
        row = self.row_of(sample) if isinstance(sample, bytes) else int(sample)
        located = self.locate(row)
        shape = (located.length, self.width)
        result: dict[LayerId, NDArray[Any]] = {}
        views: dict[LayerId, memoryview] = {}
        for layer in self.layers if layers is None else layers:
            buffer = np.empty(shape, self.dtype) if out is None else out[layer]
            view = buffer.data  # quicker to ask than the array
            if view.shape != shape or view.format != self._format or not view.c_contiguous:
                raise ValueError(
                    f"out[{layer}] is {buffer.dtype} {buffer.shape}, expected C-contiguous {self.dtype} {shape}"
                )
            result[layer], views[layer] = buffer, view.cast("B")
        self.read_into(located, views, verify=verify)
        return result

    def locate(self, row: int) -> Located:
        """Say where the rows of a sample are. Raises `StoreError` if it isn't committed, or of another length."""
        with self._lock:
            index, place = self.index, int(self.located[row])
        if place < 0:
            raise StoreError(
                f"sample {self.samples.sample_id(row).hex()} (row {row}, {self.samples.source(row)}) is not "
                f"in the store {self.root}: run extract again to finish it"
            )
        start, length = int(index.row_start[place]), int(index.length[place])
        if length != self.samples.lengths[row]:
            what = f"the index says {counted(length, 'row')}, samples.arrow {self.samples.lengths[row]}"
            raise self._bad(index, place, what)
        return Located(self, index, place, index.shards[index.shard[place]], start, length)

    def read_into(self, sample: Located, out: Mapping[LayerId, memoryview], *, verify: bool) -> None:
        """Fill the bytes of the sample's rows for each layer in `out`; otherwise as `read`."""
        index, place = sample.committed, sample.place
        arrays = self._shard_arrays(sample.shard)
        for layer, view in out.items():
            array = arrays.get(layer) or self._open(sample, layer, arrays)
            try:
                array.read_into(sample.start, view)
            except (OSError, StoreError) as error:
                raise self._bad(index, place, f"layer {layer}: {error}") from error
            if verify:
                got, expected = xxhash.xxh3_64_intdigest(view), int(index.hashes[place, self.layers.index(layer)])
                if got != expected:
                    what = f"the rows of layer {layer} have hash {got:016x}, expected {expected:016x}"
                    raise self._bad(index, place, f"{what}: they changed since they were written")

    def close(self) -> None:
        """Close the array files; a later read opens them again."""
        with self._lock:
            self._arrays.clear()

    def __enter__(self) -> "HiddenStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look(self, manifest: Manifest) -> int:
        names = scan(self.root).committed
        if names == list(self._parts) and self._parts and manifest == self.manifest:
            return len(self.index)
        parts = {name: self._parts.get(name) or read_shard_index(self.root, name, self.layers) for name in names}
        index = join_indexes(self.layers, list(parts.values()))
        located = index.find(self.samples.sample_ids)
        never = {bytes.fromhex(each) for each in manifest.quarantined}
        if not manifest.complete:  # then shards say it as they are committed, the manifest at the end
            never |= {each for part in parts.values() for each in part.quarantined}
        left_out = pa.array(sorted(never), pa.binary(SAMPLE_ID_BYTES))
        quarantined = pc.is_in(self.samples.sample_ids, value_set=left_out).to_numpy() & (located < 0)
        self._parts = {} if manifest.complete else parts
        with self._lock:
            self._arrays.clear()  # a shard may have been made anew
            self.index, self.located, self.quarantined = index, located, quarantined
            self.manifest = manifest
        return len(index)

    def _shard_arrays(self, shard: ShardName) -> dict[LayerId, RawArray | ZarrArray]:
        """The open arrays of a shard; those of the least recently used shards are forgotten."""
        with self._lock:
            arrays = self._arrays.get(shard)
            if arrays is None:
                arrays = self._arrays[shard] = {}
                while len(self._arrays) > self._max_shards:
                    self._arrays.popitem(last=False)
            self._arrays.move_to_end(shard)
        return arrays

    def _open(
        self, sample: Located, layer: LayerId, arrays: dict[LayerId, RawArray | ZarrArray]
    ) -> RawArray | ZarrArray:
        if layer not in self.layers:
            raise ValueError(f"layer {layer} isn't stored, only {', '.join(map(str, self.layers))}")
        index, place = sample.committed, sample.place
        try:
            array = open_array(shard_path(self.root, sample.shard), layer, self.width, self.manifest.store_dtype)
        except StoreError as error:
            raise self._bad(index, place, f"layer {layer}: {error}") from error
        last = int(np.searchsorted(index.shard, index.shard[place], side="right")) - 1
        rows = int(index.row_start[last] + index.length[last])
        if array.rows != rows:
            raise self._bad(index, place, f"layer {layer} has {counted(array.rows, 'row')}, the shard's index {rows}")
        arrays[layer] = array
        return array

    def _bad(self, index: CommittedIndex, place: int, what: str) -> StoreError:
        name = index.shards[index.shard[place]]
        return StoreError(
            f"sample {index.sample_ids[place].as_py().hex()} (shard {name}, rows {index.row_start[place]} to "
            f"{index.row_start[place] + index.length[place] - 1}) of {self.root} can't be read: {what}. "
            "`dflash stats --verify` lists what is damaged, extract --verify makes it again"
        )
