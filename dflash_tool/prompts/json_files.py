"""JSON lines, or one JSON array -> their values, with bounded memory.

JSON lines are streamed a line at a time: UTF-8 with or without a byte-order mark, LF or CRLF, blank lines
ignored; a line that is no JSON, or not UTF-8, costs that line (`Skipped`).

An array is decoded element by element over a buffer that grows until its first element is whole and forgets
what is done: at most a block and twice the largest element are in memory, each character is decoded about
twice at most. Where it stops being JSON nobody can tell the rows that follow, so that is an error, not a row.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from dflash_tool.errors import DataError
from dflash_tool.prompts.entries import Entry
from dflash_tool.prompts.reasons import Reason, Skipped

_BLOCK_CHARACTERS = 1 << 20
# A decoder that fails this close to the buffer's end may only have met its end ("-Infinit").
_LONGEST_WORD = 16
_BLANKS = re.compile(r"[ \t\n\r]*")
Position = Callable[[], int]
Stream: TypeAlias = "io.BufferedReader[Any]"


def read_lines(path: Path, stream: Stream, position: Position) -> Iterator[Entry]:
    """A value for each line that isn't blank."""
    for number, line in enumerate(stream, start=1):
        source = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
        except UnicodeDecodeError as error:
            detail = f"not UTF-8 (byte {error.object[error.start]:#04x} at column {error.start + 1})"
            yield Entry(source, Skipped(source, Reason.NOT_UNICODE, detail), position())
            continue
        if text:
            yield Entry(source, load(text, source), position())


def load(text: str, source: str) -> Any:
    """One JSON value, or `Skipped` with what is wrong with it."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        detail = "nested too deeply"
    except json.JSONDecodeError as error:
        detail = f"{error.msg} (column {error.colno})"
    except ValueError as error:  # a constant that JSON lacks, an integer of thousands of digits
        detail = str(error)
    return Skipped(source, Reason.NOT_JSON, detail)


def looks_like_array(head: bytes) -> bool:
    """Whether a file that begins like this is one array, rather than JSON lines of which the first is one."""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    line, _, rest = head.partition(b"\n")
    if not head.startswith(b"["):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return not rest.strip()


def read_array(path: Path, stream: Stream, position: Position) -> Iterator[Entry]:
    """A value for each element. Raises `DataError`, naming row and line, where it stops being a JSON array."""
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as file:
        array = _Array(path, file)
        array.take("[", "'['")
        more = array.peek() != "]"
        while more:
            array.row += 1
            source = f"{path}:{array.row}"
            yield Entry(source, array.value(source), position())
            more = array.peek() == ","
            if more:
                array.take(",", "','")
        array.take("]", "',' or ']'")
        if array.peek():
            raise array.fault(f"something follows the array's end: {array.rest()!r}")


class _Array:
    """The text of an array from `_place` on, as far as it was read; `row` counts the values that were begun."""

    def __init__(self, path: Path, file: io.TextIOWrapper) -> None:
        self._path, self._file = path, file
        self._text, self._place, self._ended = "", 0, False
        self._lines = 0  # before `_text`
        self.row = 0

    def peek(self) -> str:
        """Skip blanks; return the next character, "" at the end of the file."""
        while True:
            blanks = _BLANKS.match(self._text, self._place)
            assert blanks is not None, "matches nothing at all too"
            self._place = blanks.end()
            if self._place < len(self._text) or self._ended:
                return self._text[self._place : self._place + 1]
            self._read_more()

    def take(self, character: str, expected: str) -> None:
        """Take this character, which must come next."""
        if (found := self.peek()) != character:
            raise self.fault(f"expected {expected}, found {self.rest()!r}" if found else "the file ends here")
        self._place += 1

    def value(self, source: str) -> Any:
        """Take one value; `Skipped` if it is one for Python's decoder only (NaN)."""
        self.peek()
        while True:
            try:
                value, end = self._decode(source)
            except RecursionError:
                raise self.fault("nested too deeply") from None
            except json.JSONDecodeError as error:
                open_string = error.msg.startswith("Unterminated string")
                if self._ended or not (open_string or self._near_end(error.pos)):
                    cut_off = open_string or error.pos >= len(self._text)
                    said = "the file ends in the middle of it" if cut_off else error.msg
                    raise self.fault(said, error.pos) from None
            else:
                if self._ended or not (isinstance(value, int | float) and self._near_end(end)):
                    self._place = end
                    return value
            self._read_more()

    def rest(self) -> str:
        """The next few characters, for people."""
        return self._text[self._place : self._place + 20]

    def fault(self, what: str, place: int | None = None) -> DataError:
        """Build the error for what is wrong in this row, at this place of the text."""
        line = self._lines + self._text.count("\n", 0, self._place if place is None else place) + 1
        return DataError(
            f"{self._path}:{self.row} (line {line}): not a whole JSON array: {what}; what follows can't be told "
            "apart: mend the file, or convert it to JSON lines, where a bad row costs that row only"
        )

    def _decode(self, source: str) -> tuple[Any, int]:
        try:
            return _STRICT.raw_decode(self._text, self._place)
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # see `load`; but here its end must be found
            _, end = _LENIENT.raw_decode(self._text, self._place)
            return Skipped(source, Reason.NOT_JSON, str(error)), end

    def _near_end(self, place: int) -> bool:
        return place + _LONGEST_WORD >= len(self._text)

    def _read_more(self) -> None:
        self._lines += self._text.count("\n", 0, self._place)
        rest = self._text[self._place :]
        try:
            block = self._file.read(max(_BLOCK_CHARACTERS, len(rest)))
        except UnicodeDecodeError as error:
            wrong = error.object[error.start]
            raise DataError(
                f"{self._path}:{self.row} or after: not UTF-8 (byte {wrong:#04x}); convert the file first"
            ) from None
        self._text, self._place, self._ended = rest + block, 0, not block


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)
_LENIENT = json.JSONDecoder(parse_constant=lambda _: None, parse_int=lambda _: 0)
