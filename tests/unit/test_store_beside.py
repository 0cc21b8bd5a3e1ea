"""Verification beside a living run: what it is making is no damage, what is committed is judged as ever."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_tool.store.beside import verify_committed
from dflash_tool.store.layout import ShardName
from dflash_tool.store.lock import LOCK, RunLock, run_at_work
from dflash_tool.store.recover import drop_shards
from dflash_tool.store.verify import verify
from tests.store_kit import make_store

LENGTHS = [5, 100, 1, 64, 33, 200]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An unfinished store: one of its samples is missing."""
    return make_store(tmp_path / "store", LENGTHS, complete=False).root


@pytest.fixture
def locked(root: Path) -> Iterator[Path]:
    with RunLock(root):
        yield root


def kinds(root: Path) -> list[str]:
    return [found.kind for found in verify_committed(root)]


def drop_all(root: Path) -> None:
    shutil.rmtree(root / "shards")
    shutil.rmtree(root / "index")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


IN_PROGRESS: dict[str, Callable[[Path], None]] = {
    "a shard between its two renames": lambda root: shutil.rmtree(root / "shards" / "b1-r0-00000.zarr"),
    "extract.yaml, not listed yet": lambda root: (root / "extract.yaml").write_text("seed: 0\n"),
}
BEFORE_THE_FIRST_SHARD: dict[str, Callable[[Path], None]] = {
    "a file of the head, not listed yet": lambda root: (root / "head" / "tokenizer.json").write_text("{}"),
    "the head, being replaced": lambda root: shutil.rmtree(root / "head"),
    "other samples, not listed yet": lambda root: flip(root / "samples.arrow"),
}
DAMAGE = {
    "rows": "shards/b1-r0-00000.zarr/hidden/0/c/0/0",
    "document": "shards/b1-r0-00000.zarr/zarr.json",
    "index": "index/b1-r0-00000.parquet",
    "checksum": "samples.arrow",
}


@pytest.mark.parametrize("what", IN_PROGRESS)
def test_what_a_run_is_making_is_no_damage(root: Path, what: str) -> None:
    IN_PROGRESS[what](root)
    assert kinds(root)
    with RunLock(root):
        assert kinds(root) == []
        assert list(verify(root))  # the run itself judges strictly


@pytest.mark.parametrize("what", BEFORE_THE_FIRST_SHARD)
def test_the_files_of_the_root_are_judged_once_a_shard_is_committed(locked: Path, what: str) -> None:
    BEFORE_THE_FIRST_SHARD[what](locked)
    assert set(kinds(locked)) == {"checksum"}
    drop_all(locked)
    assert kinds(locked) == []


@pytest.mark.parametrize("kind", DAMAGE)
def test_committed_damage_is_told(locked: Path, kind: str) -> None:
    flip(locked / DAMAGE[kind])
    assert kinds(locked) == [kind]


def test_a_dead_run_excuses_nothing(root: Path) -> None:
    holder = RunLock(root).holder._replace(started="12345")
    (root / LOCK).write_text(json.dumps(holder._asdict()))
    assert run_at_work(root) is None
    shutil.rmtree(root / "shards" / "b1-r0-00000.zarr")
    assert kinds(root) == ["missing"]


def test_a_shard_that_the_run_drops_meanwhile(locked: Path) -> None:
    """`extract --verify` beside it finds the same damage first, and makes the shard again."""
    flip(locked / DAMAGE["rows"])
    dropped = []

    def progress(_nbytes: int) -> None:
        if not dropped:
            dropped.append(ShardName(1, 0, 0))
            drop_shards(locked, dropped)

    assert list(verify_committed(locked, progress=progress)) == []


def test_a_complete_store_that_is_mended(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", LENGTHS).root
    drop_shards(root, [ShardName(1, 0, 0)])
    (root / "shards" / ".tmp-b1-r0-00001.zarr").mkdir()
    (root / "shards" / "mine.zarr").mkdir()
    with RunLock(root):
        assert [found.path.name for found in verify_committed(root)] == ["mine.zarr"]


def test_a_kill_between_the_two_renames_is_no_loss(root: Path) -> None:
    shard = root / "shards" / "b1-r0-00000.zarr"
    shard.rename(shard.with_name(f".tmp-{shard.name}"))
    assert kinds(root) == []
