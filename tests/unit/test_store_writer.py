"""Rows go to disk as they come; shards are committed by size, by age and at the end; a full disk is survived."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.store import writer as writer_module
from dflash_tool.store.layout import ShardName
from dflash_tool.store.recover import read_index, recover
from dflash_tool.store.writer import ShardWriter
from tests.store_kit import make_store

WIDTH, LAYERS = 8, (1, 5)
ROW_BYTES = WIDTH * 2 * len(LAYERS)


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def new_writer(root: Path, **options: Any) -> ShardWriter:
    return ShardWriter(root, layer_ids=LAYERS, hidden_size=WIDTH, store_dtype="bfloat16", **options)


def batch(total: int, seed: int = 0) -> dict[Any, NDArray[np.uint16]]:
    rng = np.random.default_rng(seed)
    return {layer: rng.integers(0, 1 << 16, (total, WIDTH), np.uint16) for layer in LAYERS}


def sample_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in [*(root / "shards").iterdir(), *(root / "index").iterdir()])


def test_the_index_says_where_rows_are_and_what_they_hash_to(tmp_path: Path) -> None:
    rows = batch(10)
    writer = new_writer(tmp_path)
    writer.append(3, [sample_id(1), sample_id(2)], [4, 6], rows)
    writer.commit_all()
    index = read_index(tmp_path, LAYERS)
    assert index.shards == (ShardName(3, 0, 0),)
    assert index.row_start.tolist() == [0, 4]
    assert index.length.tolist() == [4, 6]
    for layer, column in zip(LAYERS, index.hashes.T, strict=True):
        parts = rows[layer][:4], rows[layer][4:]
        assert column.tolist() == [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]
    assert index.find([sample_id(2), sample_id(9), sample_id(1)]).tolist() == [1, -1, 0]


def test_rows_are_in_the_file_when_append_returns(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    rows = batch(70)
    writer.append(0, [sample_id(0)], [70], rows)
    folder = tmp_path / "shards" / ".tmp-b0-r0-00000.zarr"
    for layer in LAYERS:
        assert (folder / "hidden" / str(layer) / "c/0/0").read_bytes() == rows[layer].tobytes()
    assert (writer.counters.rows, writer.counters.samples) == (70, 1)
    assert writer.counters.bytes_written == 70 * ROW_BYTES
    assert writer.counters.shards_committed == 0
    writer.commit_all()
    files = [tmp_path / "shards/b0-r0-00000.zarr/hidden" / str(layer) / "c/0/0" for layer in LAYERS]
    assert writer.counters.bytes_written == sum(path.stat().st_size for path in files)
    assert (writer.counters.shards_committed, writer.counters.samples_committed) == (1, 1)


def test_a_shard_is_committed_at_its_size(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, shard_bytes=10 * ROW_BYTES)
    for number in range(5):
        writer.append(0, [sample_id(number)], [4], batch(4))
    assert names(tmp_path) == [".tmp-b0-r0-00001.zarr", "b0-r0-00000.parquet", "b0-r0-00000.zarr"]
    writer.commit_all()
    assert read_index(tmp_path, LAYERS).shard.tolist() == [0, 0, 0, 1, 1]


def test_shards_are_committed_at_their_age(tmp_path: Path) -> None:
    clock = Clock()
    writer = new_writer(tmp_path, commit_every=10, clock=clock)
    assert writer.seconds_until_due() is None
    writer.append(0, [sample_id(0)], [4], batch(4))
    clock.now += 6
    writer.append(1, [sample_id(1)], [4], batch(4))
    writer.append(0, [sample_id(2)], [4], batch(4))
    assert writer.seconds_until_due() == 4
    writer.commit_due()
    assert writer.counters.shards_committed == 0
    clock.now += 4
    writer.commit_due()
    assert names(tmp_path) == [".tmp-b1-r0-00000.zarr", "b0-r0-00000.parquet", "b0-r0-00000.zarr"]
    assert writer.seconds_until_due() == 6


def test_numbers_go_on_after_those_that_are_there(tmp_path: Path) -> None:
    for rank in (0, 0, 1):
        writer = new_writer(tmp_path, rank=rank)
        writer.append(2, [os.urandom(16)], [1], batch(1))
        writer.commit_all()
    (tmp_path / "index" / "b2-r1-00004.parquet").touch()  # a leftover's number isn't used again either
    writer = new_writer(tmp_path, rank=1)
    writer.append(2, [os.urandom(16)], [1], batch(1))
    writer.commit_all()
    shards = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert shards == ["b2-r0-00000.zarr", "b2-r0-00001.zarr", "b2-r1-00000.zarr", "b2-r1-00005.zarr"]


def test_abandon_drops_what_is_open(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    writer.append(0, [sample_id(0)], [4], batch(4))
    writer.commit_all()
    writer.append(0, [sample_id(1)], [4], batch(4))
    writer.abandon()
    assert names(tmp_path) == ["b0-r0-00000.parquet", "b0-r0-00000.zarr"]
    writer.append(0, [sample_id(1)], [4], batch(4))
    writer.commit_all()
    assert len(recover(tmp_path, LAYERS).index) == 2


@pytest.mark.parametrize("seed", range(3))
def test_padding_is_within_the_bound(tmp_path: Path, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 300, 40).tolist()
    made = make_store(tmp_path, lengths, hidden_size=128, shard_bytes=400_000, seed=seed)
    shards = list((tmp_path / "shards").iterdir())
    stored = sum(path.stat().st_size for path in (tmp_path / "shards").rglob("*") if path.is_file())
    row_bytes = made.manifest.layer_row_bytes
    assert stored <= sum(lengths) * row_bytes * 2 * 1.005 + 63 * row_bytes * 2 * len(shards)


def test_arrays_of_another_form_are_refused(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    good = batch(4)
    for bad in (good[1][:3], good[1].astype(np.int16), np.asfortranarray(good[1]), good[1][:, :4]):
        with pytest.raises(ValueError, match=r"layer 1: got .* expected C-contiguous uint16 \(4, 8\)"):
            writer.append(0, [sample_id(0)], [4], {**good, 1: bad})
    with pytest.raises(ValueError, match="lengths"):
        writer.append(0, [sample_id(0)], [4, 0], good)
    with pytest.raises(ValueError, match="bucket -1"):
        writer.append(-1, [sample_id(0)], [4], good)
    assert names(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("only root can mount a small disk")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_keeps_what_is_committed(tiny_disk: Path) -> None:
    writer = new_writer(tiny_disk)
    writer.append(0, [sample_id(0)], [100], batch(100))
    writer.commit_all()
    writer.append(1, [sample_id(1)], [100], batch(100))
    with pytest.raises(StoreError, match=r"No space left on device \([\d,]+ bytes free\); free some space"):
        writer.append(0, [sample_id(2)], [20_000], batch(20_000))
    writer.commit_all()  # there is room again for the other open shard
    assert names(tiny_disk) == [f"b{b}-r0-00000.{s}" for b in (0, 1) for s in ("parquet", "zarr")]
    recovered = recover(tiny_disk, LAYERS)
    assert recovered.removed == ()
    assert len(recovered.index) == 2


def test_a_shard_that_cannot_be_committed_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = new_writer(tmp_path)
    for bucket in range(3):
        writer.append(bucket, [sample_id(bucket)], [4], batch(4))
    refused = iter([True])

    def full(*args: Any) -> None:
        if next(refused, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(*args)

    write_all = writer_module.write_all
    monkeypatch.setattr(writer_module, "write_all", full)
    with pytest.raises(StoreError, match="No space left"):
        writer.commit_all()
    assert recover(tmp_path, LAYERS).index.ids() == {sample_id(1), sample_id(2)}
    assert writer.counters.samples_committed == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
def test_any_disk_error_is_told_and_leaves_a_good_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    writer = new_writer(tmp_path)
    writer.append(0, [sample_id(0)], [4], batch(4))
    writer.commit_all()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, call, fail)
        with pytest.raises(StoreError, match=f"{tmp_path}.*{os.strerror(code)}.*; "):  # noqa: PT012 - either may
            writer.append(1, [sample_id(1)], [4], batch(4))
            writer.commit_all()
    assert recover(tmp_path, LAYERS).index.ids() == {sample_id(0)}
    writer.append(1, [sample_id(1)], [4], batch(4))
    writer.commit_all()
    assert recover(tmp_path, LAYERS).index.ids() == {sample_id(0), sample_id(1)}
