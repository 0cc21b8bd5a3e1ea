"""Loss masks from spans of characters: a token counts iff all its characters lie in a span."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_tool.prompts.tokenise import Encoder, mask_of, merge_spans, private_backend

from .prompts_kit import SPECIALS, make_tokenizer, slow_mask

TOKENIZER = make_tokenizer()
ENCODER = Encoder(TOKENIZER)
TEXT = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="日本🗼👩\u200d👩\u0301\u0323é ß\n\t a", max_size=12),
    st.sampled_from([*SPECIALS, "<think>", " hello", "  the  ", "<|im_", "\u00a0", "ﬁ", "\u2028"]),
)


@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=8))
def test_mask_equals_a_walk_over_the_bytes(pieces: list[tuple[str, bool]]) -> None:
    text, spans = "", []
    for piece, supervised in pieces:
        if supervised:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    ((ids, mask),) = ENCODER.encode([text], [spans])
    assert ids.dtype == np.int32
    assert mask.dtype == np.uint8
    assert ids.tolist() == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert mask.tolist() == slow_mask(TOKENIZER, ids.tolist(), pieces)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20).map(sorted),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5),
)
def test_mask_of_equals_a_loop_over_characters(cuts: list[int], spans: list[tuple[int, int]]) -> None:
    """Tokens that touch, some of them without any character."""
    inside = {place for start, end in spans for place in range(start, end)}
    offsets = list(pairwise(cuts))
    expected = [
        all(place in inside for place in range(start, end)) and (start < end or {start - 1, start} <= inside)
        for start, end in offsets
    ]
    assert mask_of(np.array(offsets, np.int64).reshape(-1, 2), spans).tolist() == expected


def test_merge_spans() -> None:
    assert merge_spans([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7), (12, 11)]) == [(0, 3), (4, 9)]
    assert merge_spans([]) == []


def test_a_space_before_a_word_is_a_character_of_its_token() -> None:
    """`trim_offsets` would hide it and count the token although its space is outside."""
    text = "The quick brown"
    ((ids, mask),) = ENCODER.encode([text], [[(4, 9)]])
    tokens = TOKENIZER.convert_ids_to_tokens(ids.tolist())
    assert tokens[1] == "Ġquick"
    assert not mask[1]
    ((_, mask),) = ENCODER.encode([text], [[(3, 9)]])
    assert mask.tolist() == [0, 1] + [0] * (len(ids) - 2)


def test_blanks_swallowed_by_a_special_token_are_not_its_characters() -> None:
    text = "fine<|end|>\n\n<|user|> fine"
    ((ids, mask),) = ENCODER.encode([text], [[(0, text.index("\n"))]])
    tokens = TOKENIZER.convert_ids_to_tokens(ids.tolist())
    assert mask[tokens.index("<|end|>")] == 1
    assert mask[tokens.index("<|user|>")] == 0


def test_padding_and_truncation_left_on_do_no_harm() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    before = tokenizer.backend_tokenizer.to_str()
    ((ids, _),) = Encoder(tokenizer).encode(["The quick brown fox jumps"], [[]])
    assert ids.tolist() == TOKENIZER("The quick brown fox jumps", add_special_tokens=False)["input_ids"]
    assert tokenizer.backend_tokenizer.to_str() == before, "the tokenizer itself was changed"


@pytest.mark.parametrize("split", [False, True])
def test_split_special_tokens_is_kept(split: bool) -> None:
    tokenizer = make_tokenizer()
    tokenizer.split_special_tokens = split
    backend = private_backend(tokenizer)
    text = "a<|im_end|>b"
    expected = tokenizer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
    assert backend.encode(text, add_special_tokens=False).ids == expected
    assert (TOKENIZER.convert_tokens_to_ids("<|im_end|>") in expected) is not split


def test_a_sentencepiece_like_tokenizer() -> None:
    """Spaces as a letter of their own kind, one put before the text."""
    vocab = [("<unk>", 0.0), *((letter, -3.0) for letter in "▁abc"), ("▁ab", -1.0), ("▁c", -1.0)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    ((ids, mask),) = encoder.encode(["ab c ab"], [[(2, 7)]])
    assert [vocab[i][0] for i in ids] == ["▁ab", "▁c", "▁ab"]
    assert mask.tolist() == [0, 1, 1]


def test_nothing() -> None:
    ((ids, mask),) = ENCODER.encode([""], [[]])
    assert len(ids) == len(mask) == 0
    assert ENCODER.encode([], []) == []
