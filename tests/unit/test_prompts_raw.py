"""Raw text: which tokens stand around it, and what is learned where prompt and completion meet."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from dflash_tool.errors import TargetError
from dflash_tool.prompts import tokenizer_fingerprint
from dflash_tool.prompts.tokenise import leading_ids

from .prompts_kit import SPECIALS, make_tokenizer, run, slow_mask, supervised_text, write_rows

BOS, BOS_ID = "<|begin_of_text|>", SPECIALS.index("<|begin_of_text|>")
EOS, EOS_ID = "<|im_end|>", SPECIALS.index("<|im_end|>")


def with_bos(template: str = f"{BOS} $A", **special: str) -> Any:
    tokenizer = make_tokenizer(None, **special)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=template, special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]),
        ]
    )
    return tokenizer


def one(tmp_path: Path, row: Any, tokenizer: Any, **options: Any) -> dict[str, Any]:
    (sample,), _ = run(write_rows(tmp_path / "rows.jsonl", [row]), tokenizer, **options)
    return sample  # type: ignore[no-any-return]


@pytest.mark.parametrize("template", [f"{BOS} $A", f"{BOS} $A {EOS}"])
def test_bos_is_there_but_not_learned(tmp_path: Path, template: str) -> None:
    """Whatever the tokenizer puts behind a text: a completion ends with one EOS, a text with none."""
    tokenizer = with_bos(template)
    assert leading_ids(tokenizer) == [BOS_ID]
    sample = one(tmp_path, {"prompt": "The quick", "completion": " brown fox"}, tokenizer)
    plain = tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"]
    assert sample["input_ids"] == [BOS_ID, *plain, EOS_ID]
    assert supervised_text(tokenizer, sample) == " brown fox" + EOS
    sample = one(tmp_path, {"text": "The quick brown fox"}, tokenizer)
    assert sample["input_ids"] == [BOS_ID, *plain]
    assert sample["loss_mask"] == [0] + [1] * len(plain)


def test_special_tokens_that_the_text_has_already(tmp_path: Path) -> None:
    tokenizer = with_bos()
    bare = one(tmp_path, {"prompt": "The quick", "completion": " brown fox"}, tokenizer)
    for prompt, completion in ((BOS + "The quick", " brown fox"), ("The quick", " brown fox" + EOS)):
        assert one(tmp_path, {"prompt": prompt, "completion": completion}, tokenizer) == bare
    assert one(tmp_path, {"text": BOS + "a b c"}, tokenizer) == one(tmp_path, {"text": "a b c"}, tokenizer)


def test_no_bos_unless_the_tokenizer_adds_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    assert tokenizer.bos_token_id == BOS_ID
    assert leading_ids(tokenizer) == []
    assert BOS_ID not in one(tmp_path, {"text": "The quick brown fox"}, tokenizer)["input_ids"]


def test_a_token_over_the_seam_is_not_learned(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    sample = one(tmp_path, {"prompt": "The qui", "completion": "ck brown"}, tokenizer)
    assert sample["input_ids"][:-1] == tokenizer("The quick brown", add_special_tokens=False)["input_ids"]
    assert supervised_text(tokenizer, sample) == " brown" + EOS


def test_cut_like_any_sample(tmp_path: Path) -> None:
    row = {"prompt": "The", "completion": " quick brown fox jumps"}
    whole = one(tmp_path, row, with_bos())
    cut = one(tmp_path, row, with_bos(), max_length=4)
    assert (cut["input_ids"], cut["loss_mask"]) == (whole["input_ids"][:4], whole["loss_mask"][:4])


def test_no_end_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    assert one(tmp_path, {"text": "a b c"}, tokenizer)["length"] == 5
    with pytest.raises(TargetError, match=r"rows\.jsonl:1: a completion.*set eos_token"):
        one(tmp_path, {"prompt": "a", "completion": "b"}, tokenizer)


def test_half_a_character(tmp_path: Path) -> None:
    rows = ['{"text": "a \\ud83d b"}', '{"prompt": "a \\ud83d", "completion": "\\udd25 b"}', '{"text": "a b"}']
    samples, stats = run(write_rows(tmp_path / "rows.jsonl", rows), make_tokenizer(None))
    assert (len(samples), stats.skipped) == (1, {"not valid Unicode": 2})
    stats.examples["not valid Unicode"][0].encode()


def test_another_bos_is_another_tokenizer() -> None:
    """Prepared samples depend on it."""
    prints = {
        tokenizer_fingerprint(tokenizer) for tokenizer in (make_tokenizer(None), with_bos(), with_bos(f"{EOS} $A"))
    }
    assert len(prints) == 3


TEXT = st.text(alphabet="日本🗼\u0301é the\n", max_size=10)


@given(prompt=TEXT, completion=TEXT.filter(str.strip))
def test_any_seam(prompt: str, completion: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Against a mask made byte by byte."""
    tokenizer = make_tokenizer(None)
    sample = one(tmp_path_factory.getbasetemp(), {"prompt": prompt, "completion": completion + "."}, tokenizer)
    ids = tokenizer(prompt + completion + "." + EOS, add_special_tokens=False)["input_ids"]
    assert sample["input_ids"] == ids
    assert sample["loss_mask"] == slow_mask(tokenizer, ids, [(prompt, False), (completion + "." + EOS, True)])
