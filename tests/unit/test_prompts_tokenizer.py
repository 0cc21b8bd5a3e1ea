"""Loading a tokenizer, template arguments, the mask token, fingerprints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from dflash_tool.errors import ConfigError, DataError, TargetError
from dflash_tool.prompts import (
    choose_mask_token,
    fingerprint_file,
    load_tokenizer,
    parse_template_args,
    template_fingerprint,
    tokenizer_fingerprint,
)

from .prompts_kit import CHATML, END_OF_TEXT, MASK, SPECIALS, make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_tokenizer(CHATML).save_pretrained(path)
    return path


def test_load(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "Hello 東京 <|im_end|>\n"
    assert tokenizer(text)["input_ids"] == make_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template == CHATML
    file = tmp_path / "template.jinja"
    file.write_text("\ufeff{{ 'é' }}", encoding="utf-8")
    assert load_tokenizer(str(folder), chat_template=file).chat_template == "{{ 'é' }}"


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such folder"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 10}))
    with pytest.raises(TargetError, match="no tokenizer here"):  # transformers would make an empty one
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(TargetError, match="can't load the tokenizer"):
        load_tokenizer(tmp_path)


def test_template_files_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        load_tokenizer(folder, chat_template=tmp_path / "missing.jinja")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_tokenizer(folder, chat_template=tmp_path / "latin")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="this file is empty"):
        load_tokenizer(folder, chat_template=tmp_path / "empty")


def test_slow_tokenizers_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    class Slow:
        is_fast = False

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Slow())
    with pytest.raises(TargetError, match="Slow is a slow tokenizer"):
        load_tokenizer(folder)


def test_template_args() -> None:
    items = ["enable_thinking=false", "n=3", "name=Ada", 'quoted="1"', "empty=", "eq=a=b", "list=[1, 2]", "x=NaN"]
    assert parse_template_args(items) == {
        "enable_thinking": False, "n": 3, "name": "Ada", "quoted": "1", "empty": "", "eq": "a=b", "list": [1, 2],
        "x": "NaN",
    }  # fmt: skip
    assert parse_template_args([]) == {}


@pytest.mark.parametrize("items", [["enable_thinking"], ["=1"], ["a b=1"], ["a=1", "a=1"], ["messages=[]"]])
def test_bad_template_args(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="--template-arg"):
        parse_template_args(items)


def test_mask_token() -> None:
    plain = make_tokenizer()
    size = len(plain)
    assert choose_mask_token(plain, size) is None
    assert choose_mask_token(plain, size + 3) == size
    own = make_tokenizer(mask_token=MASK)
    mask_id = SPECIALS.index(MASK)
    assert choose_mask_token(own, size + 3) == mask_id
    assert choose_mask_token(own, size + 3, requested=size + 1) == size + 1
    assert choose_mask_token(own, mask_id) is None, "the mask token itself lies beyond the embedding"
    shared = make_tokenizer(mask_token=END_OF_TEXT)
    assert choose_mask_token(shared, size + 3) == size, "a mask token that is the padding token too"


def test_mask_token_where_ids_have_gaps() -> None:
    class Gaps:
        mask_token_id = unk_token_id = bos_token_id = None
        pad_token_id, eos_token_id = 4, 0

        def __len__(self) -> int:
            return 3

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "c": 3}

    assert choose_mask_token(Gaps(), 10) == 5
    assert choose_mask_token(Gaps(), 5) is None


@pytest.mark.parametrize("requested", [-1, 10_000, SPECIALS.index("<|im_end|>"), SPECIALS.index("<|endoftext|>")])
def test_bad_mask_token(requested: int) -> None:
    with pytest.raises(ConfigError, match=f"--mask-token-id {requested}: "):
        choose_mask_token(make_tokenizer(), 500, requested)


def test_fingerprint_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    content = bytes(range(256)) * 10_000  # more than one block
    path.write_bytes(content)
    found = fingerprint_file(path)
    assert (found.path, found.bytes, found.xxh3) == (str(path), len(content), xxhash.xxh3_128_hexdigest(content))
    with pytest.raises(DataError, match="can't read"):
        fingerprint_file(tmp_path / "missing")


def test_fingerprint_of_a_tokenizer(folder: Path) -> None:
    one = tokenizer_fingerprint(make_tokenizer())
    padded = make_tokenizer()
    padded.backend_tokenizer.enable_padding(length=9)
    assert tokenizer_fingerprint(padded) == one == tokenizer_fingerprint(make_tokenizer(CHATML))
    assert tokenizer_fingerprint(load_tokenizer(folder)) == tokenizer_fingerprint(load_tokenizer(folder))
    others = [make_tokenizer(normalize=True), make_tokenizer(mask_token=MASK), make_tokenizer()]
    others[2].add_tokens(["zzz"])
    prints = {tokenizer_fingerprint(tokenizer) for tokenizer in others}
    assert len(prints | {one}) == 4


def test_fingerprint_of_a_template() -> None:
    values: list[Any] = [None, "", "a", {"default": "a"}, {"default": "a", "tool_use": "b"}]
    assert len({template_fingerprint(value) for value in values}) == len(values)
    assert template_fingerprint({"a": "1", "b": "2"}) == template_fingerprint({"b": "2", "a": "1"})


def test_importing_needs_no_torch() -> None:
    code = "import sys, dflash_tool.prompts; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
