"""How numbers look to people: counts with separators, bytes in decimal units, times, shares, bars."""

from collections.abc import Sequence

from rich.control import strip_control_codes
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def count(value: int) -> str:
    """1234567 -> 1,234,567."""
    return f"{value:,}"


def size(nbytes: int) -> str:
    """1234567 -> 1.2 MB (decimal units, as disks are sold and `ls -lh --si` prints)."""
    return decimal(nbytes)


def share(value: float, digits: int = 1) -> str:
    """0.0123 -> 1.2 %."""
    return f"{100 * value:.{digits}f} %"


def duration(seconds: float) -> str:
    """4.2 -> 4.2 s, 75 -> 1:15, 3675 -> 1:01:15."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bar(value: float, width: int) -> str:
    """A horizontal bar of `value` (0..1) of `width` cells, in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, value)) * width * 8)
    full, part = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[part] if part else "")


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """A borderless table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(strip_control_codes(value)))
    return table


def waits_text(waited: dict[str, float]) -> str:
    """Who waited for what, the longest first; what nobody waited for is left out."""
    real = sorted(((seconds, who) for who, seconds in waited.items() if seconds >= 0.05), reverse=True)
    return ", ".join(f"{who} {duration(seconds)}" for seconds, who in real) or "nobody"
