"""Rows of files -> rows of one of three forms: a conversation, a raw text, or ready tokens.

What a row is, is told by its keys, row by row: `_PARSERS` is the one place where a further kind of row is
added. A bad row is a value (`Skipped`), not an exception: who reads decides whether to go on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.prompts.files import read_entries
from dflash_tool.prompts.messages import Message, parse_tools, parse_turns
from dflash_tool.prompts.reasons import BadRow, Reason, Skipped, kind, short

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation: OpenAI-style messages (`role`, `content` as a string, whatever else they hold)."""

    source: str
    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text for no template: learned from the character `start` on; `ended`: so is that it ends there."""

    source: str
    text: str
    start: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Ready tokens: `input_ids` [T] int32, `loss_mask` [T] uint8 of 0 and 1, T >= 1."""

    source: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


Row = ChatRow | TextRow | TokenRow


def read_rows(path: Path) -> Iterator[tuple[Row | Skipped, int]]:
    """Rows of one file with the bytes of it read so far. Raises `DataError` for a wrong or damaged file."""
    for source, value, bytes_done in read_entries(path, COLUMNS):
        yield value if isinstance(value, Skipped) else parse_row(value, source), bytes_done


def parse_row(value: Any, source: str) -> Row | Skipped:
    """One JSON value -> a row, or why it is none."""
    try:
        return _classify(value, source)
    except BadRow as bad:
        return Skipped(source, bad.reason, bad.detail)


def _classify(value: Any, source: str) -> Row:
    if not isinstance(value, dict):
        raise BadRow(Reason.NOT_AN_OBJECT, f"a JSON {kind(value)}")
    present = {key for key in value if value[key] is not None}
    for found in (present, value.keys()):  # null is absent, unless nothing else tells what the row would be
        for keys, parse in _PARSERS:
            if found >= set(keys):
                return parse(value, source)
    names = ", ".join(repr(key) for key in list(value)[:6]) or "none"
    expected = "'messages', 'conversations', 'prompt' and 'completion', 'text', or 'input_ids' and 'loss_mask'"
    raise BadRow(Reason.UNKNOWN_KEYS, f"{names[:80]}; expected {expected}")


def _parse_messages(row: Object, source: str) -> ChatRow:
    return ChatRow(source, parse_turns(row["messages"]), parse_tools(row.get("tools")))


def _parse_conversations(row: Object, source: str) -> ChatRow:
    return ChatRow(source, parse_turns(row["conversations"]), parse_tools(row.get("tools")))


def _parse_completion(row: Object, source: str) -> TextRow:
    prompt, completion = _raw(row, "prompt"), _raw(row, "completion")
    if not completion.strip():
        raise BadRow(Reason.EMPTY_ANSWER, "the completion")
    return TextRow(source, prompt + completion, len(prompt), ended=True)


def _parse_text(row: Object, source: str) -> TextRow:
    text = _raw(row, "text")
    if not text.strip():
        raise BadRow(Reason.EMPTY, "no text")
    return TextRow(source, text)


def _raw(row: Object, key: str) -> str:
    value = row[key]
    if isinstance(value, str):
        return value
    if value is None:
        raise BadRow(Reason.MISSING_CONTENT, f"{key} is null")
    remedy = ": write a conversation as 'messages'" if isinstance(value, list) else ""
    raise BadRow(Reason.CONTENT_NOT_TEXT, f"{key} is a JSON {kind(value)}{remedy}")


def _parse_tokens(row: Object, source: str) -> TokenRow:
    ids, mask = row["input_ids"], row["loss_mask"]
    for key, value in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(value, list):
            raise BadRow(Reason.NOT_A_LIST, f"{key} is a JSON {kind(value)}")
    if len(ids) != len(mask):
        raise BadRow(Reason.LENGTH_MISMATCH, f"{len(ids)} input_ids, {len(mask)} loss_mask")
    if not ids:
        raise BadRow(Reason.EMPTY, "input_ids is an empty list")
    if odd := [value for value in ids if type(value) is not int]:  # a bool is an int to isinstance
        raise BadRow(Reason.ID_NOT_INTEGER, f"{short(odd[0])} in input_ids")
    if min(ids) < 0:
        raise BadRow(Reason.ID_NEGATIVE, f"{short(min(ids))} in input_ids")
    if max(ids) > np.iinfo(np.int32).max:
        raise BadRow(Reason.ID_BEYOND_VOCABULARY, f"{short(max(ids))} in input_ids")
    if odd := [value for value in mask if type(value) is not int or value not in (0, 1)]:
        raise BadRow(Reason.MASK_NOT_BINARY, f"{short(odd[0])} in loss_mask")
    return TokenRow(source, np.array(ids, np.int32), np.array(mask, np.uint8))


# The first entry whose keys a row has wins; other keys are ignored, but for `tools`.
_PARSERS: list[tuple[tuple[str, ...], Callable[[Object, str], Row]]] = [
    (("input_ids", "loss_mask"), _parse_tokens),
    (("messages",), _parse_messages),
    (("conversations",), _parse_conversations),
    (("prompt", "completion"), _parse_completion),
    (("text",), _parse_text),
]
COLUMNS = frozenset({"tools"}.union(*(keys for keys, _ in _PARSERS)))
