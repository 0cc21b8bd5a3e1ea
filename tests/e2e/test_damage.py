"""One bit flipped, or the end cut off, in every kind of file: found by `stats --verify`, made again by `extract`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tool.store.manifest import differences, read_manifest

from .running import contents

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


@pytest.fixture(scope="module")
def whole(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[object], Path]:
    """The command's words without --out, and a finished store."""
    from dflash_tool import pipeline
    from dflash_tool.schemas.config import ExtractConfig

    out = tmp_path_factory.mktemp("whole") / "store"
    target, data = random_target(), token_rows(60)
    pipeline.extract(ExtractConfig(target=str(target), data=(data,), out=out, layers=(1, 2)))
    return ["extract", "--target", target, "--data", data, "--layers", "1,2"], out


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
def test_damage_is_found_and_made_again(
    whole: tuple[list[object], Path], tmp_path: Path, dflash: Run, kind: str, harm: str
) -> None:
    words, original = whole
    out = tmp_path / "store"
    shutil.copytree(original, out)
    file = next(out.glob(KINDS[kind]))
    content = file.read_bytes()
    if harm == "remove":
        file.unlink()
    else:
        file.write_bytes(_flip(content) if harm == "flip" else content[:-3])
    _settle(words, out, original, dflash)


def test_a_shard_that_is_gone(whole: tuple[list[object], Path], tmp_path: Path, dflash: Run) -> None:
    words, original = whole
    out = tmp_path / "store"
    shutil.copytree(original, out)
    shutil.rmtree(next((out / "shards").glob("b1-*")))
    _settle(words, out, original, dflash)


def test_a_lost_manifest_is_not_replaced_by_that_of_other_settings(
    whole: tuple[list[object], Path], tmp_path: Path, dflash: Run
) -> None:
    words, original = whole
    out = tmp_path / "store"
    shutil.copytree(original, out)
    (out / "manifest.json").write_text("{")
    refused = dflash(*words, "--out", out, "--max-length", "50")
    assert refused.code == 1
    assert "made with other settings" in refused.err
    assert dflash(*words, "--out", out).code == 0
    assert contents(out) == contents(original)
