"""What `extract` and `stats` print for people: notes about the data, one of a thing, narrow terminals."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .running import Store

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
# As Qwen3's: the thinking of all turns but the last is left out.
FORGETFUL = """\
{% for m in messages %}{{ m.role }}: \
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('/')[-1] }}{% else %}{{ m.content }}{% endif %};
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def chat(*contents: str) -> dict[str, object]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


@pytest.mark.parametrize(
    ("chats", "said"),
    [
        ([chat("q", "hm/a", "r", "hm/b", "s", "hm/c"), chat("q", "hm/a")], "1 conversation split into 3 samples"),
        ([chat("q", "hm/a", "r", "hm/b"), chat("q", "hm/c", "r", "hm/d")], "2 conversations split into 4 samples"),
        ([chat("q", "hm/a"), chat("q", "b", "r", "hm/c")], None),
    ],
)
def test_split_conversations_are_said(
    random_target: Callable[..., Path], tmp_path: Path, dflash: Run, chats: list[object], said: str | None
) -> None:
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (tmp_path / "template.jinja").write_text(FORGETFUL)
    words = ["extract", "--target", random_target(), "--data", tmp_path / "chats.jsonl", "--out", tmp_path / "store"]
    words += ["--chat-template", tmp_path / "template.jinja"]
    for more in (["--dry-run"], []):
        printed = dflash(*words, *more)
        assert printed.code == 0, printed.err
        shown = " ".join(printed.out.split())
        if said:
            assert f"{said}, because the template renders earlier turns differently later on" in shown
        else:
            assert "split into" not in shown


def test_one_of_a_thing_is_not_several(
    random_target: Callable[..., Path], tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of each kind, one sample, one shard, one leftover, one finding."""
    monkeypatch.setenv("COLUMNS", "200")
    rows = ['{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}', "no json"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    out = tmp_path / "store"
    words = ["extract", "--target", random_target(), "--data", tmp_path / "rows.jsonl", "--out", out, "--layers", "1"]
    printed = [dflash(*words, "--dry-run"), dflash(*words), dflash("stats", out)]
    assert [each.code for each in printed] == [0, 0, 0]
    shard = next((out / "shards").glob("b*.zarr"))
    rows_file = shard / "hidden" / "1" / "c" / "0" / "0"
    rows_file.write_bytes(b"\1" + rows_file.read_bytes()[1:])
    printed.append(dflash("stats", out, "--verify"))
    assert printed[-1].code == 1
    (out / "shards" / ".tmp-b0-r0-00009.zarr").mkdir()
    printed.append(dflash(*words, "--verify"))
    shown = " ".join(" ".join(each.out.split()) for each in printed)
    for said in ("3 tokens", "1 row skipped", "in 1 shard,", "1 finding", "1 leftover of", "1 sample without the rows"):
        assert said in shown
    assert re.findall(r"(?<![\d.,])1 \w+s\b", shown) == []


@pytest.mark.parametrize("columns", ["60", "80"])
def test_nothing_is_cut_on_a_narrow_terminal(
    finished: Store, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    words = [*finished.words, "--out", tmp_path / "store", "--buckets", "8,16,32,64,100,120", "--max-length", "120"]
    document = json.loads(dflash(*words, "--dry-run", "--json").out)
    assert len(document["buckets"]) == 6
    for command in ([*words, "--dry-run"], words, ["stats", tmp_path / "store"]):
        printed = dflash(*command)
        assert printed.code == 0, printed.err
        assert "…" not in printed.out
        assert "\x1b" not in printed.out
        assert max(map(len, printed.out.splitlines())) <= int(columns) or "Look at it" in printed.out
        if command is not words:
            cells = printed.out.split()
            for bucket in document["buckets"]:
                for number in (f"{bucket['samples']:,}", f"{bucket['tokens']:,}"):
                    assert number in cells
