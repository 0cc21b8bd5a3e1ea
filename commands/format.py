"""How numbers look in a terminal: bars, sparks, tables; counts, sizes, times and shares as everywhere."""

import math
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import strip_control_codes
from rich.table import Table
from rich.text import Text

from dflash_tool.wording import count, duration, share, size

__all__ = ["Columns", "bar", "count", "duration", "facts", "share", "size", "spark", "waits_text"]

_GAP = 2
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SPARKS = "▁▂▃▄▅▆▇█"


def bar(value: float, width: int) -> str:
    """A horizontal bar of `value` (0..1) of `width` cells, in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, value)) * width * 8)
    full, part = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[part] if part else "")


def spark(values: Sequence[float], cells: int = 40) -> str:
    """The newest values as a line of little bars, from their lowest to their highest."""
    shown = [value for value in values if math.isfinite(value)][-cells:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((value - low) / (high - low) * top) if high > low else 0] for value in shown)


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """A borderless table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # a long path goes on in the next line
    for name, value in rows:
        table.add_row(name, Text(strip_control_codes(value)))
    return table


class Columns:
    """Columns of numbers under their names, of which none is ever cut or wrapped.

    On a narrow console those that don't fit come in a further block, beside the first column again.
    """

    def __init__(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._columns = list(zip(names, *rows, strict=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """As tables no wider than the console, unless a pair of columns is."""
        first, *others = self._columns
        blocks: list[list[tuple[str, ...]]] = []
        room = 0
        for column in others:
            room -= _width(column)
            if room < 0 or not blocks:
                blocks.append([first])
                room = options.max_width - _width(first) + _GAP - _width(column)
            blocks[-1].append(column)
        for number, block in enumerate(blocks):
            if number:
                yield ""
            yield _block(block)


def _width(column: tuple[str, ...]) -> int:
    """Cells of a column with the gap behind it."""
    return max(map(cell_len, column)) + _GAP


def _block(columns: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP // 2), header_style="dim")
    for name, *_ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*row)
    return table


def waits_text(waited: dict[str, float]) -> str:
    """Who waited for what, the longest first; what nobody waited for is left out."""
    real = sorted(((seconds, who) for who, seconds in waited.items() if seconds >= 0.05), reverse=True)
    return ", ".join(f"{who} {duration(seconds)}" for seconds, who in real) or "nobody"
