"""The parts of an evaluation: what repeats, where answers part, prompts before answers, rates."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_tool.drafter.acceptance import Yield
from dflash_tool.errors import DataError
from dflash_tool.evaluate.answers import distinct_4grams, parting
from dflash_tool.evaluate.generation import Answer
from dflash_tool.evaluate.measure import Measured, Spoken
from dflash_tool.evaluate.prompts import read_prompts
from dflash_tool.prompts import PrepareOptions, load_tokenizer
from dflash_tool.trainer.validate import bigram_table, bigram_walk

OPTIONS = PrepareOptions(vocab_size=97, mask_token_id=96)


def test_distinct_4grams_are_counted_in_each_answer() -> None:
    assert distinct_4grams([torch.arange(10)]) == 1.0
    assert distinct_4grams([torch.zeros(10, dtype=torch.int64)]) == 1 / 7
    loop = torch.arange(2).repeat(5)  # 0 1 0 1 ...: two of seven
    assert distinct_4grams([loop, torch.arange(5), torch.arange(5)]) == (2 + 2 + 2) / (7 + 2 + 2)
    assert distinct_4grams([torch.arange(3)]) == 1.0


class Fixed:
    """A target with the same logits everywhere."""

    def __init__(self, logits: list[float], dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, torch.device("cpu")
        self._logits = torch.tensor([[logits]])

    def __call__(self, ids: torch.Tensor, **_: Any) -> Any:
        self.seen = ids
        return SimpleNamespace(logits=self._logits.expand(1, ids.shape[1], -1))


@pytest.mark.parametrize(
    ("gap", "dtype", "tie"),
    [
        (0.0, torch.float32, True),
        (0.0009, torch.float32, True),
        (0.1, torch.float32, False),
        (0.1, torch.bfloat16, True),
        (1.0, torch.bfloat16, False),
    ],
)
def test_a_parting_and_its_gap(gap: float, dtype: torch.dtype, tie: bool) -> None:
    target = Fixed([10.0, 10.0 - gap, -3.0], dtype)
    prompt, plain, drafted = torch.tensor([1, 2]), torch.tensor([2, 0, 0]), torch.tensor([2, 1, 2])
    found = parting(target, prompt, plain, drafted, "a:1")
    assert found is not None
    assert (found.position, found.plain, found.drafted, found.near_tie) == (1, 0, 1, tie)
    assert found.gap == pytest.approx(gap, abs=1e-5)
    assert found.largest == 10
    assert target.seen.tolist() == [[1, 2, 2]]  # the prompt, and what both say
    assert parting(target, prompt, plain, plain, "a:1") is None


@pytest.fixture(scope="module")
def tokenizer(random_target: Callable[..., Path]) -> Any:
    return load_tokenizer(random_target())


def rows(tmp_path: Path, *rows: tuple[list[int], list[int]]) -> list[Path]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n" for ids, mask in rows))
    return [file]


def test_a_prompt_stands_before_each_answer(tmp_path: Path, tokenizer: Any) -> None:
    """Two answers give two prompts; an answer at the very beginning has none; repeated and long ones are left out."""
    files = rows(
        tmp_path,
        ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 1, 1]),
        ([8, 9, 9], [1, 1, 1]),
        ([1, 2, 5, 5], [0, 0, 1, 1]),
        ([1] * 20 + [2, 3], [0] * 20 + [1, 1]),
        ([4, 4, 4], [0, 1, 1]),
        ([5, 5, 5], [0, 1, 1]),
    )
    found = read_prompts(files, tokenizer, OPTIONS, limit=3, longest=10)
    assert [prompt.tokens.tolist() for prompt in found.prompts] == [[1, 2], [1, 2, 3, 4, 5], [4]]
    assert [prompt.source.rpartition(":")[2] for prompt in found.prompts] == ["1", "1", "5"]
    assert (found.repeated, found.long, found.trained) == (1, 1, 0)
    assert [tokens.tolist() for tokens, _ in found.others] == [[5, 5, 5]]


def test_no_prompt_says_why(tmp_path: Path, tokenizer: Any) -> None:
    files = rows(tmp_path, ([1] * 20 + [2, 3], [0] * 20 + [1, 1]))
    with pytest.raises(
        DataError, match=r"rows\.jsonl: no prompt to generate from \(0 were trained on, 1 leave no room"
    ):
        read_prompts(files, tokenizer, OPTIONS, limit=3, longest=10)


def test_a_bigram_table_drafts_what_follows_most_often() -> None:
    whole = torch.ones(6).numpy()
    table = bigram_table([(torch.tensor([1, 2, 1, 2, 1, 3]).numpy(), whole)], 8)
    assert table.tolist() == [-1, 2, 1, -1, -1, -1, -1, -1]
    # 1 -> 2 -> 1 -> 2 is drafted: at 1 all three drafts are right and the end is reached in one forward.
    assert bigram_walk(table, torch.tensor([1, 2, 1, 2]).numpy(), torch.ones(4).numpy(), 4) == Yield(3, 1)
    assert bigram_walk(table, torch.tensor([3, 1, 1, 1]).numpy(), torch.ones(4).numpy(), 4) == Yield(3, 3)
    assert bigram_table([], 3).tolist() == [-1, -1, -1]


def test_rates_and_what_does_not_add_up() -> None:
    spoken = Spoken()
    spoken.add(Answer(torch.arange(11), 6, 2.0), Answer(torch.arange(11), 11, 4.0))
    assert (spoken.yields, spoken.rate.value, spoken.plain_rate.value) == (Yield(10, 5), 5.5, 2.75)
    assert spoken.speedup == 2.0
    agreed = Measured(prompts=1, greedy=spoken, ours=Yield(10, 5), walked=Yield(205, 100))
    assert agreed.failures == []
    apart = Measured(prompts=1, greedy=spoken, ours=Yield(10, 5), walked=Yield(19, 10))
    assert ["1.900" in text and "5.0%" in text for text in apart.failures] == [True]
