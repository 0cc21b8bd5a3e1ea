"""Turns of a conversation, OpenAI's (`role`, `content`) or ShareGPT's (`from`, `value`) -> messages for a template.

Content given as a list of parts is joined to one text. Tool calls are brought to the form in which servers
hand them to a chat template: content as text, arguments as an object even if the row has them as JSON text.
A key that is null counts as absent (Parquet, and what was written from it, has every key in every turn).
"""

import json
from typing import Any

from dflash_tool.prompts.reasons import BadRow, Reason, kind, short

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


def parse_turns(turns: Any) -> list[Message]:
    """A list of turns -> messages, at least one of them the assistant's. Raises `BadRow`."""
    if not isinstance(turns, list) or not turns:
        raise BadRow(Reason.NO_MESSAGES, "an empty list" if turns == [] else f"a JSON {kind(turns)}, no list")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow(Reason.NO_ANSWER, "nothing to learn from")
    return messages


def parse_tools(tools: Any) -> list[Any] | None:
    """The tools that a conversation may call, as a list or as JSON text of one; None for none."""
    tools = _from_json(tools)
    return tools if isinstance(tools, list) and tools else None


def _message(turn: Any, number: int) -> Message:
    """One turn -> `role`, `content` as text, whatever else it holds."""
    where = f"message {number}"
    if not isinstance(turn, dict):
        raise BadRow(Reason.MESSAGE_NOT_AN_OBJECT, f"{where} is a JSON {kind(turn)}")
    turn = {key: value for key, value in turn.items() if value is not None}
    if "role" in turn or "from" not in turn:
        role, raw = turn.get("role"), turn.get("content")
        known = isinstance(role, str) and role in ROLES
        extra = {key: turn[key] for key in turn if key not in ("role", "content", "from", "value")}
    else:
        name, raw = turn["from"], turn.get("value")
        role = SHAREGPT_ROLES.get(name.lower()) if isinstance(name, str) else None
        known, extra = role is not None, {key: turn[key] for key in turn if key == "tool_calls"}
        role = role or name
    if not known:
        raise BadRow(Reason.UNKNOWN_ROLE, f"{where} has role {short(role)}")
    if calls := _tool_calls(extra.pop("tool_calls", None)):
        extra["tool_calls"] = calls
    speaks = role == "assistant" and not calls
    content = _text("" if raw is None and role == "assistant" and calls else raw, where)
    if speaks and not content.strip():
        raise BadRow(Reason.EMPTY_ANSWER, where)
    return {"role": role, "content": content, **extra}


def _text(content: Any, where: str) -> str:
    """Take a string, or a list of strings and text parts, which are joined."""
    if isinstance(content, str):
        return content
    if content is None:
        raise BadRow(Reason.MISSING_CONTENT, f"{where} has no content")
    if not isinstance(content, list):
        raise BadRow(Reason.CONTENT_NOT_TEXT, f"the content of {where} is a JSON {kind(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            found = part.get("type") if isinstance(part, dict) else kind(part)
            raise BadRow(Reason.CONTENT_NOT_TEXT, f"{where} has a part of type {short(found)}")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any) -> Any:
    """Calls with their arguments as objects: inside `function`, or beside the name. Anything else as it is."""
    calls = _from_json(calls)
    return [_tool_call(call) for call in calls] if isinstance(calls, list) else calls


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    return _with_arguments(call) if "arguments" in call else call


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = _from_json(function.get("arguments"))
    return {**function, "arguments": {} if arguments in (None, "") else arguments}


def _from_json(value: Any) -> Any:
    """What a text of JSON says, a text that is none as it is, any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
