"""Tool calls and tool results, from rows as they are found to what a template makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_tool.errors import DataError

from .prompts_kit import CHATML, chat, check_stats, make_tokenizer, run, supervised_text, write_rows

# As those of Qwen 2.5 and Hermes do.
TOOLS = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content + '' }}{% for call in m.tool_calls or [] %}{% set call = call.function or call %}\
<tool_call>{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = TOOLS.replace("{{ m.content + '' }}", "{% generation %}{{ m.content + '' }}").replace(
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}",
    "{% endfor %}<|im_end|>{% endgeneration %}\n\n{% endif %}{% endfor %}",
)
ARGUMENTS = {"city": "Lima", "days": 2}
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Lima", "days": 2}}</tool_call><|im_end|>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}


def conversation(call: Any, **content: Any) -> list[dict[str, Any]]:
    question, answer = chat("Weather?", "Sunny, then rain.")
    return [
        question,
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}, ",rain"]},
        answer,
    ]  # fmt: skip


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=str)
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=2)], ids=str)
def test_every_way_to_write_a_call_gives_one_sample(tmp_path: Path, content: Any, arguments: Any) -> None:
    tokenizer = make_tokenizer(TOOLS)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}},
        {"name": "weather", "arguments": arguments},
    ]
    rows = [{"messages": conversation(call, **content), "tools": [TOOL]} for call in calls]
    rows.append({**rows[0], "tools": json.dumps([TOOL])})
    samples, stats = run(write_rows(tmp_path / "rows.jsonl", rows), tokenizer)
    assert (len(samples), stats.duplicates) == (3, 2)
    text = tokenizer.decode(samples[0]["input_ids"])
    assert text == (
        f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLED}\n<|im_start|>user\n<tool_response>sun,rain</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nSunny, then rain.<|im_end|>\n"
    )
    assert supervised_text(tokenizer, samples[0]) == CALLED + "\x1f" + "Sunny, then rain.<|im_end|>"


def test_markers(tmp_path: Path) -> None:
    call = {"function": {"name": "weather", "arguments": ARGUMENTS}}
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": conversation(call, content="Let me see. ")}])
    tokenizer = make_tokenizer(MARKED)
    (sample,), _ = run(path, tokenizer)
    assert supervised_text(tokenizer, sample) == "Let me see. " + CALLED + "\x1f" + "Sunny, then rain.<|im_end|>"


def test_sharegpt_tool_results(tmp_path: Path) -> None:
    turns = [("human", "Weather?"), ("gpt", "call"), ("observation", "sun"), ("gpt", "Sunny.")]
    row = {"conversations": [{"from": name, "value": value} for name, value in turns]}
    tokenizer = make_tokenizer(TOOLS)
    (sample,), _ = run(write_rows(tmp_path / "rows.jsonl", [row]), tokenizer)
    assert "<tool_response>sun</tool_response>" in tokenizer.decode(sample["input_ids"])
    assert supervised_text(tokenizer, sample) == "call<|im_end|>\x1fSunny.<|im_end|>"


# What templates do that know of no calls, or of one alone; the question and the tools name the function as well.
SILENT = {
    "none": CHATML,
    "none, tools listed": TOOLS.replace("m.tool_calls or []", "[]"),
    "none, content as parts": CHATML.replace(
        "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"
    ),
    "the first": TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
}


@pytest.mark.parametrize("template", SILENT.values(), ids=SILENT)
@pytest.mark.parametrize("content", ["", "Let me call weather. "])
def test_a_row_whose_call_the_template_leaves_out_is_skipped(tmp_path: Path, template: str, content: str) -> None:
    call = {"function": {"name": "weather", "arguments": ARGUMENTS}}
    row = {"messages": conversation(call, content=content), "tools": [TOOL]}
    row["messages"][0]["content"] = "What does weather say?"
    row["messages"][1]["tool_calls"] *= 2
    path = write_rows(tmp_path / "rows.jsonl", [row, {"messages": chat("q", "a good row")}])
    samples, stats = run(path, make_tokenizer(template))
    check_stats(stats, samples)
    assert [sample["source"] for sample in samples] == [f"{path}:2"]
    assert stats.skipped == {"tool call left out by the template": 1}
    (first,) = stats.examples["tool call left out by the template"]
    assert first.startswith(f"{path}:1: message 2 calls 'weather'")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: tool call left out"):
        run(path, make_tokenizer(template), strict=True)


@pytest.mark.parametrize("call", ["weather()", ["weather()"], [7], {"name": None}, [{"function": "weather"}]], ids=str)
def test_calls_of_no_known_form(tmp_path: Path, call: Any) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": call}]}
    path = write_rows(tmp_path / "rows.jsonl", [row, {"messages": chat("q", "a good row")}])
    assert run(path, make_tokenizer(CHATML))[1].skipped == {"tool call left out by the template": 1}
    printed = CHATML.replace("<|im_end|>", "{{ m.tool_calls }}<|im_end|>")
    assert run(path, make_tokenizer(printed))[1].skipped == {}


def test_a_template_that_needs_the_calls_renders_them(tmp_path: Path) -> None:
    """Taken away they make it refuse, so it does look at them."""
    picky = TOOLS.replace("{{ m.content + '' }}", "{{ (m.content or m.tool_calls[0].function.name) and m.content }}")
    row = {"messages": conversation({"function": {"name": "weather", "arguments": ARGUMENTS}}, content="")}
    (sample,), stats = run(write_rows(tmp_path / "rows.jsonl", [row]), make_tokenizer(picky))
    assert stats.skipped == {}
    assert sample["supervised"] > 2


def test_sharegpt_calls(tmp_path: Path) -> None:
    call = {"name": "weather", "arguments": ARGUMENTS}
    turns = [{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": "", "tool_calls": [call]}]
    path = write_rows(tmp_path / "rows.jsonl", [{"conversations": turns}])
    tokenizer = make_tokenizer(TOOLS)
    (sample,), _ = run(path, tokenizer)
    assert supervised_text(tokenizer, sample) == CALLED
