"""A run in a few numbers and a few lines: what the terminal, the page and `--json` say alike."""

import math
from collections.abc import Sequence
from typing import Any

from dflash_tool.report.runs import Points, Run, differing
from dflash_tool.report.waits import parts, waits
from dflash_tool.wording import count, share, size


def run_names(runs: Sequence[Run]) -> list[str]:
    """Names of the folders; whole paths where two are called the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.folder) for run, name in zip(runs, names, strict=True)]


def facts(run: Run) -> list[tuple[str, str]]:
    """A run in a few lines."""
    rows = [("state", run.state), ("kind", "live" if run.live else "from a store")]
    if losses := run.series("loss"):
        rows.append(("loss", f"{losses[0][1]:.3f} at step {count(int(losses[0][0]))}, {losses[-1][1]:.3f} at the end"))
    taus = run.series("walk_tau", "validation")
    if run.best:
        best = f"best {run.best[1]:.2f} at step {count(run.best[0])}"
        rows.append(("walk tau", f"{taus[0][1]:.2f} at first, {taus[-1][1]:.2f} last, {best}"))
    else:
        rows.append(("walk tau", "no validation yet"))
    if pace := median(run.series("tokens_per_second")):
        rows.append(("speed", f"{pace:,.0f} context tokens/s (median)"))
    found = parts(run)
    whole = math.fsum(seconds for *_, seconds in found)
    if spent := [(name, seconds / whole) for name, _, seconds in found if seconds >= 0.005 * whole]:
        rows.append(("time", ", ".join(f"{name} {share(part, 0)}" for name, part in spent)))
    if waited := waits(run):
        rows.append(("waited", "; ".join(f"{each.name} {share(each.share)}" for each in waited)))
    if memory := run.series("memory_bytes"):
        rows.append(("memory", f"at most {size(max(value for _, value in memory))}"))
    return rows


def slots(run: Run) -> tuple[int, list[tuple[int, float, float | None]]] | None:
    """(step, (slot, share right, share accepted or None in an older run)) of the newest validation."""
    for row in reversed(run.validation):
        right, accepted = row.get("accuracy_by_slot"), row.get("accepted_by_slot")
        if isinstance(right, list) and right:
            taken = accepted if isinstance(accepted, list) and len(accepted) == len(right) else [None] * len(right)
            return int(row["step"]), [(slot, a, b) for slot, (a, b) in enumerate(zip(right, taken, strict=True), 1)]
    return None


def median(points: Points) -> float | None:
    """Of the values that are finite, None if there is none."""
    values = sorted(value for _, value in points if math.isfinite(value))
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2 if values else None


def runs_json(runs: Sequence[Run]) -> dict[str, Any]:
    """One JSON document: a run's numbers, and the settings that differ."""
    return {
        "runs": [_finite(_json(run)) for run in runs],
        "differing": {name: list(values) for name, values in differing(runs)} if len(runs) > 1 else {},
    }


def _json(run: Run) -> dict[str, Any]:
    best = run.best
    return {
        "run": str(run.folder),
        "state": run.state,
        "at_work": run.at_work,
        "live": run.live,
        "step": run.step,
        "total_steps": run.total,
        "checkpoint_step": run.saved,
        "best": {"step": best[0], "walk_tau": best[1]} if best else None,
        "last_loss": _last(run.series("loss")),
        "last_validation": dict(run.validation[-1]) if run.validation else None,
        "tokens_per_second": median(run.series("tokens_per_second")),
        "memory_bytes": max((value for _, value in run.series("memory_bytes")), default=None),
        "seconds": {name: seconds for name, _, seconds in parts(run)},
        "waited": {each.name: {"seconds": each.waited, "share": each.share} for each in waits(run)},
        "config": run.config,
        "notes": list(run.notes),
    }


def _last(points: Points) -> float | None:
    return points[-1][1] if points else None


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
