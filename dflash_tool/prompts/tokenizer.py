"""The target's tokenizer: loaded from its folder, its chat template and arguments, its mask token.

transformers is imported when a tokenizer is loaded, not before: `AutoTokenizer` takes seconds to import.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dflash_tool.errors import ConfigError, TargetError

_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
# What `apply_chat_template` itself passes to a template or takes for its own use.
RESERVED_ARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False, chat_template: Path | None = None) -> Any:
    """Load the fast tokenizer in a target's folder (`PreTrainedTokenizerBase`), nothing downloaded.

    `chat_template` is a file whose Jinja text takes the place of the tokenizer's own template; whether
    there is one at all matters only once a conversation comes (`ChatTemplate`).

    Raises `TargetError` for a folder without a usable fast tokenizer, `ConfigError` for the file.
    """
    template = None if chat_template is None else _read_template(chat_template)
    folder = Path(path)
    if not folder.is_dir():
        raise TargetError(f"{path}: no such folder; --target takes the folder of a model with its tokenizer")
    # Without its files, transformers makes an empty tokenizer from config.json and says nothing.
    if not any(any(folder.glob(name)) for name in _VOCABULARY_FILES):
        raise TargetError(
            f"{path}: no tokenizer here (looked for {', '.join(_VOCABULARY_FILES)}); "
            "copy the tokenizer files of the model into this folder"
        )
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True, use_fast=True
        )
    except Exception as error:  # whatever the files or the tokenizer's own code raise
        remedy = "" if trust_remote_code else " (does it need code of its own? --trust-remote-code runs it)"
        raise TargetError(f"{path}: can't load the tokenizer: {first_line(error)}{remedy}") from error
    if not tokenizer.is_fast:
        raise TargetError(
            f"{path}: {type(tokenizer).__name__} is a slow tokenizer: it doesn't tell which characters "
            "a token covers, so the loss mask can't be made; save the fast one as tokenizer.json here"
        )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def parse_template_args(items: Iterable[str]) -> dict[str, Any]:
    """`["enable_thinking=false", "name=Ada"]` -> `{"enable_thinking": False, "name": "Ada"}`.

    A value that is JSON is taken as JSON, any other as a string. Raises `ConfigError`.
    """
    args: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--template-arg {item!r}: expected name=value, such as enable_thinking=false")
        if key in args:
            raise ConfigError(f"--template-arg {key} is given twice: {args[key]!r} and {value!r}")
        try:
            args[key] = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            args[key] = value
    check_template_args(args)
    return args


def check_template_args(args: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for names that mean something else to a template."""
    if taken := sorted(RESERVED_ARGS & args.keys()):
        raise ConfigError(f"--template-arg {taken[0]}: this name is taken by the template's own inputs")


def choose_mask_token(tokenizer: Any, vocab_rows: int, requested: int | None = None) -> int | None:
    """Choose the id that fills a block's slots, below `vocab_rows` (rows of the target's embedding).

    `requested`, otherwise the tokenizer's own mask token, otherwise the first embedding row that no token
    uses; None if there is none. Never a padding, end, start or unknown token. That it doesn't occur in
    the data is for `prepare` to see to. Raises `ConfigError` for a `requested` id that can't be one.
    """
    roles = ("pad", "eos", "bos", "unk")
    taken = {getattr(tokenizer, f"{role}_token_id", None): role for role in roles}
    if requested is not None:
        if not 0 <= requested < vocab_rows:
            raise ConfigError(f"--mask-token-id {requested}: the target has ids 0 to {vocab_rows - 1}")
        if requested in taken:
            raise ConfigError(
                f"--mask-token-id {requested}: this is the tokenizer's {taken[requested]} token; "
                "choose an id that never occurs in text"
            )
        return requested
    own: int | None = tokenizer.mask_token_id
    if own is not None and 0 <= own < vocab_rows and own not in taken:
        return own
    used = set(tokenizer.get_vocab().values()) | taken.keys()
    return next((row for row in range(len(tokenizer), vocab_rows) if row not in used), None)


def _read_template(path: Path) -> str:
    try:
        template = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {path}: not UTF-8; it takes a Jinja template") from None
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: can't read this file: {error.strerror or error}") from error
    if not template.strip():
        raise ConfigError(f"--chat-template {path}: this file is empty; it takes a Jinja template")
    return template


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def first_line(error: Exception) -> str:
    """Of its message; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
