"""Rows come back bit for bit, into any buffer, from many threads; what can't be read is named."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_tool.errors import StoreError
from dflash_tool.schemas.config import StoreDtype
from dflash_tool.store.layout import array_file
from dflash_tool.store.manifest import write_manifest
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.verify import verify
from tests.store_kit import make_store, make_writer

LENGTHS = [5, 100, 1, 64, 33, 200, 7, 128]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    width=st.integers(1, 20),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    shard_bytes=st.integers(1, 20_000),
    inner_edges=st.sets(st.integers(1, 149), max_size=4),
)
def test_any_store_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    width: int,
    dtype: StoreDtype,
    shard_bytes: int,
    inner_edges: set[int],
) -> None:
    edges = (*sorted(inner_edges), 150)
    root = tmp_path_factory.mktemp("store")
    made = make_store(root, lengths, edges=edges, hidden_size=width, store_dtype=dtype, shard_bytes=shard_bytes)
    with HiddenStore.open(root) as store:
        assert store.committed.all()
        for row in range(len(lengths)):
            for layer, rows in store.read(row, verify=True).items():
                np.testing.assert_array_equal(rows, made.rows[row][layer])
    assert list(verify(root)) == []


def test_by_id_some_layers_into_given_buffers(tmp_path: Path) -> None:
    made = make_store(tmp_path, LENGTHS, layers=(0, 2, 4), shard_bytes=3000)
    batch = np.zeros((150, 8), np.uint16)
    with HiddenStore.open(tmp_path) as store:
        result = store.read(made.samples.sample_id(1), [4], {4: batch[20:120]}, verify=True)
        assert list(result) == [4]
        assert np.shares_memory(result[4], batch)
        np.testing.assert_array_equal(batch[20:120], made.rows[1][4])
        assert not batch[:20].any()
        assert not batch[120:].any()
        with pytest.raises(ValueError, match="layer 3 isn't stored, only 0, 2, 4"):
            store.read(1, [3])
        for bad in (batch, batch[:100].astype(np.int16), np.zeros((100, 16), np.uint16)[:, ::2]):
            with pytest.raises(ValueError, match=r"expected C-contiguous uint16 \(100, 8\)"):
                store.read(1, [4], {4: bad})
        with pytest.raises(StoreError, match=f"no sample {'00' * 16}"):
            store.read(bytes(16))


def test_duplicates_in_the_data_are_told_apart(tmp_path: Path) -> None:
    """Ids of equal contents differ in the occurrence number only."""
    made = make_store(tmp_path, [4, 4, 4])
    ids = np.repeat(made.samples.ids[:1], 3, axis=0)
    ids[:, 1] += np.arange(3, dtype=np.uint64) << np.uint64(32)
    with HiddenStore.open(tmp_path) as store:
        store.samples.ids = ids
        assert [store.row_of(store.samples.sample_id(row)) for row in range(3)] == [0, 1, 2]


def test_many_threads_and_few_open_files(tmp_path: Path) -> None:
    made = make_store(tmp_path, LENGTHS, shard_bytes=1)
    threads = 8
    barrier = threading.Barrier(threads)
    with HiddenStore.open(tmp_path, max_open=2) as store:

        def work(seed: int) -> None:
            barrier.wait()
            for row in np.random.default_rng(seed).integers(0, len(LENGTHS), 100).tolist():
                for layer, rows in store.read(row, verify=True).items():
                    np.testing.assert_array_equal(rows, made.rows[row][layer])
                if row == seed:
                    store.refresh()

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))


def test_a_growing_store(tmp_path: Path) -> None:
    made = make_store(tmp_path, LENGTHS, complete=False)
    last = len(LENGTHS) - 1
    with HiddenStore.open(tmp_path) as store:
        assert store.committed.tolist() == [True] * last + [False]
        with pytest.raises(StoreError, match=rf"row {last}, random\.jsonl:8.* is not in the store .*extract again"):
            store.read(last)
        writer = make_writer(tmp_path, made.manifest)
        writer.append(0, [made.samples.sample_id(last)], [LENGTHS[last]], made.rows[last])
        assert store.refresh() == last
        writer.commit_all()
        assert store.refresh() == last + 1
        np.testing.assert_array_equal(store.read(last)[2], made.rows[last][2])


def test_what_is_settled_while_a_store_grows(tmp_path: Path) -> None:
    """Committed, quarantined, or the store complete; and another store in its place is no growth."""
    made = make_store(tmp_path, LENGTHS, complete=False)
    last = len(LENGTHS) - 1
    rows = np.arange(len(LENGTHS))
    with HiddenStore.open(tmp_path) as store:
        assert store.settled(rows).tolist() == [True] * last + [False]
        assert not store.holes(rows).any()
        quarantined = made.manifest.model_copy(update={"quarantined": (made.samples.sample_id(last).hex(),)})
        write_manifest(tmp_path, quarantined)
        store.refresh()
        assert store.settled(rows).all()
        assert store.holes(rows).tolist() == [False] * last + [True]
        write_manifest(tmp_path, made.manifest.model_copy(update={"seed": 1}))
        with pytest.raises(StoreError, match="made anew"):
            store.refresh()
        write_manifest(tmp_path, quarantined.model_copy(update={"complete": True}))
        store.refresh()
        assert store.manifest.complete
        assert store.holes(rows).tolist() == [False] * last + [True]


def test_quarantined_samples_are_known_before_the_end(tmp_path: Path) -> None:
    """The next shard of the bucket that is committed names them; the manifest, once complete, has the last word."""
    made = make_store(tmp_path, LENGTHS, complete=False)
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    for path in (tmp_path / "shards").iterdir():
        shutil.rmtree(path)
    ids = [made.samples.sample_id(row) for row in range(3)]
    bucket = int(made.samples.buckets[0])
    writer = make_writer(tmp_path, made.manifest)
    with HiddenStore.open(tmp_path) as store:
        writer.quarantine(bucket, [ids[1]])
        writer.commit_all()
        assert not store.refresh()
        assert not store.quarantined.any()
        writer.append(bucket, ids[:1], LENGTHS[:1], made.rows[0])
        writer.commit_all()
        assert store.refresh() == 1
        assert np.flatnonzero(store.quarantined).tolist() == [1]
        assert np.flatnonzero(store.settled(np.arange(len(LENGTHS)))).tolist() == [0, 1]
        assert not list(verify(tmp_path))
        writer.append(bucket, ids[2:], LENGTHS[2:3], made.rows[2])
        writer.commit_all()  # says it no more
        assert [part.quarantined for part in store._parts.values()] == [(ids[1],)]
        store.refresh()
        assert [part.quarantined for part in store._parts.values()] == [(ids[1],), ()]
        writer.append(bucket, ids[1:2], LENGTHS[1:2], made.rows[1])  # another run had better luck
        writer.commit_all()
        store.refresh()
        assert not store.quarantined.any()
        write_manifest(tmp_path, made.manifest.model_copy(update={"complete": True, "quarantined": (ids[0].hex(),)}))
        store.refresh()
        assert not store.quarantined.any()  # what is committed is there


def test_an_empty_store(tmp_path: Path) -> None:
    make_store(tmp_path, [3], complete=False)
    with HiddenStore.open(tmp_path) as store:
        assert not store.committed.any()


def test_changed_rows_are_named(tmp_path: Path) -> None:
    made = make_store(tmp_path, [5, 6, 7])
    path = array_file(tmp_path / "shards" / "b0-r0-00000.zarr", 2)
    content = bytearray(path.read_bytes())
    content[6 * 16] ^= 4  # row 6: the second of sample 1
    path.write_bytes(content)
    with HiddenStore.open(tmp_path) as store:
        store.read(0, verify=True)
        store.read(1, [0], verify=True)
        with pytest.raises(StoreError, match=r"\(shard b0-r0-00000, rows 5 to 10\).*layer 2 have hash") as caught:
            store.read(1, verify=True)
        assert made.samples.sample_id(1).hex() in str(caught.value)


@pytest.mark.parametrize("what", ["cut", "missing", "document", "crc", "folder"])
def test_broken_files_are_named(tmp_path: Path, what: str) -> None:
    make_store(tmp_path, [5])
    shard = tmp_path / "shards" / "b0-r0-00000.zarr"
    path = array_file(shard, 0)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "missing":
        path.unlink()
    elif what == "document":
        path = path.parent.parent.parent / "zarr.json"
        path.write_text("{")
    elif what == "crc":
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    else:
        path.unlink()
        path.mkdir()
    with (
        HiddenStore.open(tmp_path) as store,
        pytest.raises(StoreError, match=rf"shard b0-r0-00000, rows 0 to 4\).*{path}|no regular file"),
    ):
        store.read(0)
