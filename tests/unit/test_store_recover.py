"""A kill between any two steps of a commit leaves a store that recovers; nothing foreign is touched."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_tool.errors import StoreError
from dflash_tool.store import writer as writer_module
from dflash_tool.store.layout import ShardName
from dflash_tool.store.manifest import write_manifest
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.recover import drop_shards, read_index, recover
from dflash_tool.store.verify import verify
from tests.store_kit import MadeStore, make_store, make_writer

CALLS = ("open", "mkdir", "write", "fsync", "rename")


def watch_calls(patch: pytest.MonkeyPatch, before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `before(name, arguments)` before every system call by which a writer changes a disk, one at a time."""
    one_at_a_time = threading.RLock()
    inside = False

    def call(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        with one_at_a_time:
            if not inside:  # `before` may make the same calls
                inside = True
                try:
                    before(name, args)
                finally:
                    inside = False
            return original(*args, **kwargs)

    for name in CALLS:
        patch.setattr(writer_module.os, name, partial(call, name, getattr(os, name)))


def append(made: MadeStore, writer: writer_module.ShardWriter, row: int) -> None:
    sample_id, bucket = made.samples.sample_id(row), int(made.samples.buckets[row])
    writer.append(bucket, [sample_id], [int(made.samples.lengths[row])], made.rows[row])


def test_a_kill_before_any_step_is_recovered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL leaves what the system calls made so far: a copy of the folder before each of them."""
    made = make_store(tmp_path / "store", [10, 20, 70], complete=False)
    writer = make_writer(made.root, made.manifest)
    steps: list[Path] = []
    originals = {name: getattr(os, name) for name in CALLS}

    def before(name: str, args: tuple[Any, ...]) -> None:
        steps.append(tmp_path / f"{len(steps):03}")
        shutil.copytree(made.root, steps[-1])

    with monkeypatch.context() as patch:
        watch_calls(patch, before)
        append(made, writer, 2)
        writer.commit_all()
    assert {name: getattr(os, name) for name in CALLS} == originals
    steps.append(made.root)
    assert len(steps) > 30

    held = []
    for root in steps:
        recovered = recover(root, made.manifest.layers)
        held.append(len(recovered.index))
        assert recover(root, made.manifest.layers).removed == ()
        assert list(verify(root)) == []
        again = make_writer(root, made.manifest)
        if held[-1] < 3:
            append(made, again, 2)
            again.commit_all()
        with HiddenStore.open(root) as store:
            for row in range(3):
                for layer, rows in store.read(row, verify=True).items():
                    np.testing.assert_array_equal(rows, made.rows[row][layer])
    assert held == sorted(held)
    assert set(held) == {2, 3}


def test_an_error_in_any_step_leaves_a_good_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, but the process lives on: it may commit its other shards and append the lost samples again."""
    made = make_store(tmp_path / "store", [10, 20, 70], complete=False)
    failing = count = 0

    def before(name: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        if count == failing + 1:
            raise OSError(errno.EIO, "Input/output error")

    while True:
        root = tmp_path / f"{failing:03}"
        shutil.copytree(made.root, root)
        writer = make_writer(root, made.manifest)
        count = 0
        with monkeypatch.context() as patch, suppress(StoreError):
            watch_calls(patch, before)
            append(made, writer, 2)
            writer.commit_all()
        if count <= failing:
            break
        if made.samples.sample_id(2) not in recover(root, made.manifest.layers).index.ids():
            append(made, writer, 2)
            writer.commit_all()
        assert len(recover(root, made.manifest.layers).index) == 3
        assert list(verify(root)) == []
        failing += 1
    assert failing > 30


def test_everything_is_durable_before_the_step_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power loss: what a rename makes visible was synced after its last change, in the order of the design."""
    made = make_store(tmp_path / "store", [10, 20, 70], complete=False)
    unsynced: set[str] = set()
    renames = []

    def before(name: str, args: tuple[Any, ...]) -> None:
        if (name == "open" and args[1] & os.O_CREAT) or name == "mkdir":
            unsynced.update((str(args[0]), str(Path(args[0]).parent)))
        elif name == "write":
            unsynced.add(str(Path(f"/proc/self/fd/{args[0]}").readlink()))
        elif name == "fsync":
            unsynced.discard(str(Path(f"/proc/self/fd/{args[0]}").readlink()))
        elif name == "rename":
            source, target = (Path(path) for path in args)
            renames.append(target.parent.name)
            assert not [path for path in unsynced if path.startswith(str(source))]
            if target.parent.name == "shards":
                assert str(made.root / "index") not in unsynced
            unsynced.update((str(source.parent), str(target.parent)))

    with monkeypatch.context() as patch:
        watch_calls(patch, before)
        writer = make_writer(made.root, made.manifest)
        append(made, writer, 2)
        writer.commit_all()
        write_manifest(made.root, made.manifest)
    assert renames == ["index", "shards", "store"]
    assert str(made.root) not in unsynced
    assert not [path for path in unsynced if path.startswith(str(made.root / "index"))]
    assert str(made.root / "shards") not in unsynced


def test_leftovers_are_removed_and_named(tmp_path: Path) -> None:
    made = make_store(tmp_path, [10, 40, 200])
    shutil.rmtree(tmp_path / "shards/b0-r0-00000.zarr")
    (tmp_path / "index/b1-r0-00000.parquet").unlink()
    (tmp_path / "index/.tmp-b7-r0-00000.parquet").touch()
    (tmp_path / "shards/.tmp-b7-r3-00000.zarr/hidden").mkdir(parents=True)
    (tmp_path / ".tmp-head").mkdir()
    (tmp_path / ".tmp-manifest.json").touch()
    recovered = recover(tmp_path, made.manifest.layers)
    assert [text.partition(":")[0] for text in recovered.removed] == [
        "shards/.tmp-b7-r3-00000.zarr",
        "index/.tmp-b7-r0-00000.parquet",
        ".tmp-head",
        ".tmp-manifest.json",
        "index/b0-r0-00000.parquet",
        "shards/b1-r0-00000.zarr",
    ]
    assert recovered.index.ids() == {made.samples.sample_id(2)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checksums.json",
        "head",
        "index",
        "manifest.json",
        "samples.arrow",
        "shards",
    ]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    make_store(tmp_path, [10])
    foreign = ["shards/.tmp-mine", "shards/b1-r0-1.zarr", "index/notes.txt", ".tmp-else", "index/.nfs0001"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    assert recover(tmp_path, (0, 2)).removed == ()
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)


@pytest.mark.parametrize("name", ["shards", "index", "shards/b5-r0-00000.zarr", "index/.tmp-b5-r0-00000.parquet"])
def test_links_are_refused(tmp_path: Path, name: str) -> None:
    make_store(tmp_path / "store", [10])
    other = make_store(tmp_path / "other", [10])
    path = tmp_path / "store" / name
    if path.is_dir():
        shutil.rmtree(path)
    path.symlink_to(other.root / "shards")
    with pytest.raises(StoreError, match=r"is a link.* move"):
        recover(tmp_path / "store", (0, 2))
    assert len(read_index(other.root, (0, 2))) == 1


def test_a_damaged_index_drops_its_shard(tmp_path: Path) -> None:
    made = make_store(tmp_path, [10, 40])
    path = tmp_path / "index/b0-r0-00000.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    recovered = recover(tmp_path, (0, 2))
    assert recovered.index.ids() == {made.samples.sample_id(1)}
    assert len(recovered.removed) == 1
    assert str(path) in recovered.removed[0]
    assert not path.exists()
    assert not (tmp_path / "shards/b0-r0-00000.zarr").exists()


def test_shards_of_other_layers_are_refused_not_dropped(tmp_path: Path) -> None:
    make_store(tmp_path, [10], layers=(0, 2))
    with pytest.raises(StoreError, match="is of layers 0,2, expected 1,2"):
        recover(tmp_path, (1, 2))
    assert len(recover(tmp_path, (0, 2)).index) == 1


def test_a_sample_twice_is_refused_with_both_shards(tmp_path: Path) -> None:
    made = make_store(tmp_path, [10, 40])
    writer = make_writer(tmp_path, made.manifest, rank=1)
    append(made, writer, 1)
    writer.commit_all()
    with pytest.raises(StoreError, match=f"sample {made.samples.sample_id(1).hex()} .*b1-r0-00000 .* b1-r1-00000"):
        recover(tmp_path, (0, 2))


def test_dropped_shards_are_gone(tmp_path: Path) -> None:
    made = make_store(tmp_path, [10, 40])
    drop_shards(tmp_path, [ShardName(0, 0, 0), ShardName(9, 9, 9)])
    assert read_index(tmp_path, (0, 2)).ids() == {made.samples.sample_id(1)}
    assert recover(tmp_path, (0, 2)).removed == ()
