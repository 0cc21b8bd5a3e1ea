"""`metrics.jsonl`: one JSON object a line, training rows and validation rows, in the order of steps.

A run that goes on from a checkpoint first drops the rows of steps that it will take again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_tool.store.files import disk_errors, replace_file

NAME = "metrics.jsonl"
Write = Callable[[dict[str, Any]], None]


class MetricsLog:
    """Appends rows to RUN/metrics.jsonl, a context manager. `after_step`: rows of later steps are dropped."""

    def __init__(self, run: Path, *, after_step: int) -> None:
        self.path = run / NAME
        with disk_errors(self.path, "write"):
            kept = [row for row in read_metrics(run) if row["step"] <= after_step]
            replace_file(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
            self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, with at least "kind" ("train" or "validation") and "step"; on disk when this returns."""
        with disk_errors(self.path, "write"):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole rows of a run; a last line that a kill cut off is left out."""
    path = run / NAME
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
