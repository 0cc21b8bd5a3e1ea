"""A run's folder as plain series: read from what `train` and `live` write, whatever of it is there.

A run that is at work, was killed or has damaged files is read as far as it goes; `Run.notes` says what is missing. Rows
are those of metrics.jsonl (`pipeline.train_log`, `trainer.validate`); nothing here needs torch.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_tool.errors import DflashError, StoreError
from dflash_tool.schemas.run import CHECKPOINTS, LIVE_SETTINGS, METRICS, STATE, TRAIN_SETTINGS
from dflash_tool.store.layout import MANIFEST
from dflash_tool.store.lock import LOCK, run_at_work
from dflash_tool.store.manifest import read_manifest
from dflash_tool.wording import count, counted

Row = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. train, validation: rows by step; config: the resolved settings; edges: of the buckets, if known.

    at_work: who is writing to it; total: steps in all, if known; saved: step of the newest checkpoint.
    """

    folder: Path
    name: str
    config: Row
    live: bool
    at_work: str | None
    train: Sequence[Row]
    validation: Sequence[Row]
    total: int | None
    saved: int | None
    edges: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def step(self) -> int:
        """The last step that any row, or the newest checkpoint, tells of."""
        return max((self.saved or 0, *(int(row["step"]) for row in (*self.train, *self.validation))))

    @property
    def state(self) -> str:
        """In words: running, finished, or where it stopped."""
        of = f" of {count(self.total)}" if self.total else ""
        if self.at_work:
            return f"running: step {count(self.step)}{of}" if self.train else "running: no step logged yet"
        if self.total and self.step >= self.total:
            return f"finished: {counted(self.total, 'step')}"
        if not self.train and not self.validation:
            return "stopped before its first step was logged"
        saved = f"; its newest checkpoint is of step {count(self.saved)}" if self.saved else "; it has no checkpoint"
        return f"stopped at step {count(self.step)}{of}{saved}"

    def series(self, field: str, kind: str = "train") -> Points:
        """(step, value) of a field of the training or validation rows, where it is a number."""
        rows = self.train if kind == "train" else self.validation
        return points(rows, lambda row: row.get(field))

    @property
    def buckets(self) -> list[int]:
        """Every bucket that a step or a validation has seen."""
        mixed = {bucket for row in self.train for bucket in mapping(row, "buckets")}
        graded = {bucket for row in self.validation for bucket in mapping(row, "by_bucket")}
        return sorted(int(bucket) for bucket in mixed | graded if bucket.isdecimal())

    def bucket_name(self, bucket: int) -> str:
        """Its number and, where known, the lengths it holds."""
        if bucket >= len(self.edges):
            return f"bucket {bucket}"
        return f"{bucket}: {self.edges[bucket - 1] + 1 if bucket else 1}-{self.edges[bucket]}"

    def mix(self, bucket: int) -> Points:
        """(step, share of the step's samples) of one bucket, of each step that has a row."""
        return points(self.train, lambda row: _share(mapping(row, "buckets"), str(bucket)))

    def tau(self, bucket: int, kind: str = "walk_tau") -> Points:
        """(step, tau) of one bucket's held-out samples."""
        return points(self.validation, lambda row: mapping(mapping(row, "by_bucket"), str(bucket)).get(kind))

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, walk tau) of the best validation."""
        taus = self.series("walk_tau", "validation")
        return max(((int(step), tau) for step, tau in taus), key=lambda pair: (pair[1], -pair[0]), default=None)


def points(rows: Iterable[Row], value: Callable[[Row], Any]) -> Points:
    """(step, value) of the rows where there is a number; NaN and Inf count as numbers."""
    pairs = ((row["step"], value(row)) for row in rows)
    return [(float(step), float(number)) for step, number in pairs if _is_number(number)]


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises DflashError for what is none."""
    if not (folder / TRAIN_SETTINGS).is_file() and not (folder / LIVE_SETTINGS).is_file():
        raise DflashError(_refusal(folder))
    notes: list[str] = []
    config = {**_settings(folder / LIVE_SETTINGS, notes), **_settings(folder / TRAIN_SETTINGS, notes)}
    train, validation = _rows(folder / METRICS, notes)
    state = _document(folder / CHECKPOINTS / "last" / STATE, notes)
    totals = [row.get("total_steps") for row in (*train[-1:], state)]
    saved = state.get("step")
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=config,
        live=(folder / LIVE_SETTINGS).is_file(),
        at_work=run_at_work(folder),
        train=train,
        validation=validation,
        total=next((total for total in totals if isinstance(total, int)), None),
        saved=saved if isinstance(saved, int) else None,
        edges=_edges(config),
        notes=tuple(notes),
    )


def _refusal(folder: Path) -> str:
    if (folder / MANIFEST).is_file():
        return f"{folder} is a store: look at it with `dflash stats {folder}`"
    if (folder / LOCK).is_file():
        return f"{folder}: the run has not begun to train; look again later"
    what = f" is no run: it has no {TRAIN_SETTINGS}" if folder.is_dir() else ": there is no such folder"
    return f"{folder}{what}; give the --out of `dflash train` or `dflash live`"


def _rows(path: Path, notes: list[str]) -> tuple[list[Row], list[Row]]:
    """Training rows and validation rows, one a step, by step; what can't be read is left out and noted."""
    found: dict[str, dict[int, Row]] = {"train": {}, "validation": {}}
    bad = 0
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        notes.append(f"{path} can't be read: {error.strerror}")
        return [], []
    for number, text in enumerate(lines):
        try:
            row = json.loads(text)
            found[row["kind"]][row["step"] + 0] = row
        except (ValueError, KeyError, TypeError, RecursionError):
            bad += number < len(lines) - 1  # the last one may be in the making, or cut off by a kill
    if bad:
        notes.append(f"{counted(bad, 'line')} of {path} can't be read; they are left out")
    train, validation = ([rows[step] for step in sorted(rows)] for rows in found.values())
    return train, validation


def _settings(path: Path, notes: list[str]) -> Row:
    try:
        settings = yaml.safe_load(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        notes.append(f"{path} is damaged")
        return {}
    return {str(name): value for name, value in settings.items()}


def _document(path: Path, notes: list[str]) -> Row:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        notes.append(f"{path} is damaged")
        return {}
    return document


def _edges(config: Row) -> tuple[int, ...]:
    """Bucket edges of the store that the run trains on, if it is one and still there."""
    stores = config.get("store")
    if not isinstance(stores, list) or len(stores) != 1:
        return ()
    try:
        return read_manifest(Path(str(stores[0]))).edges
    except StoreError:
        return ()


def mapping(row: Row, field: str) -> Row:
    """A field that should hold an object, or an empty one."""
    value = row.get(field)
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _share(parts: Row, name: str) -> float:
    whole = math.fsum(value for value in parts.values() if _is_number(value))
    mine = parts.get(name, 0)
    return mine / whole if whole and _is_number(mine) else 0.0


def differing(runs: Sequence[Run]) -> list[tuple[str, tuple[str, ...]]]:
    """(setting, its value in each run) of the settings that differ, of those that all runs have."""
    shared = set.intersection(*(set(run.config) for run in runs)) - {"out"}
    kinds = ("kind", tuple("live" if run.live else "from a store" for run in runs))
    rows = [kinds, *((name, tuple(said(run.config[name]) for run in runs)) for name in sorted(shared))]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def said(value: Any) -> str:
    """A setting's value as a user would write it."""
    if isinstance(value, list):
        return ", ".join(map(said, value)) or "none"
    return "none" if value is None else str(value)
