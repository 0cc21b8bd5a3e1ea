"""A Parquet file -> the values that its rows would be in JSON, batch by batch.

Only the columns that a kind of row has are read. Parquet can't tell an absent key from a null: each struct
of a column has every key of the column, so in structs null means absent. (In a row itself null stays null.)
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_tool.errors import DataError
from dflash_tool.prompts.entries import Entry

_BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20  # read a column by pieces, not a whole row group of it


def read_parquet(path: Path, file: BinaryIO, columns: Collection[str]) -> Iterator[Entry]:
    """A value for each row, with those of `columns` that the file has; with all keys, if it has none of them.

    Raises `DataError` for a damaged file.
    """
    size, number = file.seek(0, 2), 0
    try:
        parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)
        rows = parquet.metadata.num_rows
        names = parquet.schema_arrow.names
        wanted = [name for name in names if name in columns]
        for value in _values(parquet, wanted) if wanted else (dict.fromkeys(names) for _ in range(rows)):
            number += 1
            yield Entry(f"{path}:{number}", value, size * number // rows)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number + 1} or after: text that isn't UTF-8 ({error.reason}); mend the file"
        ) from None
    except (pa.ArrowException, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{path}: a damaged Parquet file, or one of a kind that pyarrow {pa.__version__} can't read: "
            f"{lines[0]}; copy or download it again"
        ) from error


def _values(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
        lists = [_integers(column).to_pylist() for column in batch.columns]
        for row in zip(*lists, strict=True):
            yield {name: _without_nulls(value) for name, value in zip(batch.schema.names, row, strict=True)}


def _integers(column: pa.Array) -> pa.Array:
    """Lists of booleans as lists of 0 and 1 (a mask); any other column as it is."""
    kind = column.type
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_boolean(kind.value_type):
        return column.cast(pa.large_list(pa.uint8()))
    return column


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list | None):
        return [_without_nulls(inner) for inner in value]
    return value
