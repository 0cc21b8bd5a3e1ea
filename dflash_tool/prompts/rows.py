"""JSONL files -> rows in one of two forms: a conversation (`ChatRow`) or ready tokens (`TokenRow`).

Files are streamed, a line at a time: UTF-8 with or without a byte-order mark, LF or CRLF, blank lines
ignored. What a row is, is told by its keys, row by row: `_PARSERS` is the one place where a further kind
of row is added. A bad row is a value (`Skipped`), not an exception: who reads decides whether to go on.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import DataError
from dflash_tool.prompts.reasons import Reason, Skipped

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "claude": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
Message = dict[str, Any]
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation: OpenAI-style messages (`role`, `content` as a string, whatever else they hold)."""

    source: str
    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Ready tokens: `input_ids` [T] int32, `loss_mask` [T] uint8 of 0 and 1, T >= 1."""

    source: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


Row = ChatRow | TokenRow


class _Bad(Exception):  # noqa: N818 - never leaves this file
    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def check_files(paths: list[Path]) -> int:
    """Return their bytes in all. Raises `DataError` for what is missing, a folder or unreadable."""
    total = 0
    for path in paths:
        try:
            if path.is_dir():
                raise DataError(f"{path} is a folder: --data takes JSONL files; name the files in it")
            with path.open("rb") as file:
                total += file.seek(0, 2)
        except FileNotFoundError:
            raise DataError(f"{path}: no such data file; --data takes JSONL files") from None
        except OSError as error:
            raise DataError(f"{path}: can't read this data file: {error.strerror or error}") from error
    return total


def read_rows(path: Path) -> Iterator[tuple[Row | Skipped, int]]:
    """Rows of one JSONL file with the bytes read so far.

    Raises `DataError` if the file is unreadable or not UTF-8: that is a wrong file, not a bad row.
    """
    done = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                done += len(line)
                source = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{source}: not UTF-8 (byte {line[error.start]:#04x} at column {error.start + 1}); "
                        "data files are JSON lines in UTF-8: convert the file first"
                    ) from None
                if text:
                    yield parse_row(text, source), done
    except OSError as error:
        raise DataError(f"{path}: can't read this data file: {error.strerror or error}") from error


def parse_row(text: str, source: str) -> Row | Skipped:
    """One line of JSON -> a row, or why it is none."""
    try:
        return _classify(_load(text), source)
    except _Bad as bad:
        return Skipped(source, bad.reason, bad.detail)


def _load(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _Bad(Reason.NOT_JSON, "nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _Bad(Reason.NOT_JSON, f"{error.msg} (column {error.colno})") from None
    except ValueError as error:  # a constant that JSON lacks, an integer of thousands of digits
        raise _Bad(Reason.NOT_JSON, str(error)) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _classify(value: Any, source: str) -> Row:
    if not isinstance(value, dict):
        raise _Bad(Reason.NOT_AN_OBJECT, f"a JSON {_kind(value)}")
    for keys, parse in _PARSERS:
        if all(key in value for key in keys):
            return parse(value, source)
    found = ", ".join(repr(key) for key in list(value)[:6]) or "none"
    expected = "'messages', 'conversations', or 'input_ids' and 'loss_mask'"
    raise _Bad(Reason.UNKNOWN_KEYS, f"{found}; expected {expected}")


def _parse_messages(row: Object, source: str) -> ChatRow:
    return _chat(row["messages"], row.get("tools"), source)


def _parse_conversations(row: Object, source: str) -> ChatRow:
    return _chat(row["conversations"], row.get("tools"), source)


def _chat(turns: Any, tools: Any, source: str) -> ChatRow:
    if not isinstance(turns, list) or not turns:
        raise _Bad(Reason.NO_MESSAGES, "an empty list" if turns == [] else f"a JSON {_kind(turns)}, no list")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise _Bad(Reason.NO_ANSWER, "nothing to learn from")
    return ChatRow(source, messages, tools if isinstance(tools, list) and tools else None)


def _message(turn: Any, number: int) -> Message:
    """Turn OpenAI (role, content) or ShareGPT (from, value) into role, content as text, other keys."""
    where = f"message {number}"
    if not isinstance(turn, dict):
        raise _Bad(Reason.MESSAGE_NOT_AN_OBJECT, f"{where} is a JSON {_kind(turn)}")
    if "role" in turn or "from" not in turn:
        role, raw = turn.get("role"), turn.get("content")
        known = isinstance(role, str) and role in ROLES
        extra = {key: turn[key] for key in turn if key not in ("role", "content") and turn[key] is not None}
    else:
        name, raw = turn["from"], turn.get("value")
        role = SHAREGPT_ROLES.get(name.lower()) if isinstance(name, str) else None
        known, extra = role is not None, {}
        role = role or name
    if not known:
        raise _Bad(Reason.UNKNOWN_ROLE, f"{where} has role {_short(role)}")
    if raw is None and role == "assistant" and extra.get("tool_calls"):
        return {"role": role, **extra}
    content = _text(raw, where)
    if role == "assistant" and not content.strip() and not extra.get("tool_calls"):
        raise _Bad(Reason.EMPTY_ANSWER, where)
    return {"role": role, "content": content, **extra}


def _text(content: Any, where: str) -> str:
    """Take a string, or a list of strings and text parts, which are joined."""
    if isinstance(content, str):
        return content
    if content is None:
        raise _Bad(Reason.MISSING_CONTENT, f"{where} has no content")
    if not isinstance(content, list):
        raise _Bad(Reason.CONTENT_NOT_TEXT, f"the content of {where} is a JSON {_kind(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise _Bad(Reason.CONTENT_NOT_TEXT, f"{where} has a part of type {_short(kind)}")
        texts.append(text)
    return "".join(texts)


def _parse_tokens(row: Object, source: str) -> TokenRow:
    ids, mask = row["input_ids"], row["loss_mask"]
    for key, value in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(value, list):
            raise _Bad(Reason.NOT_A_LIST, f"{key} is a JSON {_kind(value)}")
    if len(ids) != len(mask):
        raise _Bad(Reason.LENGTH_MISMATCH, f"{len(ids)} input_ids, {len(mask)} loss_mask")
    if not ids:
        raise _Bad(Reason.EMPTY, "input_ids is an empty list")
    if odd := [value for value in ids if type(value) is not int]:  # a bool is an int to isinstance
        raise _Bad(Reason.ID_NOT_INTEGER, f"{_short(odd[0])} in input_ids")
    if min(ids) < 0:
        raise _Bad(Reason.ID_NEGATIVE, f"{_short(min(ids))} in input_ids")
    if max(ids) > np.iinfo(np.int32).max:
        raise _Bad(Reason.ID_BEYOND_VOCABULARY, f"{_short(max(ids))} in input_ids")
    if odd := [value for value in mask if type(value) is not int or value not in (0, 1)]:
        raise _Bad(Reason.MASK_NOT_BINARY, f"{_short(odd[0])} in loss_mask")
    return TokenRow(source, np.array(ids, np.int32), np.array(mask, np.uint8))


# The first entry whose keys a row has wins; other keys are ignored.
_PARSERS: list[tuple[tuple[str, ...], Callable[[Object, str], Row]]] = [
    (("input_ids", "loss_mask"), _parse_tokens),
    (("messages",), _parse_messages),
    (("conversations",), _parse_conversations),
]
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "number")


def _short(value: Any) -> str:
    """`value` as text for a message, cut to a length that fits one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer too long to print
        text = f"a {_kind(value)}"
    return text if len(text) <= 40 else text[:37] + "..."
