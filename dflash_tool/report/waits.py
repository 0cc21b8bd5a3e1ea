"""Who waited for whom, over a run: each target, each drafter, the queue and the window, from the rows of metrics.jsonl.

A drafter's seconds are of the steps since the row before; a target's count up from the start of its process, so they
are subtracted here, and begin anew where a run was resumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_tool.report.runs import Points, Row, Run, mapping, points
from dflash_tool.schemas.run import STEP_PARTS

BETWEEN = "between steps"
_NOTABLE = 0.02  # of a drafter's time: less waiting for the others isn't shown


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One party over time. points: (step, share of its time that it waited, or how full it is: 0..1).

    seconds: waited in all, and of how many (0, 0 for the queue and the window); most: what 1 stands for there.
    """

    name: str
    points: Points
    waited: float = 0.0
    whole: float = 0.0
    most: float = 0.0

    @property
    def share(self) -> float:
        """Of its time that it waited."""
        return self.waited / self.whole if self.whole else 0.0


def waits(run: Run) -> list[Wait]:
    """Drafters waiting for data and for each other, then targets waiting for batches; without a share, left out."""
    found = []
    for name in _names(run.train, "drafters"):
        rows = [(row["step"], mapping(mapping(row, "drafters"), name)) for row in run.train]
        found.append(_wait(f"{name}, for data", [(step, _sum(each, "data"), _sum(each)) for step, each in rows]))
        others = [(step, _sum(each, "drafters", "ranks"), _sum(each)) for step, each in rows]
        if any(waited > _NOTABLE * whole for _, waited, whole in others):
            found.append(_wait(f"{name}, for others", others))
    targets = _names(run.train, "targets")
    found += [_wait(f"{name}, for batches", _since_last(run.train, name)) for name in targets]
    return [each for each in found if each.points]


def fills(run: Run) -> list[Wait]:
    """How full the queue (in items, of its most) and the window (in bytes, of its limit) were; of a live run alone."""
    queued = points(run.train, lambda row: _sum(mapping(row, "queued")) if "queued" in row else None)
    most = max((items for _, items in queued), default=0.0)
    found = [Wait(name="queue", points=[(step, items / (most or 1)) for step, items in queued], most=most)]
    limit = max((value for _, value in run.series("inflight_limit_bytes")), default=0.0)
    inflight = [(step, value / limit) for step, value in run.series("inflight_bytes") if limit]
    found.append(Wait(name="in-flight window", points=inflight, most=limit))
    return [each for each in found if each.points]


def parts(run: Run) -> list[tuple[str, Points, float]]:
    """(part of a step, (step, share of the time since the row before), seconds in all), those that took any time."""
    rows = [(float(row["step"]), _by_part(row), _sum(row, "seconds")) for row in run.train]
    found = []
    for part in (*STEP_PARTS, BETWEEN):
        shares = [(step, taken[part] / whole if whole else 0.0) for step, taken, whole in rows]
        found.append((part, shares, math.fsum(taken[part] for _, taken, _ in rows)))
    return [each for each in found if each[2] > 0]


def _by_part(row: Row) -> dict[str, float]:
    """Seconds by part; between steps (validating, saving) is what the others leave."""
    taken = {name: _sum(row, f"{name}_seconds") for name in STEP_PARTS}
    taken[BETWEEN] = max(0.0, _sum(row, "seconds") - math.fsum(taken.values()))
    return taken


def _names(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in mapping(row, field)))


def _wait(name: str, seconds: Sequence[tuple[int, float, float]]) -> Wait:
    """seconds: (step, waited, of how many)."""
    return Wait(
        name=name,
        points=[(float(step), waited / whole) for step, waited, whole in seconds if whole > 0],
        waited=math.fsum(waited for _, waited, _ in seconds),
        whole=math.fsum(whole for *_, whole in seconds),
    )


def _since_last(rows: Sequence[Row], name: str) -> list[tuple[int, float, float]]:
    found, before = [], (0.0, 0.0)
    for row in rows:
        target = mapping(mapping(row, "targets"), name)
        if not target:
            continue
        now = (_sum(target, "waiting"), _sum(target, "waiting", "computing"))
        if now[1] < before[1]:  # another process: the run was resumed
            before = (0.0, 0.0)
        found.append((int(row["step"]), max(0.0, now[0] - before[0]), now[1] - before[1]))
        before = now
    return found


def _sum(row: Row, *names: str) -> float:
    """Of these fields (all, if none is named), those that are finite numbers."""
    values = (row.get(name) for name in names) if names else row.values()
    return math.fsum(value for value in values if isinstance(value, int | float) and math.isfinite(value))
