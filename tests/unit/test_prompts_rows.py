"""Values -> rows, or the reason why not; lines of JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tool.prompts import ChatRow, Reason, Skipped, TextRow, TokenRow, read_rows
from dflash_tool.prompts.json_files import load
from dflash_tool.prompts.rows import parse_row

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def parse(value: Any) -> Any:
    loaded = load(value if isinstance(value, str) else json.dumps(value), "f:1")
    return loaded if isinstance(loaded, Skipped) else parse_row(loaded, "f:1")


def chat(*messages: Any) -> Any:
    return parse({"messages": list(messages)})


def test_openai() -> None:
    row = parse({"messages": [{"role": "system", "content": "s"}, USER, ANSWER], "id": 7, "tools": []})
    assert row == ChatRow("f:1", [{"role": "system", "content": "s"}, USER, ANSWER], None)


def test_sharegpt_roles() -> None:
    turns = [("System", "s"), ("human", "q"), ("gpt", "a"), ("user", "q"), ("model", "a"), ("tool", "t"), ("gpt", "b")]
    row = parse({"id": "x", "conversations": [{"from": f, "value": v, "weight": 1} for f, v in turns]})
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    assert row.messages == [{"role": r, "content": v} for r, (_, v) in zip(roles, turns, strict=True)]


def test_conversations_that_hold_openai_turns() -> None:
    assert parse({"conversations": [USER, ANSWER]}) == chat(USER, ANSWER)


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, "two", {"text": " three"}]
    assert chat({"role": "user", "content": parts}, ANSWER).messages[0]["content"] == "one two three"


def test_what_a_template_may_want_is_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None}
    bare = {"role": "assistant", "content": "a", "tool_calls": []}
    thought = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    tools = [{"type": "function"}]
    row = parse(
        {"messages": [USER, call, {"role": "tool", "content": "4", "name": "sum"}, thought, bare], "tools": tools}
    )
    assert row.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "name": "sum"},
        thought,
        {"role": "assistant", "content": "a"},
    ]
    assert row.tools == tools


def test_tokens() -> None:
    row = parse({"input_ids": [3, 2**31 - 1], "loss_mask": [0, 1], "messages": []})
    assert isinstance(row, TokenRow)
    assert (row.input_ids.tolist(), row.input_ids.dtype.name) == ([3, 2**31 - 1], "int32")
    assert (row.loss_mask.tolist(), row.loss_mask.dtype.name) == ([0, 1], "uint8")


def test_texts() -> None:
    assert parse({"prompt": "2+2=", "completion": " 4"}) == TextRow("f:1", "2+2= 4", 4, ended=True)
    assert parse({"prompt": "", "completion": "x"}) == TextRow("f:1", "x", 0, ended=True)
    assert parse({"text": " a\n", "id": 3}) == TextRow("f:1", " a\n")


def test_null_is_absent_unless_nothing_else_is_there() -> None:
    """Files written from a table have every key in every row."""
    keys = ("input_ids", "loss_mask", "messages", "conversations", "prompt", "completion", "text")
    for row in (
        {"messages": [USER, ANSWER]}, {"conversations": [USER, ANSWER]}, {"prompt": "p", "completion": "c"},
        {"text": "t"}, {"text": "t", "prompt": "p"},
    ):  # fmt: skip
        assert parse(dict.fromkeys(keys) | row) == parse(row)
    turns = [{"from": "human", "value": "q", "role": None, "content": None}, {**ANSWER, "from": None, "value": None}]
    assert parse({"conversations": turns}) == chat(USER, ANSWER)


def test_tool_calls_as_servers_hand_them_to_a_template() -> None:
    """Arguments are an object, though OpenAI's form writes them as text."""
    arguments = {"city": "Łódź", "days": [1, None]}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    for written in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
        as_text = {**call, "function": {"name": "weather", "arguments": written}}
        flat = {"name": "weather", "arguments": written}
        for calls in ([as_text, flat], json.dumps([as_text, flat])):
            (message,) = chat({"role": "assistant", "tool_calls": calls}).messages
            assert message["tool_calls"] == [call, {"name": "weather", "arguments": arguments}]
    for nothing in ("", None, "{}"):
        (message,) = chat(
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": nothing}}]}
        ).messages
        assert message["tool_calls"] == [{"function": {"name": "now", "arguments": {}}}]
    for odd in ("{not json", "[" * 200_000):
        (message,) = chat({"role": "assistant", "tool_calls": ["?", {"function": {"arguments": odd}}]}).messages
        assert message["tool_calls"] == ["?", {"function": {"arguments": odd}}]
    assert parse({"messages": [USER, ANSWER], "tools": '[{"name": "now"}]'}).tools == [{"name": "now"}]


def tokens(ids: Any, mask: Any) -> Any:
    return {"input_ids": ids, "loss_mask": mask}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('{"messages": [', Reason.NOT_JSON),
        ("{'messages': 1}", Reason.NOT_JSON),
        ('{"input_ids": [NaN], "loss_mask": [1]}', Reason.NOT_JSON),
        ('{"input_ids": [' + "9" * 5000 + '], "loss_mask": [1]}', Reason.NOT_JSON),
        ("[" * 200_000, Reason.NOT_JSON),
        ("[" * 200_000 + "]" * 200_000, Reason.NOT_JSON),
        ("[1, 2]", Reason.NOT_AN_OBJECT),
        ('"text"', Reason.NOT_AN_OBJECT),
        ("null", Reason.NOT_AN_OBJECT),
        ("{}", Reason.UNKNOWN_KEYS),
        ({"foo": 1}, Reason.UNKNOWN_KEYS),
        ({"input_ids": [1]}, Reason.UNKNOWN_KEYS),
        ({"messages": []}, Reason.NO_MESSAGES),
        ({"messages": None}, Reason.NO_MESSAGES),
        ({"messages": {"role": "user"}}, Reason.NO_MESSAGES),
        ({"messages": ["hi"]}, Reason.MESSAGE_NOT_AN_OBJECT),
        ({"messages": [USER, {"role": "wizard", "content": "?"}, ANSWER]}, Reason.UNKNOWN_ROLE),
        ({"messages": [{"content": "?"}, ANSWER]}, Reason.UNKNOWN_ROLE),
        ({"messages": [{"role": ["user"], "content": "?"}, ANSWER]}, Reason.UNKNOWN_ROLE),
        ({"conversations": [{"from": "narrator", "value": "?"}]}, Reason.UNKNOWN_ROLE),
        ({"conversations": [{"from": 3, "value": "?"}]}, Reason.UNKNOWN_ROLE),
        ({"messages": [USER, {"role": "assistant"}]}, Reason.MISSING_CONTENT),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, Reason.MISSING_CONTENT),
        ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "a"}]}, Reason.MISSING_CONTENT),
        ({"messages": [{"role": "user", "content": 5}, ANSWER]}, Reason.CONTENT_NOT_TEXT),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, Reason.CONTENT_NOT_TEXT),
        ({"messages": [{"role": "user", "content": [None]}, ANSWER]}, Reason.CONTENT_NOT_TEXT),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, Reason.EMPTY_ANSWER),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}, USER, ANSWER]}, Reason.EMPTY_ANSWER),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, Reason.EMPTY_ANSWER),
        ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": []}]}, Reason.EMPTY_ANSWER),
        ({"messages": [USER]}, Reason.NO_ANSWER),
        ({"prompt": "p"}, Reason.UNKNOWN_KEYS),
        ({"prompt": "p", "completion": ""}, Reason.EMPTY_ANSWER),
        ({"prompt": "p", "completion": None}, Reason.MISSING_CONTENT),
        ({"prompt": None, "completion": "c"}, Reason.MISSING_CONTENT),
        ({"prompt": [USER], "completion": [ANSWER]}, Reason.CONTENT_NOT_TEXT),
        ({"text": " \n"}, Reason.EMPTY),
        ({"text": None}, Reason.MISSING_CONTENT),
        ({"text": 7}, Reason.CONTENT_NOT_TEXT),
        (tokens([1, 2, 3], [0, 1]), Reason.LENGTH_MISMATCH),
        (tokens([], []), Reason.EMPTY),
        (tokens("123", [0, 1, 1]), Reason.NOT_A_LIST),
        (tokens([1], None), Reason.NOT_A_LIST),
        (tokens([1, -2], [0, 1]), Reason.ID_NEGATIVE),
        (tokens([1, -(10**300)], [0, 1]), Reason.ID_NEGATIVE),
        (tokens([1, 2**31], [0, 1]), Reason.ID_BEYOND_VOCABULARY),
        (tokens([1, 10**300], [0, 1]), Reason.ID_BEYOND_VOCABULARY),
        (tokens([1, 2.0], [0, 1]), Reason.ID_NOT_INTEGER),
        (tokens([1, True], [0, 1]), Reason.ID_NOT_INTEGER),
        (tokens([1, "2"], [0, 1]), Reason.ID_NOT_INTEGER),
        (tokens([1, [2]], [0, 1]), Reason.ID_NOT_INTEGER),
        (tokens([1, 2], [0, 2]), Reason.MASK_NOT_BINARY),
        (tokens([1, 2], [0, True]), Reason.MASK_NOT_BINARY),
        (tokens([1, 2], [0, 1.0]), Reason.MASK_NOT_BINARY),
        (tokens([1, 2], [0, [1]]), Reason.MASK_NOT_BINARY),
    ],
)  # fmt: skip
def test_bad_rows(value: Any, reason: Reason) -> None:
    row = parse(value)
    assert isinstance(row, Skipped)
    assert (row.reason, row.source) == (reason, "f:1")
    assert len(str(row)) < 200, "a message that fits a line"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "conversations",
                    "role",
                    "content",
                    "from",
                    "value",
                    "input_ids",
                    "loss_mask",
                    "text",
                    "prompt",
                    "completion",
                    "tool_calls",
                    "function",
                    "arguments",
                    "tools",
                ]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON | st.text().map(str.strip))
def test_no_row_raises(value: Any) -> None:
    row = parse(value)
    assert isinstance(row, ChatRow | TextRow | TokenRow | Skipped)


def test_lines(tmp_path: Path) -> None:
    line = json.dumps({"messages": [USER, {"role": "assistant", "content": "line\u2028separator \x85 kept"}]},
                      ensure_ascii=False).encode()  # fmt: skip
    content = b"\xef\xbb\xbf" + line + b"\r\n\r\n \t\n" + line + b"\n" + line
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    rows = list(read_rows(path))
    assert [row.source for row, _ in rows] == [f"{path}:{n}" for n in (1, 4, 5)]
    assert all(isinstance(row, ChatRow) and row.messages == rows[0][0].messages for row, _ in rows)  # type: ignore[union-attr]
    assert [done for _, done in rows] == [3 + len(line) + 2, len(content) - len(line), len(content)]


def test_a_mark_inside_the_file_is_no_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\xef\xbb\xbf{"a": 1}\n')
    assert [row.reason for row, _ in read_rows(path)] == [Reason.UNKNOWN_KEYS, Reason.NOT_JSON]  # type: ignore[union-attr]


def test_a_line_that_is_not_utf8_costs_that_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + '{"text": "é"}\n'.encode("latin-1") + b'{"text": "b"}\n')
    first, bad, last = (row for row, _ in read_rows(path))
    assert isinstance(first, TextRow)
    assert isinstance(last, TextRow)
    assert bad == Skipped(f"{path}:2", Reason.NOT_UNICODE, "not UTF-8 (byte 0xe9 at column 11)")
