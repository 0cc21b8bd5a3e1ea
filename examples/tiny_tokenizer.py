r"""The tiny target's tokenizer: byte-level BPE of 2,048 tokens and a ChatML template with generation markers.

Byte level: every string encodes, and decodes to itself. The four special tokens come first in the vocabulary.
The template writes each turn as ``<|im_start|>role\ncontent<|im_end|>\n`` and marks the assistant's content and
its ``<|im_end|>`` (what a server generates, not the newline that follows) with ``{% generation %}``, so that
``apply_chat_template(..., return_assistant_tokens_mask=True)`` gives the loss mask.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIALS = [PAD, START, END, MASK]

# Words keep their leading blank, digits stand alone, indentation is one token; as in the Qwen family.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if part is string or part is not mapping or part.type != 'text' -%}
{{- raise_exception('content parts must be {"type": "text", "text": ...}') -}}
{%- endif -%}
{{- part.text -}}
{%- endfor -%}
{%- else -%}
{{- raise_exception('content must be a string or a list of text parts') -}}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message.role ~ ': expected system, user, assistant or tool') -}}
{%- endif -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- text_of(message.content) -}}{{- '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- text_of(message.content) -}}{{- '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """Learn the merges from ``texts``, wrap them for ``transformers``; the texts' order matters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[START],
        model_max_length=max_length,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
