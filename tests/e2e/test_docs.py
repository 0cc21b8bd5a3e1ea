"""The documentation is true: commands run, options exist, links lead somewhere, messages are the program's."""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_tool.schemas.manifest import Manifest
from dflash_tool.store.reader import HiddenStore

from . import docs_kit
from .docs_kit import PAGES, ROOT, Block
from .running import Store

RUN = ("quick-start", "python-api", "store-format")  # in this order, in one folder
# Pages whose text names no options but ours and torchrun's.
OURS = [page for page in PAGES if page.parent.name != "examples" and page.stem not in {"coming-from", "decisions"}]
SHORTEST = 48  # chats of the examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages are run: the examples, with some short chats alone."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").mkdir()
    (folder / "examples" / "tiny-target").symlink_to(ROOT / "examples" / "tiny-target")
    chats = (ROOT / "examples" / "chats.jsonl").read_text().splitlines(keepends=True)
    (folder / "examples" / "chats.jsonl").write_text("".join(sorted(chats, key=len)[:SHORTEST]))
    return folder


def _dflash(words: list[str]) -> None:
    from dflash_tool.cli import main

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0, f"{' '.join(words)}\n{said.getvalue()}"


def _run(block: Block, names: dict[str, Any]) -> None:
    if block.language == "python":
        exec(compile(block.as_tested(), str(block), "exec"), names)  # noqa: S102 - our own documentation
        return
    for words in block.commands():
        assert words[0] == "dflash", f"{block}: {words[0]} can't run in a test; say no-run"
        _dflash(words)


def test_pages_run(folder: Path) -> None:
    ran = 0
    for page in RUN:
        names: dict[str, Any] = {}
        for block in docs_kit.blocks(ROOT / "docs" / f"{page}.md"):
            if block.language in {"bash", "python"} and "no-run" not in block.words:
                with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
                    _run(block, names)
                ran += 1
    assert ran >= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page: Path) -> None:
    for block in docs_kit.blocks(page):
        if block.language == "bash":
            for words in block.commands():
                docs_kit.check(words)


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_every_option_in_the_text_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    codes = re.findall(r"`([^`\n]+)`", text)
    named = {found for code in codes for found in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code)}
    of_others = {"--nproc-per-node", "--nnodes", "--speculative-algorithm", "--speculative-draft-model-path"}
    assert named - docs_kit.options() - of_others == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in docs_kit.links(page):
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in docs_kit.anchors(there), f"{page.name}: {link}"


def test_every_page_is_in_the_index() -> None:
    index = docs_kit.links(ROOT / "docs" / "README.md")
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(index)


def test_every_message_is_one_of_the_program() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    messages = [block.text for block in docs_kit.blocks(page) if block.language == "text"]
    assert len(messages) >= 20
    assert [message for message in messages if not docs_kit.is_printed(message)] == []


def test_the_format_names_every_field_of_the_manifest() -> None:
    text = (ROOT / "docs" / "store-format.md").read_text(encoding="utf-8")
    section = text.partition("## manifest.json")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*Manifest.model_fields, "xxh3"}


def test_the_reader_in_the_format_reads_what_the_store_reads(finished: Store) -> None:
    (block,) = [each for each in docs_kit.blocks(ROOT / "docs" / "store-format.md") if each.language == "python"]
    definition = block.text.partition("\n\n\nids, mask")[0]
    assert not re.search(r"dflash|zarr\.|torch\.", definition.replace(".zarr", ""))
    names: dict[str, Any] = {}
    exec(definition, names)  # noqa: S102 - our own documentation
    read: Callable[..., Any] = names["read_sample"]
    store = HiddenStore.open(finished.out)
    for row in range(len(store.samples)):
        layer = store.layers[row % len(store.layers)]
        ids, mask, states = read(finished.out, row, layer)
        assert ids.tolist() == store.samples.tokens(row).tolist()
        assert mask.tolist() == store.samples.mask(row).tolist()
        bits = store.read(row, [layer])[layer]
        assert np.array_equal(states.view("<u4") >> 16, bits)


def test_the_hashes_in_the_format_are_those_of_a_store(finished: Store) -> None:
    """As the page says it, with xxhash and json alone."""
    import pyarrow.parquet as pq
    import xxhash

    fields = json.loads((finished.out / "manifest.json").read_text())
    said = fields.pop("xxh3")
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert xxhash.xxh3_128_hexdigest(plain.encode()) == said
    path = min((finished.out / "index").iterdir())
    group = json.loads((finished.out / "shards" / f"{path.stem}.zarr" / "zarr.json").read_text())
    assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == group["attributes"]["dflash_index_xxh3"]
    row_bytes = 2 * fields["target"]["hidden_size"]
    rows = (finished.out / "shards" / f"{path.stem}.zarr" / "hidden" / "1" / "c" / "0" / "0").read_bytes()
    for sample in pq.read_table(path).to_pylist():
        start, end = (row * row_bytes for row in (sample["row_start"], sample["row_start"] + sample["length"]))
        assert xxhash.xxh3_64_intdigest(rows[start:end]) == sample["xxh3_64"][0]
    store = HiddenStore.open(finished.out)
    content = xxhash.xxh3_128(store.samples.tokens(0).astype("<i4").tobytes() + store.samples.mask(0).tobytes())
    assert store.samples.sample_id(0)[:12] == content.digest()[:12]
