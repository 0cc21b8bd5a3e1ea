"""Numbers in sentences, tables and on axes: counts with separators, decimal units, times, shares."""


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """(1, "sample") -> "1 sample", (1234, "sample") -> "1,234 samples"; `nouns` where an s isn't enough."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def verb(number: int, one: str, several: str) -> str:
    """The form that goes with the number: "is" or "are"."""
    return one if number == 1 else several


def count(value: int) -> str:
    """1234567 -> 1,234,567."""
    return f"{value:,}"


def size(nbytes: float) -> str:
    """1234567 -> 1.2 MB (decimal units, as disks are sold and `ls -lh --si` prints)."""
    if abs(nbytes) < 1000:
        return counted(round(nbytes), "byte")
    units = ("kB", "MB", "GB", "TB", "PB", "EB")
    power = next((power for power in range(len(units)) if abs(nbytes) < 1000.0 ** (power + 2)), len(units) - 1)
    return f"{nbytes / 1000 ** (power + 1):,.1f} {units[power]}"


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


def short(value: float) -> str:
    """For an axis: 0.0012 -> 0.0012, 12.5 -> 12.5, 12345 -> 12.3k, 12345678 -> 12.3M."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * factor or (factor > 1e3 and abs(value) >= factor):
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}" if value and abs(value) < 1000 else f"{value:,.0f}"
