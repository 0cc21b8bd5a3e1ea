"""Why a row of the data gives no sample: short stable names to count by, and a detail for people."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """The key under which a skipped row is counted. The values stand in manifests: never reword one."""

    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    UNKNOWN_KEYS = "unknown keys"
    NO_MESSAGES = "no messages"
    MESSAGE_NOT_AN_OBJECT = "message not an object"
    UNKNOWN_ROLE = "unknown role"
    MISSING_CONTENT = "missing content"
    CONTENT_NOT_TEXT = "content not text"
    EMPTY_ANSWER = "empty answer"
    NO_ANSWER = "no assistant turn"
    NOT_UNICODE = "not valid Unicode"
    TEMPLATE_REFUSED = "template refused"
    CALL_LEFT_OUT = "tool call left out by the template"
    PROMPT_DIFFERS = "generation prompt differs"
    NOT_A_LIST = "not a list"
    EMPTY = "empty"
    LENGTH_MISMATCH = "length mismatch"
    ID_NOT_INTEGER = "token id not an integer"
    ID_NEGATIVE = "negative token id"
    ID_BEYOND_VOCABULARY = "token id beyond the vocabulary"
    MASK_NOT_BINARY = "mask not 0/1"
    MASK_TOKEN = "contains the mask token"
    TOO_LONG = "too long"
    NO_ANCHOR = "no anchor"
    NO_ANCHOR_AFTER_CUT = "no anchor within the maximum length"


# What the user asked for with a maximum length is no fault of the data: `strict` lets it pass.
ASKED_FOR = frozenset({Reason.TOO_LONG, Reason.NO_ANCHOR_AFTER_CUT})


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row, or one turn of a split conversation, that gives no sample. `source` is `file:line`."""

    source: str
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}" + (f": {self.detail}" if self.detail else "")


class BadRow(Exception):  # noqa: N818 - no error: `parse_row` makes it a `Skipped`
    """Raised while a row is looked at, deep inside it."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


_KINDS = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    type(None): "null",
    int: "number",
    float: "number",
}


def kind(value: Any) -> str:
    """What JSON calls a value of this type; Parquet has some more (bytes, dates)."""
    return _KINDS.get(type(value), type(value).__name__)


def short(value: Any) -> str:
    """`value` as text for a message, cut to a length that fits one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer too long to print
        text = f"a {kind(value)}"
    return text if len(text) <= 40 else text[:37] + "..."
