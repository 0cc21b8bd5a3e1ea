"""Which characters are learned, for templates that behave as the well-known ones do."""

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tool.errors import ConfigError, TargetError
from dflash_tool.prompts import ChatRow, ChatTemplate, Reason, Skipped
from dflash_tool.prompts.render import RenderedText

from .prompts_kit import (
    CHATML,
    END_OF_TEXT,
    LLAMA3,
    MARKED,
    PARTS,
    PHI3,
    PLAIN,
    PLAIN_EOS,
    QWEN3,
    QWEN3_MARKED,
    SPECIALS,
    STRICT,
    chat,
    make_tokenizer,
    run_chats,
    slow_mask,
    supervised_text,
)

Messages = list[dict[str, Any]]


def render(template: str, messages: Messages, *, turns: Any = "each", tools: Any = None, **args: Any) -> Any:
    tokenizer = make_tokenizer(template, eos_token=END_OF_TEXT)
    return ChatTemplate(tokenizer, args, turns).render(ChatRow("f:1", messages, tools))


def learned(part: RenderedText) -> list[str]:
    return [part.text[start:end] for start, end in part.spans]


def one(template: str, messages: Messages, **options: Any) -> RenderedText:
    rendered = render(template, messages, **options)
    assert not rendered.split
    (part,) = rendered.parts
    assert isinstance(part, RenderedText), part
    return part


TWO_TURNS = chat("q1", "a1", "q2", " a2\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["a1<|im_end|>", " a2\n<|im_end|>"]),
        (MARKED, ["a1<|im_end|>", " a2\n<|im_end|>"]),
        (LLAMA3, ["a1<|eot_id|>", "a2<|eot_id|>"]),
        (PHI3, ["a1<|end|>", " a2\n<|end|>"]),
        (PLAIN, ["a1\n", " a2\n\n"]),
        (PLAIN_EOS, ["a1", " a2\n<|endoftext|>"]),
        (STRICT, ["a1<|im_end|>", " a2\n<|im_end|>"]),
    ],
    ids=["chatml", "marked", "llama3", "phi3", "plain", "plain-eos", "strict"],
)
def test_what_is_learned(template: str, expected: list[str]) -> None:
    part = one(template, TWO_TURNS)
    tokenizer = make_tokenizer(template, eos_token=END_OF_TEXT)
    assert part.text == tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert learned(part) == expected


def test_the_empty_thought_before_the_last_answer() -> None:
    """Without any thinking in the data, Qwen3 renders its last answer otherwise than the earlier ones."""
    empty = "<think>\n\n</think>\n\n"
    assert [learned(part) for part in render(QWEN3, TWO_TURNS).parts] == [
        [empty + "a1<|im_end|>"],
        [empty + " a2\n<|im_end|>"],
    ]


def test_the_prompt_a_server_sends_is_what_stands_before_the_answer() -> None:
    for template in (CHATML, MARKED, LLAMA3, PHI3, PLAIN, PLAIN_EOS):
        part = one(template, TWO_TURNS)
        tokenizer = make_tokenizer(template, eos_token=END_OF_TEXT)
        prompt = tokenizer.apply_chat_template(TWO_TURNS[:3], tokenize=False, add_generation_prompt=True)
        assert part.text[: part.spans[1][0]] == prompt


@pytest.mark.parametrize("template", [QWEN3, QWEN3_MARKED])
def test_thinking_that_the_template_strips_later(template: str) -> None:
    messages = chat("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
    rendered = render(template, messages)
    assert rendered.split
    assert [learned(part) for part in rendered.parts] == [
        ["<think>\nt1\n</think>\n\na1<|im_end|>"],
        ["<think>\nt2\n</think>\n\na2<|im_end|>"],
    ]
    tokenizer = make_tokenizer(template)
    for part, last in zip(rendered.parts, (2, 4), strict=True):
        assert part.text == tokenizer.apply_chat_template(messages[:last], tokenize=False)
    assert "t1" not in rendered.parts[1].text
    (last_only,) = render(template, messages, turns="last").parts
    assert last_only == rendered.parts[1]


@pytest.mark.parametrize("template", [QWEN3, QWEN3_MARKED])
def test_thinking_off(template: str) -> None:
    """The empty thought stands in the prompt then: it isn't learned."""
    part = one(template, chat("q1", "a1"), enable_thinking=False)
    assert learned(part) == ["a1<|im_end|>"]
    assert part.text.endswith("assistant\n<think>\n\n</think>\n\na1<|im_end|>\n")


@pytest.mark.parametrize("template", [QWEN3, QWEN3_MARKED])
def test_answers_that_think_though_thinking_is_off(template: str) -> None:
    """A server would send another prompt than the one that these answers follow."""
    (part,) = render(template, chat("q", "<think>\nhm\n</think>\n\na"), enable_thinking=False).parts
    assert isinstance(part, Skipped)
    assert part.reason is Reason.PROMPT_DIFFERS
    assert "hm" in part.detail


def test_one_turn_that_no_server_would_send() -> None:
    """It stays unsupervised, the others don't."""
    template = CHATML.replace("{{ m.content }}", "{{ 'odd ' if m.content == 'x' else '' }}{{ m.content }}")
    template = template.replace(
        "<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role if m.content != 'x' else 'bot' }}\n"
    )
    part = one(template, chat("q1", "x", "q2", "a2"))
    assert learned(part) == ["a2<|im_end|>"]
    assert [skipped.reason for skipped in part.unsupervised] == [Reason.PROMPT_DIFFERS]
    (alone,) = render(template, chat("q1", "x")).parts
    assert alone.reason is Reason.PROMPT_DIFFERS


def test_role_orders() -> None:
    (refused,) = render(STRICT, [{"role": "user", "content": "q"}, *TWO_TURNS]).parts
    assert refused.reason is Reason.TEMPLATE_REFUSED
    assert "Roles must alternate" in refused.detail
    (refused,) = render(STRICT, TWO_TURNS[1:]).parts
    assert refused.reason is Reason.TEMPLATE_REFUSED
    assert learned(one(CHATML, [{"role": "user", "content": "q"}, *TWO_TURNS])) == ["a1<|im_end|>", " a2\n<|im_end|>"]
    assert learned(one(CHATML, chat("q1", "a1", "", "a3")[1:2])) == ["a1<|im_end|>"]


def test_an_answer_before_any_question_with_a_template_that_looks_at_the_first_message() -> None:
    first = "{% if messages[0].role == 'system' %}{% endif %}"
    assert learned(one(first + MARKED, chat("", "a")[1:])) == ["a<|im_end|>"]
    (refused,) = render(first + CHATML, chat("", "a")[1:]).parts
    assert refused.reason is Reason.TEMPLATE_REFUSED


def test_two_answers_in_a_row() -> None:
    messages = [*chat("q", "a"), {"role": "assistant", "content": "b"}]
    for template in (CHATML, MARKED, LLAMA3):
        assert [text[0] for text in learned(one(template, messages))] == ["a", "b"]


def test_what_follows_the_last_answer_is_cut() -> None:
    part = one(CHATML, chat("q", "a", "and now?"))
    assert part == one(CHATML, chat("q", "a"))
    (part,) = render(CHATML, chat("and now?")).parts
    assert part.reason is Reason.NO_ANSWER


def test_the_end_token_s_own_text_inside_an_answer() -> None:
    text = "say <|im_end|> to end"
    assert learned(one(CHATML, chat("q", text))) == [text + "<|im_end|>"]
    assert learned(one(PLAIN, chat("q", text))) == [text + "\n"]


def test_several_markers_in_a_turn_and_empty_ones() -> None:
    template = MARKED.replace(
        "{{ m.content }}<|im_end|>{% endgeneration %}",
        "{{ m.content }}{% endgeneration %}|{% generation %}{% endgeneration %}"
        "{% generation %}<|im_end|>{% endgeneration %}",
    )
    assert learned(one(template, TWO_TURNS)) == ["a1", "<|im_end|>", " a2\n", "<|im_end|>"]


def test_a_template_that_wants_parts() -> None:
    assert one(PARTS, TWO_TURNS) == one(CHATML, TWO_TURNS)
    refuses_text = PARTS.replace("part.type == 'text'", "part['type'].upper() == 'TEXT'")
    assert one(refuses_text, TWO_TURNS) == one(CHATML, TWO_TURNS)
    with pytest.raises(TargetError, match="leaves out what the assistant says"):
        one(CHATML.replace("m.content", "m.text"), TWO_TURNS)


def test_tools_go_to_the_template() -> None:
    template = "{% if tools %}{{ tools[0].name }}|{% endif %}" + CHATML
    assert one(template, chat("q", "a"), tools=[{"name": "sum"}]).text.startswith("sum|<|im_start|>")
    assert not one(template, chat("q", "a")).text.startswith("|")


def test_half_a_character() -> None:
    (part,) = render(CHATML, chat("q \ud83d", "a")).parts
    assert part.reason is Reason.NOT_UNICODE
    part.detail.encode()


def test_a_template_that_fails_in_python() -> None:
    for failing in ("{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{{ [] | first | abs }}"):
        (part,) = render(failing + CHATML, chat("q", "a")).parts
        assert part.reason is Reason.TEMPLATE_REFUSED


def test_no_template_or_a_broken_one() -> None:
    with pytest.raises(TargetError, match="--chat-template FILE"):
        ChatTemplate(make_tokenizer(None))
    with pytest.raises(TargetError, match="isn't valid Jinja: line 2"):
        ChatTemplate(make_tokenizer("{% for m in messages %}\n{{ m.content"))
    with pytest.raises(TargetError, match="--chat-template FILE"):
        ChatTemplate(make_tokenizer({"rag": CHATML, "other": CHATML}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="messages"):
        ChatTemplate(make_tokenizer(CHATML), {"messages": []})


def test_several_templates() -> None:
    named = make_tokenizer({"default": CHATML, "tool_use": "tools " + CHATML})  # type: ignore[arg-type]
    template = ChatTemplate(named)
    for tools, start in ((None, "<|im_start|>"), ([{"name": "sum"}], "tools ")):
        (part,) = template.render(ChatRow("f:1", chat("q", "a"), tools)).parts
        assert isinstance(part, RenderedText)
        assert part.text.startswith(start)


def test_markers_as_transformers_sees_them(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(MARKED)
    chats = [
        [*TWO_TURNS, {"role": "user", "content": "unanswered"}],
        chat("東京の首都は?", "🗼 naïve", "Hello", "The quick brown fox", system="Be brief."),
        chat("q", "<|im_end|> inside <|im_start|>"),
    ]
    samples, _ = run_chats(tmp_path, chats, tokenizer)
    for messages, sample in zip(chats, samples, strict=True):
        answered = messages if messages[-1]["role"] == "assistant" else messages[:-1]
        theirs = tokenizer.apply_chat_template(answered, return_dict=True, return_assistant_tokens_mask=True)
        assert sample["input_ids"] == theirs["input_ids"]
        assert sample["loss_mask"] == theirs["assistant_masks"]


CONTENT = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10),
    st.text(alphabet="日本🗼👩\u200d👩\u0301\u0323é \n\u00a0", min_size=1, max_size=8),
    st.lists(st.sampled_from([*SPECIALS, " ", "a", "\n", "<|end", "<think>"]), min_size=1, max_size=4).map("".join),
)  # fmt: skip
ANSWERS = CONTENT.filter(lambda text: text.strip() != "")


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["turn-by-turn", "markers"])
@given(turns=st.lists(st.tuples(CONTENT, ANSWERS), min_size=1, max_size=3), system=st.none() | CONTENT)
def test_any_text(
    template: str, turns: list[tuple[str, str]], system: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against the text put together by hand, and a mask made byte by byte."""
    tokenizer = make_tokenizer(template)
    pieces = [("<|im_start|>system\n" + system + "<|im_end|>\n", False)] if system is not None else []
    for question, answer in turns:
        pieces.append((f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False))
        pieces += [(answer + "<|im_end|>", True), ("\n", False)]
    messages = chat(*(text for turn in turns for text in turn), system=system)
    (sample,), stats = run_chats(tmp_path_factory.getbasetemp(), [messages], tokenizer)
    ids = tokenizer("".join(text for text, _ in pieces), add_special_tokens=False)["input_ids"]
    assert sample["input_ids"] == ids
    assert sample["loss_mask"] == slow_mask(tokenizer, ids, pieces)
    assert stats.split_rows == 0


@given(answer=ANSWERS)
def test_supervised_tokens_spell_the_answer(answer: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where the tokenizer normalises the text first, as Qwen's does."""
    tokenizer = make_tokenizer(LLAMA3.replace("| trim", ""), normalize=True)
    answer = "." + answer + "."  # a mark at its beginning or a blank would join the prompt's last characters
    (sample,), _ = run_chats(tmp_path_factory.getbasetemp(), [chat("q", answer)], tokenizer)
    parts = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", answer)  # found before normalising
    expected = "".join(unicodedata.normalize("NFC", part) for part in parts)
    assert supervised_text(tokenizer, sample) == expected + "<|eot_id|>"
