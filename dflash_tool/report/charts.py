"""Charts as pure functions: numbers in, one `svg` element out. No script, no network, nothing but the numbers given.

Colour never carries a meaning alone: lines differ in their dashes too and are labelled where they end, bars and bands
are labelled beside. Values that are not finite leave a gap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from dflash_tool.report.svg import (
    TEXT,
    WIDTH,
    Axis,
    Format,
    apart,
    area,
    axes,
    axis_over,
    box,
    drawing,
    line,
    rule,
    shorten,
    text_width,
    words,
    x_ticks,
)
from dflash_tool.wording import short

HEIGHT = 280.0
COLOURS = 8
MOST_POINTS = 400
_TOP, _BOTTOM, _LEFT, _RIGHT = 28.0, 46.0, 58.0, 12.0
_LABEL_CHARACTERS, _NAME_CHARACTERS = 20, 34
_BOLD = 1.15  # how much wider the labels of lines are than other text
_MARKED = 30  # series with fewer points have a dot on each
_RAMP = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))  # cividis

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A named line: (x, y), x ascending."""

    name: str
    points: Points


def thin(points: Points) -> Points:
    """At most `MOST_POINTS` of them, evenly spread, the last one always."""
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[round(number * last / (MOST_POINTS - 1))] for number in range(MOST_POINTS)]


def line_chart(
    series: Sequence[Series], *, label: str, x: str, y: str, log: bool = False, zero: bool = False,
    show: Format = short, ticks: tuple[str, ...] = (), marks: Sequence[tuple[float, str]] = (),
) -> Markup:  # fmt: skip
    """Lines over a common x, each labelled at its right end. ticks: names of x = 0, 1, 2, ...; marks: (x, words)."""
    named = len(series) > 1
    names = [shorten(each.name, _LABEL_CHARACTERS) for each in series]
    right = max(map(text_width, names)) * _BOLD + 12 if named else _RIGHT
    across, up = _frame(series, x, y, right, log=log, zero=zero, show=show, ticks=ticks)
    parts = [axes(across, up)]
    for at, said in marks:
        parts.append(rule(across.at(at), up.end, across.at(at), up.start, "edge"))
        parts.append(words(across.at(at) + 5, up.end + 10, said, kind="value"))
    ends = []
    for number, each in enumerate(series):
        kind, last = f"line c{number % COLOURS} d{number % COLOURS}", up.start
        for run in _unbroken(each.points, log):
            shown = [(across.at(x_), up.at(y_)) for x_, y_ in thin(run)]
            parts.append(line(shown, kind, each.name) if len(run) > 1 else Markup(""))
            if len(run) <= _MARKED:
                parts += [
                    _dot(*place, number, f"{each.name}: {show(v[1])}") for place, v in zip(shown, run, strict=True)
                ]
            last = shown[-1][1]
        ends.append(last)
    if named:
        parts += _labels(series, names, ends, across.end, up)
    return drawing(HEIGHT, label, *parts)


def bar_chart(
    rows: Sequence[tuple[str, Sequence[float]]], *, names: Sequence[str] = ("",), label: str, x: str, show: Format
) -> Markup:
    """Horizontal bars from 0, each with its value; several of a row stand below each other, named above the chart."""
    names_wide = max(text_width(shorten(name, _NAME_CHARACTERS)) for name, _ in rows) + 10
    thick = 16.0 if len(names) == 1 else 12.0
    step = thick * len(names) + 8
    top = _TOP if len(names) > 1 else 8.0
    bottom = top + step * len(rows)
    values = [value for _, each in rows for value in each if math.isfinite(value)]
    room = max((text_width(show(value)) for value in values), default=0) + 10
    across = axis_over(x, [0.0, *values], names_wide, WIDTH - room, zero=True, show=show)
    parts = [*_key(names, names_wide), *x_ticks(across, bottom)]
    for place, (name, each) in enumerate(rows):
        y = top + place * step + 4
        parts.append(
            words(
                names_wide - 8,
                y + thick * len(names) / 2 + 4,
                shorten(name, _NAME_CHARACTERS),
                anchor="end",
                title=name,
            )
        )
        for number, value in enumerate(each):
            if not math.isfinite(value):
                continue
            end, above = across.at(value), y + number * thick
            said = f"{name}{', ' * bool(names[number])}{names[number]}: {show(value)}"
            parts.append(box(across.start, above, max(end - across.start, 1), thick - 2, f"bar c{number}", said))
            parts.append(words(end + 5, above + thick / 2 + 3, show(value), kind="value"))
    return drawing(bottom + _BOTTOM - 6, label, *parts)


def histogram(
    bins: Sequence[tuple[float, float, float]], *, label: str, x: str, y: str, log: bool = False,
    edges: Sequence[float] = (), show: Format = short,
) -> Markup:  # fmt: skip
    """Bars over (from, to, count) on a continuous x, with a labelled vertical line at each edge."""
    ends = [end for low, high, _ in bins for end in (low, high)]
    across = axis_over(x, [*ends, *edges], _LEFT, WIDTH - _RIGHT, log=log, show=show)
    up = axis_over(y, [count for *_, count in bins], HEIGHT - _BOTTOM, _TOP + 8 * bool(edges), zero=True)
    parts = [axes(across, up)]
    for low, high, count in bins:
        left, right, top = across.at(low), across.at(high), up.at(count)
        said = f"{show(low)} to {show(high)}: {short(count)}"
        parts.append(box(left + 0.5, top, max(right - left - 1, 1), up.start - top, "bar c0", said))
    free = _LEFT + text_width(y) + 12  # behind the axis's name
    for number, edge in enumerate(edges):
        place, text = across.at(edge), show(edge)
        parts.append(rule(place, up.end - 4, place, up.start, "edge"))
        if place - text_width(text) / 2 > free:
            middle = min(place, WIDTH - text_width(text) / 2)
            parts.append(
                words(middle, up.end - 9, text, anchor="middle", kind="name", title=f"edge of bucket {number}")
            )
            free = middle + text_width(text) / 2 + 4
    return drawing(HEIGHT, label, *parts)


def band_chart(series: Sequence[Series], *, label: str, x: str, y: str, ordered: bool = True) -> Markup:
    """Shares (0..1) of a whole, stacked, over the same x. ordered: the series are steps of one scale, dark to light."""
    names = [shorten(each.name, _LABEL_CHARACTERS) for each in series]
    right = max(map(text_width, names)) + 14
    whole = Series("", [(series[0].points[0][0], 0.0), (series[0].points[-1][0], 1.0)])
    across, up = _frame([whole], x, y, right, zero=True, show=lambda value: f"{100 * value:.0f} %")
    xs = [x_ for x_, _ in thin(series[0].points)]
    below, parts, middles = [0.0] * len(xs), [axes(across, up)], []
    for number, each in enumerate(series):
        above = [low + value for low, (_, value) in zip(below, thin(each.points), strict=True)]
        outline = [(across.at(x_), up.at(value)) for x_, value in zip(xs, above, strict=True)]
        floor = [(across.at(x_), up.at(value)) for x_, value in zip(xs, below, strict=True)]
        if len(xs) == 1:  # a single step is as wide as the chart
            outline, floor = ([(across.start, y_), (across.end, y_)] for ((_, y_),) in (outline, floor))
        fill = ramp(0.1 + 0.9 * number / max(len(series) - 1, 1)) if ordered else ""
        parts.append(area([*outline, *reversed(floor)], f"band c{number % COLOURS}", each.name, fill))
        middles.append((outline[-1][1] + floor[-1][1]) / 2 + 4)
        below = above
    for name, place, at in zip(names, apart(middles, TEXT + 1, _TOP, up.start), middles, strict=True):
        parts.append(rule(across.end, at - 4, across.end + 6, place - 4, "lead"))
        parts.append(words(across.end + 9, place, name, kind="value"))
    return drawing(HEIGHT, label, *parts)


@dataclass(frozen=True)
class Strip:
    """One row of a strip chart: (x, share 0..1), and the words at its right end."""

    name: str
    points: Points
    said: str


def strip_chart(strips: Sequence[Strip], *, label: str, x: str) -> Markup:
    """A filled curve a row, from 0 to 1 each, all over the same x."""
    high, gap = 26.0, 8.0
    left = max(text_width(shorten(each.name, _NAME_CHARACTERS)) for each in strips) + 12
    right = max(text_width(each.said) for each in strips) + 14
    across = axis_over(x, [at for each in strips for at, _ in each.points], left, WIDTH - right)
    parts = []
    for number, each in enumerate(strips):
        bottom = 8 + (high + gap) * number + high
        up = Axis(name="", low=0, high=1, start=bottom, end=bottom - high)
        parts.append(box(left, bottom - high, across.end - left, high, "ground", each.name))
        shown = [(across.at(at), up.at(value)) for at, value in thin(each.points) if math.isfinite(value)]
        if shown:
            first, last = (shown[0][0], shown[-1][0]) if len(shown) > 1 else (across.start, across.end)
            top = shown if len(shown) > 1 else [(first, shown[0][1]), (last, shown[0][1])]
            parts.append(area([(first, bottom), *top, (last, bottom)], "band c1", f"{each.name}: {each.said}"))
        parts.append(
            words(left - 8, bottom - high / 2 + 4, shorten(each.name, _NAME_CHARACTERS), anchor="end", title=each.name)
        )
        parts.append(words(across.end + 8, bottom - high / 2 + 4, each.said, kind="value"))
    bottom = 8 + (high + gap) * len(strips)
    return drawing(bottom + _BOTTOM - 6, label, *parts, *x_ticks(across, bottom))


def ramp(place: float) -> str:
    """A colour of a scale that is dark at 0 and light at 1, told apart by its lightness alone."""
    at = place * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _frame(
    series: Sequence[Series], x: str, y: str, right: float, *, log: bool = False, zero: bool = False,
    show: Format = short, ticks: tuple[str, ...] = (),
) -> tuple[Axis, Axis]:  # fmt: skip
    up = axis_over(
        y, [value for each in series for _, value in each.points], HEIGHT - _BOTTOM, _TOP, log=log, zero=zero, show=show
    )
    left = max(text_width(label) for _, label in up.ticks() or [(0, "")]) + 12
    across = axis_over(x, [at for each in series for at, _ in each.points], left, WIDTH - right)
    if ticks:
        across = replace(across, low=-0.3, high=len(ticks) - 0.7, labels=ticks)
    return across, up


def _unbroken(points: Points, log: bool) -> list[Points]:
    """Runs of points that can be drawn: finite, and above 0 on a logarithmic scale."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if math.isfinite(value) and (value > 0 or not log):
            runs[-1].append((at, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _dot(x: float, y: float, number: int, title: str) -> Markup:
    return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.6" class="dot c{}"><title>{}</title></circle>').format(
        x, y, number % COLOURS, title
    )


def _labels(
    series: Sequence[Series], names: Sequence[str], ends: Sequence[float], right: float, up: Axis
) -> list[Markup]:
    places = apart([end + 4 for end in ends], TEXT + 2, _TOP, up.start)
    return [
        words(right + 8, place, name, kind=f"label c{number % COLOURS}", title=each.name)
        for number, (each, name, place) in enumerate(zip(series, names, places, strict=True))
    ]


def _key(names: Sequence[str], left: float) -> list[Markup]:
    """What the bars of a row are, where there are several."""
    parts, x = [], left
    for number, name in enumerate(names if len(names) > 1 else ()):
        parts += [box(x, 4, 12, 12, f"bar c{number}", name), words(x + 17, 14, name)]
        x += 17 + text_width(name) + 18
    return parts
