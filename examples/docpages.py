"""A Sphinx HTML page as plain text: its sections, and its documented functions, classes and methods.

One pass of the standard library's HTML parser over the page's main body. Text is collected into blocks
(paragraph, list item, table row, code, signature); a heading opens a section, which ends where the next one
begins; a ``dd`` that closes under a signature ends a definition. Blocks inside a definition belong to the
section too, so a reader of both sees that text twice, once in its context and once alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_BREAKS = {"p", "li", "tr", "dt", "dd", "div", "section", "dl", "ul", "ol", "table"} | _HEADINGS


@dataclass
class Page:
    """``sections``: (title, text) in page order. ``definitions``: (signature, signature and description)."""

    title: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)
    definitions: list[tuple[str, str]] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()
        self._blocks: list[str] = []
        self._text: list[str] = []
        self._in_body = False
        self._code = False
        self._muted = 0  # depth inside a permalink, an image or a script
        self._bullet = ""
        self._section: tuple[str, int] = ("", 0)
        self._signatures: list[int | None] = []  # one a `dl`: the block where its current signature stands
        self._signature_open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = dict(attrs).get("class") or ""
        if tag == "div":
            self._enter_or_leave_body(classes)
        if not self._in_body:
            return
        if self._muted or (tag == "a" and "headerlink" in classes) or tag in {"script", "style"}:
            self._muted += tag not in {"img", "br", "hr", "input", "col"}
            return
        if tag in _BREAKS:
            self._flush()
        if tag == "pre":
            self._flush()
            self._code = True
        elif tag == "li":
            self._bullet = "- "
        elif tag == "dl":
            self._signatures.append(None)
        elif tag == "dt" and "sig" in classes.split():
            self._signature_open = True
        elif tag == "td" and any(self._text):
            self._text.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        if not self._in_body:
            return
        if self._muted:
            self._muted -= 1
            return
        if tag in _HEADINGS:
            title = _squeeze("".join(self._text))
            self._text.clear()
            self._finish_section()
            self._section = (title, len(self._blocks))
            self.page.title = self.page.title or title
            return
        if tag == "pre":
            code = "".join(self._text).strip("\n")
            self._text.clear()
            self._code = False
            self._blocks.append(f"```\n{code}\n```")
        elif tag == "dt" and self._signature_open:
            signature = _squeeze("".join(self._text))
            self._text.clear()
            self._signature_open = False
            if self._signatures:
                self._signatures[-1] = len(self._blocks)
            self._blocks.append(f"`{signature}`")
        elif tag in _BREAKS:
            self._flush()
            if tag in {"dd", "dl"} and self._signatures:
                self._finish_definition(tag)

    def handle_data(self, data: str) -> None:
        if self._in_body and not self._muted:
            self._text.append(data)

    def _flush(self) -> None:
        if self._code:
            return
        text = _squeeze("".join(self._text))
        self._text.clear()
        if text:
            self._blocks.append(self._bullet + text)
            self._bullet = ""

    def _enter_or_leave_body(self, classes: str) -> None:
        if classes == "body":
            self._in_body = True
        if "sphinxsidebar" in classes:
            self._finish_section()
            self._in_body = False

    def _finish_definition(self, tag: str) -> None:
        """Keep, at the end of a ``dd``, what stands since its signature; leave the list at the end of a ``dl``."""
        if tag == "dl":
            self._signatures.pop()
        elif (at := self._signatures[-1]) is not None:
            self._signatures[-1] = None
            if len(self._blocks) > at + 1:
                text = "\n\n".join(self._blocks[at:])
                self.page.definitions.append((self._blocks[at].strip("`"), text))

    def _finish_section(self) -> None:
        self._flush()
        title, start = self._section
        if title and len(self._blocks) > start:
            self.page.sections.append((title, "\n\n".join(self._blocks[start:])))
        self._section = ("", len(self._blocks))


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def read_page(html: str) -> Page:
    """Parse one page; a page without a main body gives an empty :class:`Page`."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.page
