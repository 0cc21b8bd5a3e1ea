"""A page: one HTML file that needs nothing else. No script, no font, no address; a policy in it forbids them all.

Everything that is not markup of ours is escaped where it is put in (`markupsafe`): names of stores, files and runs are
their users'. One style sheet serves light, dark and paper.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from dflash_tool import __version__

_MOST_ROWS = 60


@dataclass(frozen=True)
class Table:
    """Names of the columns, and rows of as many cells. The first column names the row. words: no column of numbers."""

    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture with what it says and its numbers below."""

    title: str
    text: str
    picture: Markup
    table: Table


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A headline, facts (name, value), figures, further tables (title, table), lists of things to know."""

    title: str
    text: str = ""
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[tuple[str, Table]] = field(default=())


def page(title: str, subtitle: str, chapters: Sequence[Chapter]) -> str:
    """The whole document."""
    return str(
        _PAGE.format(
            title=title,
            subtitle=subtitle,
            style=Markup(STYLE),  # noqa: S704 - ours
            version=__version__,
            body=_join(map(_chapter, chapters)),
        )
    )


def _chapter(chapter: Chapter) -> Markup:
    parts = [Markup("<h2>{}</h2>").format(chapter.title)]
    if chapter.text:
        parts.append(Markup("<p>{}</p>").format(chapter.text))
    parts += [Markup('<p class="note">{}</p>').format(note) for note in chapter.notes]
    if chapter.facts:
        rows = (Markup("<dt>{}</dt><dd>{}</dd>").format(name, value) for name, value in chapter.facts)
        parts.append(Markup("<dl>{}</dl>").format(_join(rows)))
    if chapter.figures:
        parts.append(Markup('<div class="figures">{}</div>').format(_join(map(_figure, chapter.figures))))
    parts += [_fold(title, table) for title, table in chapter.tables]
    return Markup("<section>{}</section>").format(_join(parts))


def _figure(figure: Figure) -> Markup:
    return Markup(
        '<figure><figcaption><h3>{}</h3><p>{}</p></figcaption><div class="scroll">{}</div>{}</figure>'
    ).format(figure.title, figure.text, figure.picture, _fold("Numbers", figure.table))


def _fold(title: str, table: Table) -> Markup:
    """A table under its title, to be opened on the screen, open on paper. Of very many rows some, evenly spread."""
    rows, note = table.rows, Markup("")
    if len(rows) > _MOST_ROWS:
        last = len(rows) - 1
        rows = [rows[round(number * last / (_MOST_ROWS - 1))] for number in range(_MOST_ROWS)]
        note = Markup("<p>{} of {} rows, evenly spread.</p>").format(_MOST_ROWS, f"{len(table.rows):,}")
    head = _join(Markup('<th scope="col">{}</th>').format(name) for name in table.names)
    body = _join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(row[0], _join(map(Markup("<td>{}</td>").format, row[1:])))
        for row in rows
    )
    return Markup(
        '<details><summary>{}</summary>{}<div class="scroll"><table class="{}"><thead><tr>{}</tr></thead>'
        "<tbody>{}</tbody></table></div></details>"
    ).format(title, note, "words" if table.words else "numbers", head, body)


def _join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


_PAGE = Markup("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<main>{body}</main>
<footer>dflash {version}</footer>
</body>
</html>
""")

# Okabe and Ito's colours, a little darker on white and lighter on black where they would be faint.
STYLE = """
:root { --paper: #fff; --ink: #1a1c1f; --soft: #5b6168; --faint: #d9dce0; --ground: #f2f3f5; --warn: #a33b00;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b5518f; --c4: #b07d00; --c5: #3a9ad9; --c6: #3b3f45;
  --c7: #8a8f96 }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e8eaed; --soft: #a2a9b1; --faint: #343a41;
  --ground: #1f242a; --warn: #ffab73; --c0: #56b4e9; --c1: #ff8a3c; --c2: #2cc79a; --c3: #e39bc8; --c4: #f0c419;
  --c5: #8fd0ff; --c6: #d5d9de; --c7: #8a8f96 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif }
header, main, footer { max-width: 1240px; margin: 0 auto; padding: 0 20px }
header { padding-top: 24px } footer { padding-bottom: 24px; color: var(--soft) }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 19px; margin: 28px 0 8px; padding-top: 14px; border-top: 2px solid var(--faint);
  overflow-wrap: anywhere }
h3 { font-size: 16px; margin: 0 }
p { margin: 2px 0 8px; color: var(--soft); max-width: 75ch; overflow-wrap: anywhere }
.note { color: var(--warn) }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 18px; margin: 8px 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 28px 36px;
  margin: 18px 0; align-items: start }
figure { margin: 0; min-width: 0 } .scroll { overflow-x: auto }
svg { display: block; width: 100%; min-width: 460px; height: auto; font: 12px system-ui, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif }
details { margin: 6px 0 } summary { cursor: pointer; color: var(--soft) }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
thead th { color: var(--soft) }
th, td { padding: 2px 12px 2px 0; text-align: right; font-weight: normal; border-bottom: 1px solid var(--faint);
  vertical-align: top }
th:first-child { text-align: left } .words td, .words th { text-align: left; overflow-wrap: anywhere }
text { fill: var(--soft) } text.value { fill: var(--ink) } text.label { font-weight: 600 }
.grid { stroke: var(--faint) } .axis { stroke: var(--soft) } .lead { stroke: var(--faint) }
.edge { stroke: var(--c1); stroke-dasharray: 4 3; stroke-width: 1.3 } .ground { fill: var(--ground) }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .band { stroke: var(--paper); stroke-width: 0.6 }
.d1 { stroke-dasharray: 7 3 } .d2 { stroke-dasharray: 2 2 } .d3 { stroke-dasharray: 9 3 2 3 }
.d4 { stroke-dasharray: 12 4 } .d5 { stroke-dasharray: 4 4 } .d6 { stroke-dasharray: 1 3 }
.d7 { stroke-dasharray: 9 3 2 3 2 3 }
"""
STYLE += "".join(
    f".line.c{number} {{ stroke: var(--c{number}) }} .bar.c{number}, .dot.c{number}, .band.c{number}, "
    f"text.label.c{number} {{ fill: var(--c{number}) }}\n"
    for number in range(8)
)
STYLE += """@media print { :root { --paper: #fff; --ink: #000; --soft: #444; --faint: #ccc; --ground: #eee;
  --warn: #a33b00;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b5518f; --c4: #b07d00; --c5: #3a9ad9; --c6: #222; --c7: #777 }
  body { font-size: 11px; print-color-adjust: exact; -webkit-print-color-adjust: exact }
  main, header { padding: 0 } .figures { grid-template-columns: 1fr 1fr; gap: 16px 24px }
  svg, tr, dl { break-inside: avoid } svg { min-width: 0 } h2, h3, figcaption, summary { break-after: avoid }
  table { font-size: 8.5px } th, td { padding-right: 8px } .scroll { overflow: visible }
  details::details-content { content-visibility: visible; display: block } summary { list-style: none } }
"""
