"""Training runs in pictures: what they have in common first, then a chapter a run."""

import math
from collections.abc import Sequence

from dflash_tool.report.charts import Series, Strip, band_chart, bar_chart, line_chart, strip_chart
from dflash_tool.report.page import Chapter, Figure, Table, page
from dflash_tool.report.runs import Points, Run, differing, said
from dflash_tool.report.summary import facts, run_names, slots
from dflash_tool.report.svg import Format
from dflash_tool.report.waits import Wait, fills, parts, waits
from dflash_tool.wording import count, duration, share, short, size

_MOST_STRIPS = 24


def run_page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several."""
    names = run_names(runs)
    several = len(runs) > 1
    chapters = [_course(runs, names), *([_differences(runs, names)] if several else [])]
    for run, name in zip(runs, names, strict=True):
        chapters += _chapters(run, name if several else "")
    title = f"Run {runs[0].folder}" if not several else f"{len(runs)} runs"
    return page(
        title,
        "; ".join(f"{name}: {run.state}" if several else run.state for run, name in zip(runs, names, strict=True)),
        chapters,
    )


def _course(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    """What every run has: over steps, a line a run."""
    one = len(runs) == 1
    figures = [
        _lines(runs, names, "Loss", "Training loss of single steps (logarithmic).", "loss", log=True),
        _taus(runs, names),
        _lines(runs, names, "Speed", "Context tokens a second, since the row before.", "tokens_per_second", zero=True),
        _lines(runs, names, "Memory", "Most memory so far: of a CUDA device, else of the process.", "memory_bytes",
               show=size, zero=True),
        _lines(runs, names, "Learning rate", "As scheduled.", "lr", zero=True),
        _lines(runs, names, "Gradient norm", "Before clipping (logarithmic).", "grad_norm", log=True),
    ]  # fmt: skip
    return Chapter(
        title="Course of the run" if one else "Course of the runs",
        notes=[
            f"{name}: {note}" if not one else note for run, name in zip(runs, names, strict=True) for note in run.notes
        ],
        facts=facts(runs[0]) if one else (),
        figures=[figure for figure in figures if figure],
        text=""
        if any(run.train or run.validation for run in runs)
        else "No step is logged yet: there is nothing to draw.",
    )


def _lines(
    runs: Sequence[Run], names: Sequence[str], title: str, text: str, field: str, *, log: bool = False,
    zero: bool = False, show: Format = short, kind: str = "train",
) -> Figure | None:  # fmt: skip
    lines = [(name, run.series(field, kind)) for run, name in zip(runs, names, strict=True)]
    return _line_figure(title, text, lines, title.lower(), log=log, zero=zero, show=show)


def _taus(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    lines = []
    for run, name in zip(runs, names, strict=True):
        for kind in ("walk", "anchor"):
            label = f"{kind} tau" if len(runs) == 1 else f"{name}, {kind}"
            lines.append((label, run.series(f"{kind}_tau", "validation")))
    return _line_figure(
        "Tau", "Tokens a target forward yields on held-out answers: as generation walks them, and over every anchor.",
        lines, "tau", show=_two_digits,
    )  # fmt: skip


def _line_figure(
    title: str, text: str, lines: Sequence[tuple[str, Points]], y: str, *, log: bool = False, zero: bool = False,
    show: Format = short,
) -> Figure | None:  # fmt: skip
    lines = [(name, points) for name, points in lines if any(math.isfinite(value) for _, value in points)]
    if not lines:
        return None
    picture = line_chart(
        [Series(name, points) for name, points in lines],
        label=f"{title} over steps", x="step", y=y, log=log, zero=zero, show=show,
    )  # fmt: skip
    return Figure(title=title, text=text, picture=picture, table=_by_step(lines, show))


def _by_step(lines: Sequence[tuple[str, Points]], show: Format) -> Table:
    """A row a step, a column a line."""
    columns = [dict(points) for _, points in lines]
    steps = sorted({step for column in columns for step in column})
    rows = [(count(int(step)), *(show(column[step]) if step in column else "" for column in columns)) for step in steps]
    return Table(("step", *(name for name, _ in lines)), rows)


def _differences(runs: Sequence[Run], names: Sequence[str]) -> Chapter:
    rows = [(name, *values) for name, values in differing(runs)]
    if not rows:
        return Chapter(title="What differs", text="The runs have the same settings.")
    table = Table(("setting", *names), rows, words=True)
    return Chapter(
        title="What differs", text="Settings that are not the same in all runs.", tables=[("Settings", table)]
    )


def _chapters(run: Run, name: str) -> list[Chapter]:
    settings = [(key, said(run.config[key])) for key in sorted(run.config)]
    figures = [_slots(run), _tau_by_bucket(run), _mix(run), _parts(run), _waiting(run), _filled(run)]
    return [
        Chapter(
            title=name or "Inside the run",
            facts=facts(run) if name else (),
            figures=[figure for figure in figures if figure],
            tables=[("Resolved settings", Table(("setting", "value"), settings, words=True))],
        )
    ]


def _slots(run: Run) -> Figure | None:
    found = slots(run)
    if found is None:
        return None
    step, rows = found
    names = ("accepted", "right") if all(accepted is not None for *_, accepted in rows) else ("right",)
    bars = [(f"slot {slot}", (right,) if taken is None else (taken, right)) for slot, right, taken in rows]
    return Figure(
        title="Tau by slot",
        text=f"At step {count(step)}, over every anchor: how often a slot is right, and how often it is accepted, that "
        "is with all slots before it right too.",
        picture=bar_chart(
            bars, names=names, label="Share of slots accepted and right", x="share of anchors", show=_percent
        ),
        table=Table(("slot", *names), [(name, *map(_percent, values)) for name, values in bars]),
    )


def _tau_by_bucket(run: Run) -> Figure | None:
    lines = [(run.bucket_name(bucket), run.tau(bucket)) for bucket in run.buckets]
    text = "Walk tau of held-out samples by bucket (number: lengths in tokens): at which lengths it is weak."
    return _line_figure("Tau by bucket", text, lines, "walk tau", show=_two_digits)


def _mix(run: Run) -> Figure | None:
    lines = [(bucket, run.mix(bucket)) for bucket in run.buckets]
    lines = [(bucket, points) for bucket, points in lines if any(value for _, value in points)]
    if not lines:
        return None
    rows = []
    for bucket, points in lines:
        values = [value for _, value in points]
        mean = math.fsum(values) / len(values)
        rows.append((run.bucket_name(bucket), share(mean), share(min(values)), share(max(values))))
    return Figure(
        title="Mix of lengths in each step",
        text="Share of a step's samples by bucket. Every step holds each bucket's share of the data, to within 2 "
        "samples: the bands are flat.",
        picture=band_chart(
            [Series(run.bucket_name(bucket), points) for bucket, points in lines],
            label="Share of each step's samples by bucket, over steps", x="step", y="samples",
        ),
        table=Table(("bucket", "mean share", "least", "most"), rows),
    )  # fmt: skip


def _parts(run: Run) -> Figure | None:
    found = parts(run)
    whole = math.fsum(seconds for *_, seconds in found)
    shown = [each for each in found if each[2] >= 0.005 * whole]
    if not shown:
        return None
    return Figure(
        title="Where the time went",
        text="Share of the wall time by part of the step, the mean over drafters. Data is waiting for batches; between "
        "steps are validation and checkpoints.",
        picture=band_chart(
            [Series(name, points) for name, points, _ in shown], label="Share of the time by part of the step",
            x="step", y="time", ordered=False,
        ),
        table=Table(("part", "seconds", "share"), [(name, short(s), share(s / whole)) for name, _, s in found]),
    )  # fmt: skip


def _waiting(run: Run) -> Figure | None:
    found = waits(run)
    if not found:
        return None
    most = sorted(found, key=lambda each: -each.share)[:_MOST_STRIPS]
    shown = [each for each in found if each in most]
    left_out = f" The {_MOST_STRIPS} that waited most of {len(found)}." if len(shown) < len(found) else ""
    rows = [(each.name, duration(each.waited), share(each.share)) for each in found]
    return Figure(
        title="Who waited",
        text=f"Share of its time that each one waited, over steps; filled to the top: all the time.{left_out}",
        picture=strip_chart(
            [Strip(each.name, each.points, share(each.share)) for each in shown],
            label="Share of time waited by each target and drafter", x="step",
        ),
        table=Table(("who, for what", "waited", "share of its time"), rows),
    )  # fmt: skip


def _filled(run: Run) -> Figure | None:
    found = fills(run)
    if not found:
        return None
    rows = []
    for each in found:
        values = [value * each.most for _, value in each.points]
        show = size if each.name != "queue" else short
        rows.append(
            (each.name, show(each.most), show(math.fsum(values) / len(values)), show(max(values)), show(values[-1]))
        )
    return Figure(
        title="Queue and window",
        text="Finished batches that no drafter had taken yet, of their most; bytes in flight, of the window. Empty: "
        "drafters wait for targets. Full: targets wait for drafters.",
        picture=strip_chart(
            [Strip(each.name, each.points, _of(each)) for each in found], label="Filling of queue and window", x="step"
        ),
        table=Table(("what", "full is", "mean", "most", "last"), rows),
    )


def _of(fill: Wait) -> str:
    return f"of {short(fill.most)}" if fill.name == "queue" else f"of {size(fill.most)}"


def _two_digits(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
