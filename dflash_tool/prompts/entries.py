"""What the readers of files hand on: one JSON value at a time, with where it stands and how far the file is read."""

from typing import Any, NamedTuple

TAKES = "--data takes JSON lines, one JSON array (both may be gzipped) or Parquet"


class Entry(NamedTuple):
    """One row of a file, not looked into yet.

    `source` is `file:number`, the number counted from 1: the line in JSON lines, the row in other files.
    `value` is what JSON makes of the row, or `Skipped` if it is no JSON. `bytes_done` of the file were read
    when it came: of the compressed file where it is one.
    """

    source: str
    value: Any
    bytes_done: int
