"""The frame of a chart: scales, round ticks, axes, labels that don't overlap; all of it as escaped SVG.

Coordinates are SVG user units in a box of `WIDTH`; a page scales the whole picture. Colours are named by class
(`page.STYLE`), so one picture is right in light, in dark and on paper.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dflash_tool.wording import short

WIDTH = 640.0
TEXT = 12.0
_CHARACTER = 0.58 * TEXT  # of the page's sans-serif, on average
Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction: values `low`..`high` lie at `start`..`end`. log: on a logarithmic scale, `low` above 0."""

    name: str
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    show: Format = short
    labels: tuple[str, ...] = ()

    def at(self, value: float) -> float:
        """Where a value lies; values outside are brought to the nearer end."""
        low, high, value = (math.log(each) if self.log else each for each in (self.low, self.high, self._inside(value)))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label) of a few round values; the labels of 0, 1, 2, ... where the axis has its own."""
        if self.labels:
            return [(float(place), label) for place, label in enumerate(self.labels)]
        values = log_ticks(self.low, self.high) if self.log else round_ticks(self.low, self.high)
        return [(value, self.show(value)) for value in values]


def axis_over(
    name: str, values: Iterable[float], start: float, end: float, *, log: bool = False, zero: bool = False,
    show: Format = short,
) -> Axis:  # fmt: skip
    """An axis that all values fit on; zero: it begins at 0. A single value gets some room around it."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    low, high = min(known), max(known)
    if zero:
        low = min(low, 0.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (0 if zero else 0.5), high + (0.5 if high or zero else 1))
    return Axis(name=name, low=low, high=high, start=start, end=end, log=log, show=show)


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in low..high, `about` so many."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in low..high; the fewer there are, the more of their multiples too."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        inside = [factor * 10.0**decade for decade in decades for factor in factors]
        inside = [value for value in inside if low <= value <= high]
        if len(inside) >= 4:
            return inside
    return round_ticks(low, high)


def text_width(text: str) -> float:
    """About as wide as the text will be."""
    return _CHARACTER * len(text)


def shorten(text: str, most: int) -> str:
    """The text, its middle left out where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places moved as little as it takes to stand `gap` from each other, within low..high if they fit."""
    order = sorted(range(len(places)), key=lambda number: places[number])
    moved = list(places)
    floor = low
    for number in order:
        moved[number] = floor = max(moved[number], floor)
        floor += gap
    ceiling = high
    for number in reversed(order):
        moved[number] = ceiling = min(moved[number], ceiling)
        ceiling -= gap
    return moved


def drawing(height: float, label: str, *parts: Markup) -> Markup:
    """The `svg` element: an image that says of itself what it shows."""
    return Markup(
        '<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}" xmlns="http://www.w3.org/2000/svg">{}</svg>'
    ).format(WIDTH, height, label, Markup("").join(parts))


def words(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "", title: str = "") -> Markup:
    """A line of text; title: shown under the pointer."""
    hover = Markup("<title>{}</title>").format(title) if title else Markup("")
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}{}</text>').format(
        x, y, anchor, kind, hover, text
    )


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line."""
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(x1, y1, x2, y2, kind)


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "", fill: str = "") -> Markup:
    """A rectangle of a class, or of a fixed colour."""
    paint = Markup(' style="fill:{}"').format(fill) if fill else Markup("")
    return Markup(
        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}"{}><title>{}</title></rect>'
    ).format(x, y, max(width, 0.0), max(height, 0.0), kind, paint, title)


def line(points: Sequence[tuple[float, float]], kind: str, title: str = "") -> Markup:
    """A polyline."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup('<polyline points="{}" class="{}"><title>{}</title></polyline>').format(path, kind, title)


def area(points: Sequence[tuple[float, float]], kind: str, title: str = "", fill: str = "") -> Markup:
    """A filled polygon."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    paint = Markup(' style="fill:{}"').format(fill) if fill else Markup("")
    return Markup('<polygon points="{}" class="{}"{}><title>{}</title></polygon>').format(path, kind, paint, title)


def axes(x: Axis, y: Axis) -> Markup:
    """Grid lines, tick labels and names of both axes; ticks whose labels would touch the one before are left out."""
    parts = []
    for value, label in y.ticks():
        parts.append(rule(x.start, y.at(value), x.end, y.at(value), "grid"))
        parts.append(words(x.start - 6, y.at(value) + 4, label, anchor="end"))
    parts += x_ticks(x, y.start)
    parts.append(words(x.start, y.end - 10, y.name, kind="name"))
    return Markup("").join(parts)


def x_ticks(x: Axis, bottom: float) -> list[Markup]:
    """The lower axis alone."""
    parts = [rule(x.start, bottom, x.end, bottom, "axis")]
    free = -math.inf
    for value, label in x.ticks():
        place, half = x.at(value), text_width(label) / 2
        middle = min(place, WIDTH - half)
        if middle - half < free:
            continue
        free = middle + half + 6
        parts.append(rule(place, bottom, place, bottom + 4, "axis"))
        parts.append(words(middle, bottom + 17, label, anchor="middle"))
    parts.append(words((x.start + x.end) / 2, bottom + 34, x.name, anchor="middle", kind="name"))
    return parts
