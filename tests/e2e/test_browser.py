"""The pages in a real browser: every picture is drawn, nothing overlaps or sticks out, no error, no request.

Debian's chromium, headless. A script that only this test adds measures the page once it is laid out, and leaves what it
found in the document, which the browser prints. The page's own policy forbids scripts; the copy allows that one, and
forbids everything else just the same, so that whatever the page asked for would be an error on the console.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from dflash_tool.report.compare import compare
from dflash_tool.report.run_page import run_page
from dflash_tool.report.runs import read_run
from dflash_tool.report.store_page import look, store_page
from dflash_tool.stats import store_stats
from tests.store_kit import make_store
from tests.unit.report_kit import make_run, train_row, validation_row

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium here: apt-get install chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-quic", "--disable-dev-shm-usage", "--enable-logging=stderr",
]  # fmt: skip
MEASURE = """
addEventListener("load", () => {
  const box = each => { const b = each.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] };
  const svgs = [...document.querySelectorAll("svg")].map(svg => ({
    title: svg.closest("figure").querySelector("h3").textContent,
    box: box(svg),
    marks: svg.querySelectorAll("polyline, polygon, rect, circle").length,
    texts: [...svg.querySelectorAll("text")].map(text => [text.lastChild.textContent, box(text)]),
  }));
  const found = {
    svgs, inside: innerWidth, across: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map(each => each.name),
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    bar: getComputedStyle(document.querySelector(".c0")).fill,
  };
  const holder = document.createElement("pre");
  holder.id = "measured";
  holder.textContent = JSON.stringify(found);
  document.body.append(holder);
});
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A store, two stores, a live run, two runs: with names long enough to be in the way."""
    folder = tmp_path_factory.mktemp("pages")
    lengths = [5, 40, 17, 200, 33, 9, 128, 64, 7, 300, 12, 90, 31, 2000, 3100]
    stores = [
        make_store(
            folder / name, lengths[: len(lengths) - number], edges=(8, 16, 32, 60, 64, 128, 4096), shard_bytes=4000
        )
        for number, name in enumerate(("store", "another-store-with-a-long-name"))
    ]
    seen = [store_stats(each.root) for each in stores]
    rows = []
    for step in range(1, 80):
        target = {"waiting": step * 0.3, "computing": step * 1.0}
        mix = {str(bucket): 20 - 2 * bucket + (step + bucket) % 2 for bucket in range(9)}
        rows.append(
            train_row(
                step, buckets=mix, queued={"0": step % 5}, inflight_bytes=step * 10**7, inflight_limit_bytes=10**9,
                targets={f"target {number} on cuda:{number}": target for number in range(5)},
            )
        )  # fmt: skip
    graded = [validation_row(step, 1 + step / 100) for step in (0, 20, 40, 60)]
    for row in graded:
        row["by_bucket"] = {str(b): {"walk_tau": row["walk_tau"] + b / 1000, "anchor_tau": 1.0} for b in range(9)}
    runs = [
        make_run(folder / name, [*rows, *graded], live=live)
        for name, live in (("a-run-of-a-rather-long-name", True), ("b", False))
    ]
    found = [read_run(run) for run in runs]
    return {
        "store": store_page([look(seen[0], [])]),
        "stores": store_page([look(each) for each in seen], compare(seen)),
        "run": run_page(found[:1]),
        "runs": run_page(found),
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a browser says of a page, which gave it nothing to complain of."""

    def measure(page: str, width: int, *flags: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("browser")
        copy = folder / "page.html"
        policy = "style-src 'unsafe-inline'"
        assert policy in page
        allowed = page.replace(policy, f"{policy}; script-src 'unsafe-inline'")
        copy.write_text(allowed.replace("</head>", f"<script>{MEASURE}</script></head>"))
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'data'}", f"--window-size={width},2000", *flags]
        done = subprocess.run(
            [*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=240, check=True
        )
        assert "CONSOLE" not in done.stderr, done.stderr
        found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found, done.stderr
        result: dict[str, Any] = json.loads(html.unescape(found[1]))
        return result

    return measure


STORE = 8
RUN = 11


@pytest.mark.parametrize(
    ("name", "pictures"), [("store", STORE), ("stores", 2 * STORE), ("run", RUN + 1), ("runs", 6 + (RUN - 6) * 2 + 2)]
)
def test_every_picture_is_drawn(
    pages: dict[str, str], measured: Callable[..., dict[str, Any]], name: str, pictures: int
) -> None:
    seen = measured(pages[name], 1280)
    assert len(seen["svgs"]) == pictures
    assert seen["requests"] == []
    assert seen["across"] <= seen["inside"]
    for svg in seen["svgs"]:
        left, top, right, bottom = svg["box"]
        assert right - left > 300, svg["title"]
        assert bottom - top > 60, svg["title"]
        assert svg["marks"] > 0, svg["title"]
        for text, (x1, y1, x2, y2) in svg["texts"]:
            assert left - 1 <= x1, f"{svg['title']}: {text} is cut"
            assert x2 <= right + 1, f"{svg['title']}: {text} is cut"
            assert top - 1 <= y1, f"{svg['title']}: {text} is cut"
            assert y2 <= bottom + 1, f"{svg['title']}: {text} is cut"
        assert not list(overlapping(svg["texts"])), svg["title"]


def overlapping(texts: list[tuple[str, list[float]]]) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other by more than a hair."""
    pairs = ((a, b) for number, a in enumerate(texts) for b in texts[number + 1 :])
    return [
        (one, other)
        for (one, (x1, y1, x2, y2)), (other, (u1, v1, u2, v2)) in pairs
        if min(x2, u2) - max(x1, u1) > 1 and min(y2, v2) - max(y1, v1) > 3
    ]


def test_narrow_and_dark(pages: dict[str, str], measured: Callable[..., dict[str, Any]]) -> None:
    seen = measured(pages["stores"], 500, "--blink-settings=preferredColorScheme=0")
    assert seen["across"] <= seen["inside"] <= 500
    assert (seen["paper"], seen["ink"], seen["bar"]) == ("rgb(21, 24, 28)", "rgb(232, 234, 237)", "rgb(86, 180, 233)")
