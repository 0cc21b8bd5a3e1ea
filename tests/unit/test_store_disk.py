"""What a store will take is known to 1 % beforehand; too small a disk is refused with both numbers."""

from pathlib import Path

import numpy as np
import pytest

from dflash_tool.errors import StoreError
from dflash_tool.store.disk import check_room, predict_bytes
from dflash_tool.store.files import free_bytes
from tests.store_kit import make_store


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1_200_000])
def test_the_prediction_is_exact_to_1_percent(tmp_path: Path, shard_bytes: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 60)
    edges = (100, 200, 300, 400)
    made = make_store(
        tmp_path, lengths.tolist(), edges=edges, layers=(0, 1, 2), hidden_size=160, shard_bytes=shard_bytes
    )
    tokens = np.bincount(made.samples.buckets, weights=lengths, minlength=4).astype(int)
    predicted = predict_bytes(
        tokens.tolist(),
        np.bincount(made.samples.buckets, minlength=4).tolist(),
        layers=made.manifest.layers,
        hidden_size=160,
        store_dtype="bfloat16",
        shard_bytes=shard_bytes,
    )
    shards, index = (
        sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())
        for name in ("shards", "index")
    )
    assert predicted.rows == lengths.sum() * 160 * 2 * 3
    assert predicted.shards == len(list((tmp_path / "index").iterdir())) or shard_bytes < 1 << 30
    assert predicted.total == pytest.approx(shards + index, rel=0.01)
    if shard_bytes == 1 << 30:
        assert predicted.shards_bytes == shards


def test_too_small_a_disk_is_refused(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "there" / "yet")
    check_room(tmp_path, free // 2)
    with pytest.raises(StoreError, match=rf"needs {1 << 60:,} bytes more, .* has [\d,]+ bytes free; free"):
        check_room(tmp_path, 1 << 60)
