"""Charts: what is drawn is the numbers, read back out of the SVG."""

import itertools
import math
from collections.abc import Callable
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from dflash_tool.report.charts import (
    MOST_POINTS,
    Series,
    Strip,
    band_chart,
    bar_chart,
    histogram,
    line_chart,
    ramp,
    strip_chart,
    thin,
)
from dflash_tool.report.svg import WIDTH, apart, log_ticks, round_ticks, shorten

Point = tuple[float, float]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(chart: Markup) -> ET.Element:
    root = ET.fromstring(str(chart))  # noqa: S314 - ours
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.get("aria-label")
    numbers = " ".join(each for element in root.iter() for each in element.attrib.values())
    assert "nan" not in numbers.split()
    assert "inf" not in numbers.split()
    return root


def of_class(root: ET.Element, tag: str, name: str) -> list[ET.Element]:
    return [each for each in root.iter(f"{SVG}{tag}") if name in (each.get("class") or "").split()]


def outline(element: ET.Element) -> list[Point]:
    pairs = (pair.split(",") for pair in (element.get("points") or "").split())
    return [(float(x), float(y)) for x, y in pairs]


def texts(root: ET.Element) -> list[str]:
    return [(list(each.itertext())[-1]) for each in root.iter(f"{SVG}text")]


def scale(pixels: list[float], values: list[float], of: Callable[[float], float] = float) -> Callable[[float], float]:
    """Value -> pixel, from the two ends: what lies between must be where the straight line says."""
    (low, high), (a, b) = (min(values), max(values)), (values.index(min(values)), values.index(max(values)))
    return lambda value: pixels[a] + (pixels[b] - pixels[a]) * (of(value) - of(low)) / (of(high) - of(low))


@pytest.mark.parametrize(("log", "of"), [(False, float), (True, math.log)])
def test_a_line_goes_through_its_points(log: bool, of: Callable[[float], float]) -> None:
    points = [(1.0, 3.0), (2.0, 50.0), (5.0, 7.5), (9.0, 900.0)]
    root = parsed(line_chart([Series("a", points)], label="l", x="step", y="loss", log=log))
    (drawn,) = [outline(each) for each in of_class(root, "polyline", "line")]
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    across = scale([x for x, _ in drawn], xs)
    up = scale([y for _, y in drawn], ys, of)
    for (x, y), (px, py) in zip(points, drawn, strict=True):
        assert px == pytest.approx(across(x), abs=0.11)
        assert py == pytest.approx(up(y), abs=0.11)
    assert drawn[1][1] < drawn[0][1]  # larger is higher
    assert {"step", "loss"} <= set(texts(root))


def test_lines_are_told_apart_without_colour() -> None:
    series = [Series(f"run {number}", [(0, number), (1, number * 2)]) for number in range(4)]
    root = parsed(line_chart(series, label="l", x="step", y="loss"))
    dashes = [(each.get("class") or "").split()[-1] for each in of_class(root, "polyline", "line")]
    assert len(set(dashes)) == 4
    labels = of_class(root, "text", "label")
    assert [list(each.itertext())[-1] for each in labels] == ["run 0", "run 1", "run 2", "run 3"]
    places = sorted(float(each.get("y") or 0) for each in labels)
    assert all(b - a >= 12 for a, b in itertools.pairwise(places))


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_line_stops_where_a_value_is_not_finite(gap: float) -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, gap), (3.0, 3.0), (4.0, 4.0)]
    root = parsed(line_chart([Series("a", points)], label="l", x="x", y="y"))
    assert [len(outline(each)) for each in of_class(root, "polyline", "line")] == [2, 2]
    assert len(of_class(root, "circle", "dot")) == 4


def test_a_logarithmic_line_leaves_out_what_is_not_above_zero() -> None:
    root = parsed(line_chart([Series("a", [(0, 0.0), (1, 1.0), (2, 10.0)])], label="l", x="x", y="y", log=True))
    assert [len(outline(each)) for each in of_class(root, "polyline", "line")] == [2]


@pytest.mark.parametrize("points", [[(3.0, 5.0)], [(3.0, 0.0)], [(0.0, 2.0), (1.0, 2.0)], [(1.0, math.nan)]])
@pytest.mark.parametrize("zero", [False, True])
def test_hardly_anything_to_draw(points: list[Point], zero: bool) -> None:
    parsed(line_chart([Series("a", points)], label="l", x="x", y="y", zero=zero))


def test_bars_are_as_long_as_their_values() -> None:
    rows = [("small", (1.0, 2.0)), ("large", (4.0, 8.0))]
    root = parsed(bar_chart(rows, names=("a", "b"), label="l", x="x", show=lambda value: f"{value:g} u"))
    bars = [float(each.get("width") or 0) for each in of_class(root, "rect", "bar")]
    assert bars[:2] == [12, 12]  # the key
    assert bars[3] / bars[2] == pytest.approx(2, abs=0.01)
    assert [bar / bars[2] for bar in bars[2:]] == pytest.approx([1, 2, 4, 8], abs=0.02)
    assert {"small", "large", "1 u", "2 u", "4 u", "8 u"} <= set(texts(root))


def test_a_histogram_stands_on_its_bins_and_edges() -> None:
    bins = [(1, 10, 4), (10, 100, 8), (100, 1000, 2)]
    root = parsed(histogram(bins, label="l", x="x", y="y", log=True, edges=(10, 1000)))
    bars = of_class(root, "rect", "bar")
    heights = [float(bar.get("height") or 0) for bar in bars]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 2, 0.5], abs=0.01)
    widths = [float(bar.get("width") or 0) for bar in bars]
    assert widths == pytest.approx([widths[0]] * 3, abs=0.2)  # decades are equally wide
    edges = [float(each.get("x1") or 0) for each in of_class(root, "line", "edge")]
    starts = [float(bar.get("x") or 0) for bar in bars]
    assert edges == pytest.approx([starts[1], starts[2] + widths[2]], abs=1.1)


def test_bands_fill_the_whole_height() -> None:
    shares = [[0.5, 0.25], [0.25, 0.25], [0.25, 0.5]]
    series = [Series(f"b{n}", [(0.0, a), (10.0, b)]) for n, (a, b) in enumerate(shares)]
    root = parsed(band_chart(series, label="l", x="step", y="share"))
    bands = [outline(each) for each in of_class(root, "polygon", "band")]
    height = bands[0][3][1] - bands[-1][0][1]
    for (a, b), band in zip(shares, bands, strict=True):
        (_, top_a), (_, top_b), (_, low_b), (_, low_a) = band
        assert (low_a - top_a) / height == pytest.approx(a, abs=0.01)
        assert (low_b - top_b) / height == pytest.approx(b, abs=0.01)
    for below, above in itertools.pairwise(bands):
        assert below[:2] == above[:1:-1]
    assert [text for text in texts(root) if text.startswith("b")] == ["b0", "b1", "b2"]


def test_one_step_is_a_band_as_wide_as_the_chart() -> None:
    root = parsed(band_chart([Series("a", [(7.0, 0.4)]), Series("b", [(7.0, 0.6)])], label="l", x="step", y="share"))
    for band in of_class(root, "polygon", "band"):
        xs = [x for x, _ in outline(band)]
        assert max(xs) - min(xs) > WIDTH / 2


def test_strips_are_as_high_as_their_shares() -> None:
    strips = [Strip("target 0", [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)], "50 %"), Strip("queue", [(1.0, 0.25)], "of 4")]
    root = parsed(strip_chart(strips, label="l", x="step"))
    grounds = of_class(root, "rect", "ground")
    for ground, band, highest in zip(grounds, of_class(root, "polygon", "band"), (1.0, 0.25), strict=True):
        bottom = float(ground.get("y") or 0) + float(ground.get("height") or 0)
        top = min(y for _, y in outline(band))
        assert (bottom - top) / float(ground.get("height") or 0) == pytest.approx(highest, abs=0.01)
    assert {"target 0", "queue", "50 %", "of 4"} <= set(texts(root))


EVIL = "<script>alert('&')</script>\""


def test_names_are_escaped_everywhere() -> None:
    charts = [
        line_chart(
            [Series(EVIL, [(0, 1), (1, 2)]), Series("b", [(0, 1)])], label=EVIL, x=EVIL, y=EVIL, marks=[(0, EVIL)]
        ),
        bar_chart([(EVIL, (1.0, 2.0))], names=(EVIL, EVIL), label=EVIL, x=EVIL, show=lambda _: EVIL),
        histogram([(0, 1, 1)], label=EVIL, x=EVIL, y=EVIL, edges=(1,), show=lambda _: EVIL),
        band_chart([Series(EVIL, [(0, 1.0)])], label=EVIL, x=EVIL, y=EVIL),
        strip_chart([Strip(EVIL, [(0, 1.0)], EVIL)], label=EVIL, x=EVIL),
    ]
    for chart in charts:
        root = parsed(chart)
        assert not list(root.iter(f"{SVG}script"))
        assert "<script" not in str(chart)


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9))
def test_ticks_are_round_and_few(low: float, span: float) -> None:
    if low + span == low or span < abs(low) * 1e-9:
        return
    ticks = round_ticks(low, low + span)
    assert 2 <= len(ticks) <= 11
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    steps = {round(gap / 10 ** math.floor(math.log10(gap) + 1e-6), 3) for gap in gaps}
    if span > abs(low) * 1e-6:
        assert len(steps) == 1
        assert steps <= {1.0, 2.0, 5.0}


def test_logarithmic_ticks() -> None:
    assert log_ticks(1, 1e5) == [1, 10, 100, 1000, 10_000, 100_000]
    assert log_ticks(18, 1504) == pytest.approx([20, 50, 100, 200, 500, 1000])
    assert log_ticks(4.6, 9) == [5, 6, 7, 8, 9]  # less than four of them: as on a linear scale


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_stand_apart(places: list[float]) -> None:
    moved = apart(places, 12, 0, 100)
    order = sorted(moved)
    assert all(b - a >= 12 - 1e-6 for a, b in itertools.pairwise(order))
    assert order[0] >= -1e-6
    assert order[-1] <= 100 + 1e-6


def test_long_series_are_thinned_evenly() -> None:
    points = [(float(x), float(x % 7)) for x in range(10_001)]
    kept = thin(points)
    assert len(kept) == MOST_POINTS
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    gaps = {b - a for (a, _), (b, _) in itertools.pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1
    assert thin(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_texts_are_shortened_in_their_middle() -> None:
    assert shorten("short", 10) == "short"
    assert shorten("0123456789abcdef", 9) == "0123…cdef"
    assert len(shorten("x" * 99, 20)) == 20


def test_the_ramp_grows_lighter() -> None:
    def light(colour: str) -> float:
        return sum(weight * int(colour[at : at + 2], 16) for at, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)))

    shades = [light(ramp(place / 20)) for place in range(21)]
    assert shades == sorted(shades)
    assert (ramp(0), ramp(1)) == ("#00224e", "#fee838")
