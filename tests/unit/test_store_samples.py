"""samples.arrow: what goes in comes out, from a map; damage is an error, not a crash."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dflash_tool.errors import StoreError
from dflash_tool.schemas.arrow import SAMPLES_SCHEMA, content_hash, make_sample_id
from dflash_tool.store.samples import Samples, SamplesWriter, bucket_of
from tests.store_kit import write_samples

LENGTHS = [5, 1, 16, 17, 40, 3, 8, 9, 10, 11, 40, 2]


def test_every_column_comes_back(tmp_path: Path) -> None:
    samples = write_samples(tmp_path, LENGTHS, (8, 16, 40))
    assert [path.name for path in tmp_path.iterdir()] == ["samples.arrow"]
    assert samples.lengths.tolist() == LENGTHS
    assert samples.buckets.tolist() == [0, 0, 1, 2, 2, 0, 0, 1, 1, 1, 2, 0]
    table = pa.ipc.open_file(str(tmp_path / "samples.arrow")).read_all()
    assert table.schema.equals(SAMPLES_SCHEMA, check_metadata=True)
    for row, expected in enumerate(table.to_pylist()):
        assert samples.tokens(row).tolist() == expected["input_ids"]
        assert samples.mask(row).tolist() == expected["loss_mask"]
        assert samples.source(row) == expected["source"] == f"random.jsonl:{row + 1}"
        assert samples.supervised[row] == sum(expected["loss_mask"])
        made = make_sample_id(content_hash(samples.tokens(row), samples.mask(row)), 0)
        assert samples.sample_id(row) == expected["sample_id"] == made


def test_tokens_are_views_into_the_map(tmp_path: Path) -> None:
    samples = write_samples(tmp_path, [1000] * 20, (1000,))
    before = pa.total_allocated_bytes()
    tokens = [samples.tokens(row) for row in range(20)]
    assert all(not part.flags.owndata and not part.flags.writeable for part in tokens)
    assert pa.total_allocated_bytes() == before


def test_no_samples(tmp_path: Path) -> None:
    samples = write_samples(tmp_path, [], (8,))
    assert len(samples) == 0
    assert samples.ids.shape == (0, 2)


def test_buckets_have_inclusive_edges() -> None:
    assert bucket_of(np.array([1, 8, 9, 16], np.int32), (8, 16)).tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="17 tokens is longer than the last edge 16"):
        bucket_of(np.array([17], np.int32), (8, 16))


def test_an_unfinished_writer_cleans_up_and_keeps_the_old_file(tmp_path: Path) -> None:
    write_samples(tmp_path, LENGTHS, (40,))
    before = (tmp_path / "samples.arrow").read_bytes()
    with pytest.raises(ZeroDivisionError), SamplesWriter(tmp_path):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="longer than the last edge"):
        write_samples(tmp_path, LENGTHS, (39,))
    assert [path.name for path in tmp_path.iterdir()] == ["samples.arrow"]
    assert (tmp_path / "samples.arrow").read_bytes() == before


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is missing: the store is not prepared"):
        Samples.open(tmp_path)


def test_another_schema(tmp_path: Path) -> None:
    table = pa.table({"sample_id": [b"x"]})
    with pa.ipc.new_file(str(tmp_path / "samples.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(StoreError, match=r"damaged: columns \['sample_id'\], expected"):
        Samples.open(tmp_path)


def test_cut_or_changed_bytes_never_crash(tmp_path: Path) -> None:
    write_samples(tmp_path, LENGTHS, (40,))
    path = tmp_path / "samples.arrow"
    good = path.read_bytes()
    choose = random.Random(0)
    damaged = [good[: choose.randrange(len(good))] for _ in range(30)]
    for _ in range(300):
        place = choose.randrange(len(good))
        damaged.append(good[:place] + bytes([good[place] ^ 1 << choose.randrange(8)]) + good[place + 1 :])
    refused = []
    for content in damaged:
        path.write_bytes(content)
        try:
            samples = Samples.open(tmp_path)
            for row in range(len(samples)):
                samples.tokens(row), samples.mask(row), samples.source(row), samples.sample_id(row)
        except StoreError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert all(str(path) in text for text in refused)
