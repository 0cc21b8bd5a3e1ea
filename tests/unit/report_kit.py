"""Pages and runs in tests: a reader of our HTML, rows of metrics.jsonl, folders of runs."""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "h1", "h2", "h3", "p",
    "dl", "dt", "dd", "div", "figure", "figcaption", "details", "summary", "table", "thead", "tbody", "tr", "th", "td",
    "svg", "text", "line", "polyline", "polygon", "rect", "circle",
}  # fmt: skip


class Page(HTMLParser):
    """What stands where. figures: title -> number of pictures; tables: those of a heading, as rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.figures: dict[str, int] = {}
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words = ""
        self._within: list[str] = []
        self._title = self._said = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self._within.append(tag)
        if tag == "svg":
            self.figures[self._title] = self.figures.get(self._title, 0) + 1
        if tag == "tr":
            self.tables[self._title].append([])
        if tag in {"h1", "h2", "h3", "summary", "th", "td"}:
            self._said = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self._said += data
        if "style" not in self._within:
            self.words += data + " "

    def handle_endtag(self, tag: str) -> None:
        assert self._within.pop() == tag, f"</{tag}> closes something else"
        if tag in {"h2", "h3"}:
            self._title = self._said
            self.headings.append(self._said)
        if tag == "summary":
            if self._said != "Numbers":
                self._title = self._said
            self.tables[self._title] = []
        if tag in {"th", "td"}:
            self.tables[self._title][-1].append(self._said)


def checked(text: str) -> Page:
    """The page, which is whole, and holds nothing that runs, loads or leads elsewhere."""
    page = Page(text)
    assert page.tags <= ALLOWED, page.tags - ALLOWED
    assert not page.attributes & {"src", "href", "onload", "onerror", "onclick", "srcset", "action"}
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text
    return page


def train_row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train", "step": step, "total_steps": 100, "epoch": 0, "loss": 8.0 / (step + 1), "lr": 1e-3,
        "grad_norm": 2.0, "samples": 8, "blocks": 80, "tokens_per_second": 100.0 + step, "blocks_per_second": 10.0,
        "steps": 1, "seconds": 10.0, "data_seconds": 1.0, "forward_seconds": 3.0, "backward_seconds": 4.0,
        "drafters": {"drafter 0": {"compute": 7.0, "data": 1.0, "drafters": 0.0, "ranks": 0.0}},
        "memory_bytes": 1_000_000 + step, "buckets": {"0": 5, "1": 3}, **more,
    }  # fmt: skip


def validation_row(step: int, tau: float) -> dict[str, Any]:
    return {
        "kind": "validation", "step": step, "loss": 5.0, "anchor_tau": tau + 0.1, "walk_tau": tau,
        "accuracy_by_slot": [0.5, 0.25, 0.2], "accepted_by_slot": [0.5, 0.2, 0.1],
        "by_bucket": {
            "0": {"anchor_tau": tau, "walk_tau": tau, "anchors": 10},
            "1": {"anchor_tau": tau, "walk_tau": tau - 0.2, "anchors": 20},
        },
    }  # fmt: skip


def make_run(folder: Path, rows: Sequence[dict[str, Any]], *, live: bool = False, **config: Any) -> Path:
    """A run's folder with these rows."""
    folder.mkdir(parents=True)
    (folder / "train.yaml").write_text(yaml.safe_dump({"out": str(folder), "lr": 1e-3, "seed": 0, **config}))
    if live:
        (folder / "live.yaml").write_text(yaml.safe_dump({"out": str(folder), "targets": 2}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
