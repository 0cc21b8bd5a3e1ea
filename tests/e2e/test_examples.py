"""The scripts of the worked example: answers are the target's greedy ones, also where an earlier call was killed."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples" / "tiny-target"

Script = Callable[..., None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run examples/NAME.py with these words."""

    def run(name: str, *words: object) -> None:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        module.main()

    return run


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_questions_differ_and_answers_are_greedy_also_after_a_kill(script: Script, tmp_path: Path) -> None:
    asked, held_out, chats = (tmp_path / f"{name}.jsonl" for name in ("asked", "held-out", "chats"))
    script("questions", "--count", 640, "--out", asked, "--held-out", 32, "--held-out-to", held_out)
    both = [row["messages"][0]["content"] for row in read(asked) + read(held_out)]
    assert len(both) == len(set(both)) == 672
    asked.write_text("".join(asked.read_text().splitlines(keepends=True)[:7]))

    words = ["--target", TARGET, "--chats", asked, "--out", chats, "--max-new-tokens", 8, "--dtype", "float32"]
    script("answer", *words, "--batch-size", 3)
    whole = read(chats)
    assert sorted(row["id"] for row in whole) == sorted(row["id"] for row in read(asked))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
    for row in whole:
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert row["messages"][-1]["role"] == "assistant"
        assert row["messages"][-1]["content"] == tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)

    lines = chats.read_bytes().splitlines(keepends=True)
    chats.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while it wrote the second batch
    script("answer", *words, "--batch-size", 3)
    assert read(chats) == whole
    script("answer", *words)
    assert read(chats) == whole
