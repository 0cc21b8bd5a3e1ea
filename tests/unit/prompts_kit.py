"""What the tests of `prompts` share: a tiny byte-level tokenizer, chat templates, rows to files and back."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dflash_tool.prompts import Preparation, PrepareOptions, PrepareStats

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip
END_OF_TEXT = SPECIALS[0]
MASK = SPECIALS[3]
SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the answer to the question is assistant and user.",
    "Hello there, how are you? I think that this is a good answer, and that the other one is thinking.",
    "東京は日本の首都です。 日本の首都はどこですか? 🗼🗼 naïve café über straße",
)

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}\
<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Qwen3 does: thinking only in the turns after the last question; an empty one opened by the prompt when off.
THINKING = """\
{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1].lstrip('\\n') %}
{% set thought = m.reasoning_content if m.reasoning_content is defined else
   (m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '') %}
OPEN{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ text }}<|im_end|>CLOSE
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
QWEN3 = THINKING.replace("OPEN", "").replace("CLOSE", "")
QWEN3_MARKED = THINKING.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}\n")

LLAMA3 = """\
{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# As Phi-3 does: tokens that swallow the blanks behind them, and an eos token behind the last turn only.
PHI3 = """\
{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

PLAIN = """\
{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"""

# The answer's end token only behind the last turn: what a conversation of plain text with an eos looks like.
PLAIN_EOS = """\
{% for m in messages %}{{ m.role }}: {{ m.content }}\
{% if not loop.last %}{{ '\\n' }}{% elif m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '\\nassistant: ' }}{% endif %}"""

# As those of multimodal models do: plain strings are left out without a word.
PARTS = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

STRICT = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def _trained(normalize: bool) -> str:
    backend = Tokenizer(models.BPE())
    if normalize:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=list(SPECIALS), show_progress=False
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.add_special_tokens(
        [AddedToken(text, rstrip=True) for text in ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")]
    )
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return backend.to_str()


def make_tokenizer(template: str | None = None, *, normalize: bool = False, **special: str) -> Any:
    """Its ids 0 to 7 are `SPECIALS`; about 426 tokens in all."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(normalize)),
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|begin_of_text|>", **special},
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """JSON values, or lines as they are, one a line."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="")
    return path


def run(files: Path | list[Path], tokenizer: Any, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """All samples, and the statistics."""
    paths = files if isinstance(files, list) else [files]
    stream: Preparation = Preparation(paths, tokenizer, PrepareOptions(**{"vocab_size": len(tokenizer), **options}))
    samples = [sample for batch in stream for sample in batch.to_pylist()]
    return samples, stream.stats


def check_stats(stats: PrepareStats, samples: list[dict[str, Any]]) -> None:
    """What must hold whatever the data."""
    assert stats.rows - stats.split_rows + stats.split_parts == stats.samples + sum(stats.skipped.values())
    assert stats.samples == len(samples) == len({sample["sample_id"] for sample in samples})
    assert stats.tokens == sum(sample["length"] for sample in samples)
    assert stats.supervised == sum(sample["supervised"] for sample in samples)
    assert stats.longest == max((sample["length"] for sample in samples), default=0)
    for sample in samples:
        assert sample["length"] == len(sample["input_ids"]) == len(sample["loss_mask"])
        assert sample["supervised"] == sum(sample["loss_mask"])
        assert any(a and b for a, b in pairwise(sample["loss_mask"]))


def run_chats(path: Path, chats: Sequence[Any], tokenizer: Any, **options: Any) -> tuple[list[Any], Any]:
    """Conversations, each a list of messages."""
    return run(write_rows(path / "rows.jsonl", [{"messages": messages} for messages in chats]), tokenizer, **options)


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What a token stands for, without using any offsets."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token_id in tokenizer.added_tokens_decoder:
        return token.encode()
    return bytes(BYTE_OF[letter] for letter in token)


def _byte_of() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_of()


def supervised_text(tokenizer: Any, sample: dict[str, Any]) -> str:
    """The bytes of all supervised tokens, as text; a unit separator where the supervision breaks off."""
    mask = np.array(sample["loss_mask"])
    pieces = []
    for place, token_id in enumerate(sample["input_ids"]):
        if mask[place]:
            pieces.append(token_bytes(tokenizer, token_id))
        elif place and mask[place - 1]:
            pieces.append(b"\x1f")
    return b"".join(pieces).decode().removesuffix("\x1f")


def slow_mask(tokenizer: Any, ids: Sequence[int], pieces: Sequence[tuple[str, bool]]) -> list[int]:
    """The loss mask of a text given in pieces, supervised or not: byte by byte, a token at a time.

    Only for a tokenizer without normaliser and without tokens that swallow blanks.
    """
    flags: list[tuple[int, bool]] = []  # for each byte: the character it belongs to, supervised
    for number, (letter, supervised) in enumerate((c, s) for text, s in pieces for c in text):
        flags += [(number, supervised)] * len(letter.encode())
    mask, place = [], 0
    for token_id in ids:
        size = len(token_bytes(tokenizer, token_id))
        mask.append(int(all(supervised for _, supervised in flags[place : place + size])))
        place += size
    assert place == len(flags)
    return mask
