"""Numbers in sentences."""


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """(1, "sample") -> "1 sample", (1234, "sample") -> "1,234 samples"; `nouns` where an s isn't enough."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def verb(number: int, one: str, several: str) -> str:
    """The form that goes with the number: "is" or "are"."""
    return one if number == 1 else several
