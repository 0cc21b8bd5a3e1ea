"""One bit flipped, or the end cut off, in every kind of file: found by `stats --verify`, made again by `extract`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tool.store.manifest import differences, read_manifest
from dflash_tool.store.reader import HiddenStore

from .running import Store, contents

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
KINDS = {
    "manifest": "manifest.json",
    "samples": "samples.arrow",
    "checksums": "checksums.json",
    "settings": "extract.yaml",
    "head weights": "head/head.safetensors",
    "head config": "head/config.json",
    "tokenizer": "head/tokenizer.json",
    "index": "index/b0-*.parquet",
    "group document": "shards/b0-*.zarr/zarr.json",
    "inner group document": "shards/b0-*.zarr/hidden/zarr.json",
    "array document": "shards/b0-*.zarr/hidden/1/zarr.json",
    "rows": "shards/b0-*.zarr/hidden/1/c/0/0",
}


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def _settle(words: list[object], out: Path, whole: Path, dflash: Run) -> None:
    """Damage is found; the same command with --verify makes the store whole again."""
    said = dflash("stats", out, "--verify", "--json")
    assert said.code == 1, said.out
    assert json.loads(said.out)["damage"]
    again = dflash(*words, "--out", out, "--verify")
    assert again.code == 0, again.err
    assert dflash("stats", out, "--verify").code == 0
    assert contents(out) == contents(whole)
    assert not differences(read_manifest(whole), read_manifest(out))
    assert read_manifest(out).complete
    for name in ("samples.arrow", "head/head.safetensors", "head/config.json", "head/tokenizer.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_found_and_made_again(finished: Store, copied: Store, dflash: Run, kind: str, harm: str) -> None:
    words, out = copied
    file = next(out.glob(KINDS[kind]))
    content = file.read_bytes()
    if harm == "remove":
        file.unlink()
    else:
        file.write_bytes(_flip(content) if harm == "flip" else content[:-3])
    _settle(words, out, finished.out, dflash)


def test_a_shard_that_is_gone(finished: Store, copied: Store, dflash: Run) -> None:
    """It alone is computed again: batches hold one bucket, which has one shard here."""
    words, out = copied
    (shard,) = (out / "shards").glob("b1-*")
    shutil.rmtree(shard)
    _settle(words, out, finished.out, dflash)
    run = read_manifest(out).run
    assert run is not None
    samples = HiddenStore.open(finished.out).samples
    assert run.real_tokens == samples.lengths[samples.buckets == 1].sum()


def test_a_lost_manifest_is_not_replaced_by_that_of_other_settings(finished: Store, copied: Store, dflash: Run) -> None:
    words, out = copied
    (out / "manifest.json").write_text("{")
    refused = dflash(*words, "--out", out, "--max-length", "50")
    assert refused.code == 1
    assert "made with other settings" in refused.err
    assert dflash(*words, "--out", out).code == 0
    assert contents(out) == contents(finished.out)


@pytest.mark.parametrize("also_lost", [[], ["checksums.json"]])
def test_a_lost_manifest_and_data_that_were_moved(
    finished: Store, copied: Store, tmp_path: Path, dflash: Run, also_lost: list[str]
) -> None:
    """Prepared again, samples.arrow names other sources: it is not the file that checksums.json lists."""
    words, out = list(copied.words), copied.out
    place = words.index("--data") + 1
    words[place] = shutil.copy(str(words[place]), tmp_path / "a-longer-name-elsewhere.jsonl")
    for name in ["manifest.json", *also_lost]:
        (out / name).unlink()
    assert dflash(*words, "--out", out).code == 0
    assert dflash("stats", out, "--verify").code == 0
    assert contents(out) == contents(finished.out)
