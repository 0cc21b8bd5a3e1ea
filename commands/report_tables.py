"""What `dflash report` and a comparison of stores print, and how a page is written."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.control import strip_control_codes
from rich.table import Table
from rich.text import Text

from dflash_tool.commands.format import Columns, bar, count, facts, share, spark

if TYPE_CHECKING:
    from dflash_tool.report.compare import Comparison
    from dflash_tool.report.runs import Run

_BAR_CELLS = 24


def write_page(file: Path, text: str) -> None:
    """Write a page, in place of an older one. Raises StoreError where that can't be done."""
    from dflash_tool.errors import ConfigError
    from dflash_tool.store.files import disk_errors, replace_file

    if file.is_dir():
        raise ConfigError(f"--html: {file} is a folder; give the name of a file")
    if not file.parent.is_dir():
        raise ConfigError(f"--html: there is no folder {file.parent}; make it, or choose another")
    with disk_errors(file, "write"):
        replace_file(file, text.encode())


def comparison_text(comparison: "Comparison") -> RenderableType:
    """Stores side by side; facts that differ stand out and have a mark."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for name in comparison.stores:
        table.add_column(Text(strip_control_codes(name)), overflow="fold")
    for fact in comparison.facts:
        style = "yellow" if fact.differs else ""
        table.add_row(
            "*" if fact.differs else "", fact.name, *(Text(strip_control_codes(value), style) for value in fact.values)
        )
    return Group(
        table,
        "",
        Text(f"* differs. Samples that all of them have, by content: {count(comparison.common_samples)}"),
    )


def runs_text(runs: "Sequence[Run]") -> RenderableType:
    """Each run, and what differs."""
    from dflash_tool.report.runs import differing
    from dflash_tool.report.summary import run_names

    parts: list[RenderableType] = []
    for run in runs:
        parts += [*_run(run), ""]
    if len(runs) == 1:
        return Group(*parts[:-1])
    parts.append(Text("What differs", style="bold"))
    rows = differing(runs)
    if not rows:
        return Group(*parts, Text("nothing: the runs have the same settings"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("setting", no_wrap=True)
    for name in run_names(runs):
        table.add_column(Text(strip_control_codes(name)), overflow="fold")
    for name, values in rows:
        table.add_row(name, *(Text(strip_control_codes(value)) for value in values))
    return Group(*parts, table)


def _run(run: "Run") -> Iterator[RenderableType]:
    from dflash_tool.report.summary import facts as facts_of
    from dflash_tool.report.summary import slots

    yield Text(strip_control_codes(str(run.folder)), style="bold")
    curves = [("loss", run.series("loss")), ("walk tau", run.series("walk_tau", "validation"))]
    lines = [(f"{name} over steps", spark([value for _, value in points])) for name, points in curves if points]
    yield facts([*facts_of(run), *lines])
    for note in run.notes:
        yield Text(f"Note: {strip_control_codes(note)}", style="yellow")
    graded = [(bucket, run.tau(bucket), run.tau(bucket, "anchor_tau")) for bucket in run.buckets]
    rows = [
        (run.bucket_name(bucket), f"{walk[-1][1]:.2f}", f"{anchor[-1][1]:.2f}" if anchor else "-", *_mix(run, bucket))
        for bucket, walk, anchor in graded
        if walk
    ]
    if rows:
        yield ""
        yield Columns(("bucket", "walk tau", "anchor tau", "share of steps", "least", "most"), rows)
    found = slots(run)
    if found:
        yield ""
        yield _slots(*found)


def _mix(run: "Run", bucket: int) -> tuple[str, str, str]:
    """A bucket's share of the steps' samples: mean, least, most."""
    values = [value for _, value in run.mix(bucket)]
    if not values:
        return "-", "-", "-"
    return share(sum(values) / len(values)), share(min(values)), share(max(values))


def _slots(step: int, rows: "Sequence[tuple[int, float, float | None]]") -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("slot", "right", "accepted"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(f"at step {count(step)}")
    for slot, right, accepted in rows:
        drawn = right if accepted is None else accepted
        table.add_row(
            str(slot), share(right), "-" if accepted is None else share(accepted), Text(bar(drawn, _BAR_CELLS), "cyan")
        )
    return table
