"""The store against zarr-python: the bytes that it writes, the values that it reads, with no code of ours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from dflash_tool.schemas.config import StoreDtype
from dflash_tool.store.layout import (
    NUMPY_DTYPE,
    array_document,
    array_file,
    array_file_bytes,
    chunk_index,
    group_document,
    padded_rows,
)
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.writer import ShardWriter
from tests.store_kit import make_store, random_rows

WIDTH = 24
DTYPES: tuple[StoreDtype, ...] = ("bfloat16", "float16", "float32")


def write_with_zarr(path: Path, rows: NDArray[Any], dtype: StoreDtype, **options: Any) -> None:
    """The same group and array, asked of zarr-python."""
    layout: dict[str, Any] = {
        "chunks": (64, rows.shape[1]),
        "shards": (padded_rows(len(rows)), rows.shape[1]),
        "compressors": None,
        "config": {"write_empty_chunks": True},
        **options,
    }
    array = zarr.open_group(path, mode="w").create_array(
        "hidden/3",
        shape=rows.shape,
        dtype=rows.dtype,
        fill_value=0,
        attributes={"torch_dtype": dtype},
        dimension_names=("token", "feature"),
        **layout,
    )
    array[:] = rows


def write_with_us(root: Path, rows: NDArray[Any], dtype: StoreDtype) -> Path:
    writer = ShardWriter(root, layer_ids=(3,), hidden_size=rows.shape[1], store_dtype=dtype)
    cut = len(rows) // 3
    lengths = [n for n in (cut, len(rows) - cut) if n]
    writer.append(0, [bytes([i]) * 16 for i in range(len(lengths))], lengths, {3: rows})
    writer.commit_all()
    return root / "shards" / "b0-r0-00000.zarr"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200, 640])
def test_files_equal_those_of_zarr_python(tmp_path: Path, length: int, dtype: StoreDtype) -> None:
    rows = random_rows(np.random.default_rng(length), length, WIDTH, dtype)
    ours = write_with_us(tmp_path / "ours", rows, dtype)
    write_with_zarr(tmp_path / "zarr", rows, dtype)
    for name in ("hidden/3/c/0/0", "hidden/3/zarr.json", "hidden/zarr.json"):
        assert (ours / name).read_bytes() == (tmp_path / "zarr" / name).read_bytes(), name
    files = {path.relative_to(ours) for path in ours.rglob("*")}
    assert files == {path.relative_to(tmp_path / "zarr") for path in (tmp_path / "zarr").rglob("*")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_zeros_are_there(tmp_path: Path, dtype: StoreDtype) -> None:
    rows = np.zeros((150, WIDTH), NUMPY_DTYPE[dtype])
    ours = write_with_us(tmp_path / "ours", rows, dtype)
    write_with_zarr(tmp_path / "zarr", rows, dtype)
    assert array_file(ours, 3).read_bytes() == array_file(tmp_path / "zarr", 3).read_bytes()


def test_group_document_with_attributes_equals_that_of_zarr_python(tmp_path: Path) -> None:
    attributes = {"dflash_index_xxh3": "ab", "dflash_settings": ""}
    zarr.open_group(tmp_path / "z", mode="w", attributes=attributes)
    assert group_document(attributes) == (tmp_path / "z" / "zarr.json").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_python_reads_our_values(tmp_path: Path, dtype: StoreDtype) -> None:
    made = make_store(tmp_path, [5, 100, 1, 64, 33, 200], store_dtype=dtype, shard_bytes=4000)
    with HiddenStore.open(tmp_path) as store:
        for place in range(len(store.index)):
            name = store.index.shards[store.index.shard[place]]
            group = zarr.open_group(tmp_path / "shards" / f"{name}.zarr", mode="r")
            start, length = int(store.index.row_start[place]), int(store.index.length[place])
            row = store.row_of(store.index.sample_ids[place].as_py())
            for layer in store.layers:
                array: Any = group[f"hidden/{layer}"]
                assert array.attrs["torch_dtype"] == dtype
                assert array.dtype == NUMPY_DTYPE[dtype]
                np.testing.assert_array_equal(array[start : start + length], made.rows[row][layer])
                np.testing.assert_array_equal(store.read(row, [layer])[layer], made.rows[row][layer])


@pytest.mark.parametrize(
    "options",
    [
        {"compressors": zarr.codecs.ZstdCodec()},
        {"shards": None},
        {"chunks": (32, 8), "shards": (128, 8)},
        {"chunks": (64, 8)},
        {"config": {"write_empty_chunks": False}},
    ],
    ids=["compressed", "unsharded", "other chunks", "narrow chunks", "empty chunks left out"],
)
def test_a_rewritten_array_is_read_through_zarr(tmp_path: Path, options: dict[str, Any]) -> None:
    made = make_store(tmp_path / "store", [100], layers=(3,))
    rows = made.rows[0][3].copy()
    if "config" in options:
        rows[:64] = 0
    write_with_zarr(tmp_path / "store" / "shards" / "b1-r0-00000.zarr", rows, "bfloat16", **options)
    with HiddenStore.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.read(0, verify="config" not in options)[3], rows)


def test_sizes_are_exact(tmp_path: Path) -> None:
    for rows in (1, 64, 65, 1000):
        write_with_zarr(tmp_path / str(rows), np.ones((rows, WIDTH), np.float32), "float32")
        path = tmp_path / str(rows)
        assert array_file(path, 3).stat().st_size == array_file_bytes(rows, WIDTH * 4)
        assert array_file(path, 3).read_bytes().endswith(chunk_index(rows, WIDTH * 4))
        assert (path / "hidden" / "3" / "zarr.json").read_bytes() == array_document(rows, WIDTH, "float32")
