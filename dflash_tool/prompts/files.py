"""A data file of any kind -> the values of its rows. What kind it is, its first bytes say, never its name.

`PAR1` is Parquet, the bytes 1f 8b are gzip (of JSON), a `[` is one JSON array, anything else is JSON lines:
see `json_files` and `parquet_files`.
"""

import gzip
import io
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from dflash_tool.errors import DataError
from dflash_tool.prompts.entries import TAKES, Entry
from dflash_tool.prompts.json_files import Position, Stream, looks_like_array, read_array, read_lines
from dflash_tool.prompts.parquet_files import read_parquet

_HEAD_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 17
_PARQUET = b"PAR1"
_GZIP = b"\x1f\x8b"
# Not read, but known, so that the message can say what it is.
_OTHERS = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"ARROW1": "an Arrow file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


def read_entries(path: Path, columns: Collection[str]) -> Iterator[Entry]:
    """Rows of one file. Of a Parquet file only these columns (see `read_parquet`).

    Raises `DataError` if the file is unreadable, damaged, or an array that isn't UTF-8: a wrong file, not a bad row.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            file.seek(0)
            if head.startswith(_PARQUET):
                yield from read_parquet(path, file, columns)
            elif head.startswith(_GZIP):
                # GzipFile itself hands out lines slowly.
                with io.BufferedReader(gzip.GzipFile(fileobj=file), _BUFFER_BYTES) as unpacked:
                    yield from _read_json(path, unpacked, file.tell)
            else:
                yield from _read_json(path, file, file.tell)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: a damaged gzip file: {error}; copy or download it again") from error
    except OSError as error:
        raise DataError(f"{path}: can't read this data file: {error.strerror or error}") from error


def _read_json(path: Path, stream: Stream, position: Position) -> Iterator[Entry]:
    head = stream.read(_HEAD_BYTES)
    stream.seek(0)
    for magic, kind in {**_OTHERS, _PARQUET: "gzipped Parquet", _GZIP: "gzipped twice"}.items():
        if head.startswith(magic):
            raise DataError(f"{path}: this file is {kind}; {TAKES}: unpack or convert it first")
    read = read_array if looks_like_array(head) else read_lines
    return read(path, stream, position)
