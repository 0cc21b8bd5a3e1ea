"""Each case file in `tests/data`: what is kept of it, what is supervised, what is skipped and why."""

import json
from pathlib import Path

import pytest

from dflash_tool.errors import DataError

from .prompts_kit import (
    CHATML,
    LLAMA3,
    MARKED,
    STRICT,
    chat,
    check_stats,
    make_tokenizer,
    run,
    run_chats,
    supervised_text,
)

TEMPLATES = pytest.mark.parametrize("template", [CHATML, MARKED, LLAMA3], ids=["chatml", "marked", "llama3"])


@TEMPLATES
def test_openai_case(data: Path, template: str) -> None:
    tokenizer = make_tokenizer(template)
    path = data / "openai.jsonl"
    samples, stats = run(path, tokenizer)
    check_stats(stats, samples)
    assert [sample["source"] for sample in samples] == [f"{path}:{n}" for n in range(1, 6)]
    end = "<|eot_id|>" if template is LLAMA3 else "<|im_end|>"
    for sample, line in zip(samples, path.read_text(encoding="utf-8").splitlines(), strict=True):
        messages = json.loads(line)["messages"]
        assert sample["input_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
        supervised = [i for i, m in zip(sample["input_ids"], sample["loss_mask"], strict=True) if m]
        answers = [m["content"] + end for m in messages if m["role"] == "assistant"]
        assert tokenizer.decode(supervised) == "".join(answers)


def test_sharegpt_case(data: Path, tmp_path: Path) -> None:
    """The same samples as from OpenAI's form."""
    tokenizer = make_tokenizer(CHATML)
    samples, stats = run(data / "sharegpt.jsonl", tokenizer)
    check_stats(stats, samples)
    assert stats.samples == 3
    entropy = "A measure of how many microstates fit a macrostate."
    chats = [
        chat("What is 12 * 12?", "144"),
        chat("Define entropy.", entropy, system="Be brief."),
        chat("Hi", "Hello!", "Bye", "Goodbye!"),
    ]
    same, _ = run_chats(tmp_path, chats, tokenizer)
    assert [s["sample_id"] for s in samples] == [s["sample_id"] for s in same]


def test_tokens_case(data: Path) -> None:
    samples, stats = run(data / "tokens.jsonl", make_tokenizer(None))
    check_stats(stats, samples)
    assert [(s["input_ids"], s["loss_mask"]) for s in samples] == [
        ([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 1, 1]),
        ([11, 12, 13], [0, 1, 1]),
    ]


def test_prompt_completion_case(data: Path) -> None:
    tokenizer = make_tokenizer(None)
    samples, stats = run(data / "prompt_completion.jsonl", tokenizer)
    check_stats(stats, samples)
    for sample, prompt, text in zip(samples, ["2+2=", "The capital of Peru is"], [" 4", " Lima."], strict=True):
        assert tokenizer.decode(sample["input_ids"]) == prompt + text + "<|im_end|>"
        assert supervised_text(tokenizer, sample) == text + "<|im_end|>"


def test_text_case(data: Path) -> None:
    tokenizer = make_tokenizer(None)
    path = data / "text.jsonl"
    samples, stats = run(path, tokenizer)
    check_stats(stats, samples)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert [tokenizer.decode(sample["input_ids"]) for sample in samples] == texts
    assert all(all(sample["loss_mask"]) for sample in samples)


def test_bad_tokens_case(data: Path) -> None:
    path = data / "bad_tokens.jsonl"
    (sample,), stats = run(path, make_tokenizer(None), vocab_size=1000)
    check_stats(stats, [sample])
    assert (sample["input_ids"], sample["source"]) == ([4, 5, 6], f"{path}:7")
    reasons = [
        "length mismatch", "negative token id", "token id beyond the vocabulary", "empty", "mask not 0/1",
        "token id not an integer",
    ]  # fmt: skip
    assert stats.skipped == dict.fromkeys(reasons, 1)
    for line, reason in enumerate(reasons, start=1):
        assert stats.examples[reason][0].startswith(f"{path}:{line}: ")


def test_empty_case(data: Path) -> None:
    with pytest.raises(DataError, match=r"empty\.jsonl: nothing to do: no rows"):
        run(data / "empty.jsonl", make_tokenizer(CHATML))


@pytest.mark.parametrize(
    ("template", "kept"),
    [(CHATML, [1, 7, 8, 13, 14, 15, 16]), (MARKED, [1, 7, 8, 13, 14, 15, 16]), (STRICT, [1, 8, 13, 14, 15])],
    ids=["chatml", "marked", "strict"],
)
def test_messy_case(data: Path, template: str, kept: list[int]) -> None:
    path = data / "messy.jsonl"
    samples, stats = run(path, make_tokenizer(template))
    check_stats(stats, samples)
    assert [sample["source"] for sample in samples] == [f"{path}:{line}" for line in kept]
    assert (stats.rows, stats.duplicates) == (17, 1)
    assert stats.skipped == {
        "empty answer": 1,
        "missing content": 2,
        "no messages": 1,
        "unknown role": 1,
        "not JSON": 2,
        "unknown keys": 1,
        "not an object": 1,
        "no assistant turn": 1,
        **({"template refused": 2} if template is STRICT else {}),
    }
    assert stats.examples["not JSON"][1].startswith(f"{path}:18: ")
    assert stats.describe_skipped()[0].startswith("2 ")


def test_messy_case_under_strict(data: Path) -> None:
    with pytest.raises(DataError, match=r"messy\.jsonl:3: empty answer"):
        run(data / "messy.jsonl", make_tokenizer(CHATML), strict=True)


def test_no_case_is_forgotten(data: Path) -> None:
    tested = {name.removeprefix("test_").removesuffix("_case") for name in globals() if name.endswith("_case")}
    assert {file.stem for file in data.iterdir()} == tested
