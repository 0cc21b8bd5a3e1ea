"""One bit flipped, a file cut, lengthened, lost or added, anywhere in a store: verify finds it."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from dflash_tool.store.layout import ShardName
from dflash_tool.store.manifest import write_manifest
from dflash_tool.store.recover import drop_shards, recover
from dflash_tool.store.verify import bytes_to_verify, verify
from tests.store_kit import MadeStore, make_store, make_writer

LENGTHS = [5, 100, 1, 64, 33, 200]
KINDS = {  # a file of each kind: who must name it
    "manifest.json": "manifest",
    "checksums.json": "checksum",
    "head/head.safetensors": "checksum",
    "samples.arrow": "checksum",
    "head/config.json": "checksum",
    "index/b1-r0-00000.parquet": "index",
    "shards/b1-r0-00000.zarr/zarr.json": "document",
    "shards/b1-r0-00000.zarr/hidden/zarr.json": "document",
    "shards/b1-r0-00000.zarr/hidden/2/zarr.json": "document array",
    "shards/b1-r0-00000.zarr/hidden/2/c/0/0": "rows array",
}


@pytest.fixture
def made(tmp_path: Path) -> MadeStore:
    return make_store(tmp_path / "store", LENGTHS)


def test_a_good_store_has_none_and_every_byte_is_read(made: MadeStore) -> None:
    counts: list[int] = []
    assert list(verify(made.root, progress=counts.append)) == []
    assert sum(counts) == bytes_to_verify(made.root)
    assert list(verify(made.root, rehash=False)) == []


def test_all_kinds_of_files_are_tried(made: MadeStore) -> None:
    def kind(path: Path) -> str:
        return str(path.relative_to(made.root)).replace("b0-", "b1-").replace("b2-", "b1-").replace("/0/", "/2/", 1)

    files = [path for path in made.root.rglob("*") if path.is_file()]
    assert {kind(path).replace("c/2/0", "c/0/0") for path in files} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_one_flipped_bit_is_found(made: MadeStore, name: str) -> None:
    path = made.root / name
    good = path.read_bytes()
    choose = random.Random(name)
    places = {0, len(good) - 1, *(choose.randrange(len(good)) for _ in range(20))}
    for place in sorted(places):
        bad = bytearray(good)
        bad[place] ^= 1 << choose.randrange(8)
        path.write_bytes(bad)
        damages = list(verify(made.root))
        assert damages, place
        assert damages[0].kind in KINDS[name] or name.endswith("zarr.json"), (place, damages)
        assert any(str(path) in f"{damage.path} {damage.detail}" for damage in damages), (place, damages)
    path.write_bytes(good)
    assert list(verify(made.root)) == []


@pytest.mark.parametrize("change", ["cut by one", "halved", "emptied", "lengthened", "removed"])
@pytest.mark.parametrize("name", KINDS)
def test_another_length_is_found(made: MadeStore, name: str, change: str) -> None:
    path = made.root / name
    good = path.read_bytes()
    if change == "removed":
        path.unlink()
    else:
        sizes = {"cut by one": len(good) - 1, "halved": len(good) // 2, "emptied": 0, "lengthened": len(good)}
        path.write_bytes(good[: sizes[change]] + b"\0" * (change == "lengthened"))
    damages = list(verify(made.root))
    assert any(str(path) in f"{damage.path} {damage.detail}" for damage in damages), damages


@pytest.mark.parametrize("name", [name for name in KINDS if "b1-" in name])
@pytest.mark.parametrize("change", ["flipped", "removed"])
def test_a_damaged_shard_is_dropped_and_made_again(made: MadeStore, name: str, change: str) -> None:
    path = made.root / name
    good = path.read_bytes()
    path.unlink() if change == "removed" else path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    damages = list(verify(made.root))
    shards = {damage.shard for damage in damages if damage.shard}
    assert shards == {ShardName(1, 0, 0)}
    drop_shards(made.root, shards)
    held = recover(made.root, made.manifest.layers).index.ids()
    writer = make_writer(made.root, made.manifest)
    again = [row for row in range(len(LENGTHS)) if made.samples.sample_id(row) not in held]
    assert again == [1, 3, 4]
    for row in again:
        writer.append(1, [made.samples.sample_id(row)], [LENGTHS[row]], made.rows[row])
    writer.commit_all()
    assert path.read_bytes() == good
    assert list(verify(made.root)) == []


def test_damaged_rows_name_their_samples(made: MadeStore) -> None:
    path = made.root / "shards/b1-r0-00000.zarr/hidden/0/c/0/0"
    content = bytearray(path.read_bytes())
    content[150 * 16] ^= 1  # samples 1, 3, 4 are rows 0-99, 100-163, 164-196
    path.write_bytes(content)
    (damage,) = verify(made.root)
    assert (damage.kind, damage.path, damage.shard) == ("rows", path, ShardName(1, 0, 0))
    assert damage.sample_ids == (made.samples.sample_id(3),)
    assert list(verify(made.root, rehash=False)) == []


def test_missing_extra_and_absent_are_told(made: MadeStore) -> None:
    shutil.rmtree(made.root / "shards/b2-r0-00000.zarr")
    (made.root / "index/b0-r0-00000.parquet").unlink()
    (made.root / "shards/mine.zarr").mkdir()
    (made.root / "shards/.tmp-b0-r0-00001.zarr").mkdir()
    damages = list(verify(made.root))
    assert [(damage.kind, damage.path.name) for damage in damages] == [
        ("missing", "b2-r0-00000.zarr"),
        ("missing", "b0-r0-00000.parquet"),
        ("extra", "mine.zarr"),
        ("extra", ".tmp-b0-r0-00001.zarr"),
        ("absent", "shards"),
    ]
    assert damages[0].sample_ids == (made.samples.sample_id(5),)
    assert set(damages[-1].sample_ids) == {made.samples.sample_id(row) for row in (0, 2, 5)}


def test_quarantined_samples_and_those_still_to_come_are_not_missed(made: MadeStore) -> None:
    drop_shards(made.root, [ShardName(2, 0, 0)])
    assert [damage.kind for damage in verify(made.root)] == ["absent"]
    quarantined = (made.samples.sample_id(5).hex(),)
    write_manifest(made.root, made.manifest.model_copy(update={"quarantined": quarantined}))
    assert list(verify(made.root)) == []
    write_manifest(made.root, made.manifest.model_copy(update={"complete": False}))
    assert list(verify(made.root)) == []


def test_a_shard_of_another_store_is_told(made: MadeStore, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", [30, 31], seed=1)
    for kind in ("index/b0-r0-00000.parquet", "shards/b0-r0-00000.zarr"):
        (other.root / kind).rename(made.root / kind.replace("00000", "00001"))
    damages = list(verify(made.root))
    assert [damage.shard for damage in damages] == [ShardName(0, 0, 1)]
    assert "2 samples: not in samples.arrow" in damages[0].detail
    changed = made.manifest.model_copy(update={"seed": 7})
    write_manifest(made.root, changed)
    assert {damage.detail for damage in verify(made.root) if damage.kind == "document"} == {
        "it is of a store with other settings"
    }


def test_a_sample_twice_is_told(made: MadeStore) -> None:
    writer = make_writer(made.root, made.manifest)
    writer.append(0, [made.samples.sample_id(0)], [LENGTHS[0]], made.rows[0])
    writer.commit_all()
    (damage,) = verify(made.root)
    assert damage.kind == "twice"
    assert "b0-r0-00001" in damage.detail


def test_a_shard_that_someone_compressed_is_not_damage(made: MadeStore) -> None:
    path = made.root / "shards/b1-r0-00000.zarr"
    group = zarr.open_group(path, mode="a")
    rows = np.concatenate([made.rows[row][2] for row in (1, 3, 4)])
    array = group.create_array(
        "hidden/2", shape=rows.shape, dtype=rows.dtype, chunks=(50, 8), overwrite=True, fill_value=0
    )
    array[:] = rows
    assert list(verify(made.root)) == []
    array[170, 3] ^= 1
    (damage,) = verify(made.root)
    assert damage.sample_ids == (made.samples.sample_id(4),)


def test_rows_are_read_in_blocks(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_tool.store.verify._BLOCK_BYTES", 80 * 16)
    assert list(verify(made.root)) == []
