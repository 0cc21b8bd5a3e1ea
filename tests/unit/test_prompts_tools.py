"""Tool calls and tool results, from rows as they are found to what a template makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from .prompts_kit import chat, make_tokenizer, run, supervised_text, write_rows

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
