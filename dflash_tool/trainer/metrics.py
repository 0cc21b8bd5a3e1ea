"""`metrics.jsonl`: one JSON object a line, training rows and validation rows, in the order of steps.

A run that goes on from a checkpoint first drops the rows of steps that it will take again.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_tool.schemas.run import METRICS
from dflash_tool.store.files import disk_errors, replace_file, write_all

Write = Callable[[dict[str, Any]], None]


class MetricsLog:
    """Appends rows to RUN/metrics.jsonl, a context manager. `after_step`: rows of later steps are dropped.

    Rows that the disk refuses wait for the next one; `say` is told once, and the run goes on.
    """

    def __init__(self, run: Path, *, after_step: int, say: Callable[[str], None]) -> None:
        self.path = run / METRICS
        self._say: Callable[[str], None] | None = say
        self._waiting = b""
        with disk_errors(self.path, "write"):
            kept = [row for row in read_metrics(run) if row["step"] <= after_step]
            replace_file(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, with at least "kind" ("train" or "validation") and "step"; on disk when this returns."""
        self._waiting += json.dumps(row).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if self._say:
                self._say(
                    f"{self.path}: rows from step {row['step']} on could not be written ({error.strerror}); they wait "
                    "for room on the disk, and are lost if there is none before the run ends"
                )
                self._say = None

    def _append(self) -> None:
        """Write what waits: all of it or, where the disk refuses, nothing."""
        end = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, memoryview(self._waiting))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, end)
            raise
        self._waiting = b""

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._append()
        os.close(self._fd)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole rows of a run; a last line that a kill cut off is left out."""
    path = run / METRICS
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
