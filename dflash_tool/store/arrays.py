"""One layer's array of one shard, opened for reading rows.

If its `zarr.json` is the one that the writer makes and its chunk index is linear, rows start .. start+n are
`n * row_bytes` bytes at `start * row_bytes`: one `preadv`. Otherwise (someone rewrote the shard, with
compression say) rows are read through zarr-python, at its speed.
"""

import json
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from dflash_tool.errors import StoreError
from dflash_tool.schemas.config import STORE_ITEMSIZE, LayerId, StoreDtype
from dflash_tool.store.files import read_regular
from dflash_tool.store.layout import (
    NUMPY_DTYPE,
    array_dir,
    array_document,
    array_file,
    array_file_bytes,
    chunk_index,
)

_DOCUMENT_BYTES = 1 << 20


class DamagedArrayError(StoreError):
    """An array's files aren't what the writer made, nor what zarr can read."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is damaged: {what}; run extract again: it makes the shard's samples again")
        self.path = path
        self.what = what


class RawArray:
    """The fast path: an open file, read at any place by any number of threads.

    The file is closed when the last reference is gone, so a cache may forget it while another thread reads.
    """

    def __init__(self, path: Path, rows: int, width: int, dtype: StoreDtype) -> None:
        self.path = path
        self.rows = rows
        self.width = width
        self._row_bytes = width * STORE_ITEMSIZE[dtype]
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out`, the bytes of n rows, with rows start .. start+n."""
        left, offset = out.nbytes, start * self._row_bytes
        while left:
            count = os.preadv(self._fd, [out], offset)
            if count == 0:
                raise DamagedArrayError(self.path, f"it ends at byte {offset:,}")
            left -= count
            if left:  # a read stops at 2 GiB
                out, offset = out[count:], offset + count

    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def read_bytes(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on, fewer at the end of the file."""
        return os.pread(self._fd, count, offset)


class ZarrArray:
    """The slow path: anything that zarr-python reads."""

    def __init__(self, folder: Path, width: int, dtype: np.dtype[Any]) -> None:
        import zarr  # noqa: PLC0415 - half a second that the fast path doesn't need

        self.path = folder
        try:
            array = zarr.open_array(store=str(folder), mode="r")
        except Exception as error:  # whatever its codecs raise on hostile or damaged documents
            raise DamagedArrayError(folder / "zarr.json", _first_line(error)) from error
        if array.ndim != 2 or array.shape[1] != width or array.dtype != dtype:
            raise DamagedArrayError(
                folder / "zarr.json", f"it says {array.dtype} {array.shape}, expected {dtype} [rows, {width}]"
            )
        self._array: Any = array
        self.width = width
        self.rows = int(array.shape[0])

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out`, the bytes of n rows, with rows start .. start+n."""
        try:
            rows = np.frombuffer(out, self._array.dtype).reshape(-1, self.width)
            rows[:] = self._array[start : start + len(rows)]
        except Exception as error:
            raise DamagedArrayError(self.path, _first_line(error)) from error


def open_array(shard: Path, layer: LayerId, width: int, dtype: StoreDtype) -> RawArray | ZarrArray:
    """Open the array of `layer` in a shard's folder; `DamagedArrayError` for missing or broken files."""
    folder, path = array_dir(shard, layer), array_file(shard, layer)
    row_bytes = width * STORE_ITEMSIZE[dtype]
    try:
        document = read_regular(folder / "zarr.json", _DOCUMENT_BYTES)
        rows = _linear_rows(document, width, dtype)
        if rows is None:
            return ZarrArray(folder, width, NUMPY_DTYPE[dtype])
        array = RawArray(path, rows, width, dtype)
        expected, size = chunk_index(rows, row_bytes), array.size()
        end = array.read_bytes(max(0, size - len(expected)), len(expected))
    except FileNotFoundError as error:
        raise DamagedArrayError(Path(error.filename), "missing") from error
    except OSError as error:
        raise DamagedArrayError(path, error.strerror or str(error)) from error
    if end != expected:
        if len(end) < 4 or int.from_bytes(end[-4:], "little") != int(google_crc32c.value(end[:-4])):
            raise DamagedArrayError(path, f"no valid chunk index at the end of its {size:,} bytes")
        return ZarrArray(folder, width, NUMPY_DTYPE[dtype])
    if size != array_file_bytes(rows, row_bytes):
        raise DamagedArrayError(path, f"{size:,} bytes, expected {array_file_bytes(rows, row_bytes):,}")
    return array


def _linear_rows(document: bytes, width: int, dtype: StoreDtype) -> int | None:
    """Rows of the array if its document says what ours do (in any spelling), else None."""
    try:
        fields = json.loads(document)
        rows = fields["shape"][0]
        known = json.loads(array_document(rows, width, dtype))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    if not isinstance(rows, int) or not 0 < rows < 1 << 48:
        return None
    unread = ("attributes", "dimension_names")
    same = all(fields.get(key) == value for key, value in known.items() if key not in unread)
    return rows if same else None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
