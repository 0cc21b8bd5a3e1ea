"""A store's page and the comparison of stores, against numbers computed by plain loops."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_tool.buckets import choose_edges, fewest_slots
from dflash_tool.report.compare import compare
from dflash_tool.report.norms import as_float32, layer_norms
from dflash_tool.report.padding import padding_by_buckets, padding_by_scheme
from dflash_tool.report.store_page import look, store_page
from dflash_tool.stats import StoreStats, store_stats
from dflash_tool.store.beside import verify_committed
from dflash_tool.store.manifest import write_manifest
from dflash_tool.store.reader import HiddenStore
from tests.store_kit import MadeStore, make_store

from .report_kit import checked

LENGTHS = [5, 40, 17, 200, 33, 9, 128, 64, 7, 300, 12, 90, 31]
FIGURES = [
    "Lengths", "Buckets", "Padding by scheme", "Would more buckets pay?", "Supervised share", "Bytes by layer",
    "Shard sizes", "Hidden states by layer",
]  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> MadeStore:
    return make_store(tmp_path / "store", LENGTHS, shard_bytes=4000)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_the_curve_is_that_of_the_best_edges(lengths: list[int]) -> None:
    every = np.array(lengths)
    slots = fewest_slots(every, 6)
    for k, found in enumerate(slots, 1):
        edges = choose_edges(every, k)
        assert found == sum(min(edge for edge in edges if edge >= length) for length in lengths)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=40))
def test_padding_by_scheme_against_plain_loops(lengths: list[int]) -> None:
    edges = (10, 50, 99)
    batches = [lengths[at : at + 8] for at in range(0, len(lengths), 8)]
    padded = [
        sum(len(batch) * max(batch) for batch in batches),
        len(lengths) * max(lengths),
        sum(next(edge for edge in edges if edge >= length) for length in lengths),
    ]
    shares = [share for _, share in padding_by_scheme(np.array(lengths), edges, 0.125)]
    assert shares == pytest.approx([*(1 - sum(lengths) / each for each in padded), 0.125])
    curve = padding_by_buckets(np.array(lengths))
    assert len(curve) == 16
    assert curve[0] == pytest.approx(shares[1])
    assert curve == sorted(curve, reverse=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norms_by_layer_against_torch(tmp_path: Path, dtype: Any) -> None:
    made = make_store(tmp_path / "store", LENGTHS[:6], store_dtype=dtype)
    with HiddenStore.open(made.root) as store:
        read, norms = layer_norms(store)
    assert read == 6
    for layer, found in zip((0, 2), norms, strict=True):
        parts = [as_torch(rows[layer], dtype) for rows in made.rows]
        rows = torch.cat(parts).double()
        assert found.layer == layer
        assert found.norm == pytest.approx(rows.norm(dim=1).mean().item(), rel=1e-5)
        assert found.largest == pytest.approx(rows.abs().max().item())
        means = rows.abs().mean(0)
        top = means.topk(5)
        assert [channel for channel, _ in found.channels] == top.indices.tolist()
        assert [mean for _, mean in found.channels] == pytest.approx(top.values.tolist(), rel=1e-5)
        assert found.median == pytest.approx(float(np.median(means.numpy())), rel=1e-5)


def as_torch(rows: NDArray[Any], dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(rows)
    if dtype == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
        assert torch.equal(torch.from_numpy(as_float32(rows, "bfloat16")), tensor.float())
    return tensor


def test_norms_are_of_samples_spread_over_the_lengths(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", list(range(1, 41)), layers=(0,))
    rows_read: list[int] = []

    class Watched(HiddenStore):
        def read(self, sample: Any, *args: Any, **kwargs: Any) -> Any:
            rows_read.append(sample)
            return super().read(sample, *args, **kwargs)

    with Watched.open(made.root) as store:
        layer_norms(store)
    lengths = sorted(int(made.samples.lengths[row]) for row in rows_read)
    assert len(lengths) == 8
    assert (lengths[0], lengths[-1]) == (1, 40)
    assert max(b - a for a, b in itertools.pairwise(lengths)) <= 6


def test_bytes_of_layers_and_shards_are_those_on_the_disk(made: MadeStore) -> None:
    seen = store_stats(made.root)
    shards = sorted((made.root / "shards").iterdir())
    assert seen.shards == len(shards) > 2
    assert sorted(seen.shard_sizes) == sorted(on_disk(shard) for shard in shards)
    for layer in (0, 2):
        assert seen.layer_bytes[layer] == sum(on_disk(shard / "hidden" / str(layer)) for shard in shards)
    assert seen.shard_bytes == on_disk(made.root / "shards")


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_page_has_every_picture_with_its_numbers(made: MadeStore) -> None:
    seen = store_stats(made.root)
    page = checked(store_page([look(seen, [])]))
    assert page.figures == dict.fromkeys(FIGURES, 1)
    lengths = page.tables["Lengths"][1:]
    assert sum(int(row[1]) for row in lengths) == len(LENGTHS)
    for name, samples in lengths:
        low, _, high = name.partition("-")
        assert int(samples) == sum(int(low) <= length <= int(high or low) for length in LENGTHS)
    assert [row[:4] for row in page.tables["Buckets"][1:]] == [
        ["0: 1-32", "6", "6", "81"], ["1: 33-128", "5", "5", "355"], ["2: 129-4096", "2", "2", "500"],
    ]  # fmt: skip
    assert len(page.tables["Would more buckets pay?"]) == 17
    assert [row[0] for row in page.tables["Hidden states by layer"][1:]] == ["0", "2"]
    manifest = dict(page.tables["What the manifest says"][1:])
    assert manifest["target.name"] == "random"
    assert manifest["edges"] == "32, 128, 4096"
    assert page.tables["Samples left out"][1:] == [["none", "", ""]]
    assert "every byte is as it was written" in page.words
    assert str(made.root) in page.words


def test_names_can_not_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)<b onclick='x'>&amp;\""
    made = make_store(tmp_path / evil, LENGTHS)
    target = made.manifest.target.model_copy(update={"name": "<img src=x onerror=alert(1)>"})
    changed = {"target": target, "complete": True, "skipped": {"<script src=//x>": 3}, "versions": {"<b>": "</style>"}}
    write_manifest(made.root, made.manifest.model_copy(update=changed))
    seen = store_stats(made.root)
    for text in (store_page([look(seen)]), store_page([look(seen), look(seen)], compare([seen, seen]))):
        page = checked(text)
        assert evil in page.words
        assert "<img src=x onerror=alert(1)>" in page.words
        assert "<script src=//x>" in page.words


def test_damaged_and_quarantined_samples_are_named(made: MadeStore) -> None:
    quarantined = made.samples.sample_id(3).hex()
    write_manifest(made.root, made.manifest.model_copy(update={"quarantined": (quarantined,)}))
    file = next((made.root / "shards").glob("b2*.zarr")) / "hidden" / "2" / "c" / "0" / "0"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    damage = list(verify_committed(made.root))
    assert damage
    page = checked(store_page([look(store_stats(made.root), damage)]))
    rows = page.tables["Samples left out"][1:]
    assert ["quarantined (NaN or Inf)", quarantined, ""] in rows
    assert [row[1] for row in rows if row[0].startswith("damaged")] == [str(found.path) for found in damage]
    assert "Damaged: " in page.words


def test_a_store_without_a_shard(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [5], complete=False)
    page = checked(store_page([look(store_stats(made.root))]))
    assert page.figures.keys() == set(FIGURES) - {"Lengths", "Bytes by layer", "Shard sizes", "Hidden states by layer"}
    assert "unfinished: 0 of 1 sample committed" in page.words


def test_rows_that_can_not_be_read_leave_the_rest(made: MadeStore) -> None:
    seen = store_stats(made.root)
    for file in (made.root / "shards").rglob("c/0/0"):
        file.unlink()
    page = checked(store_page([look(seen)]))
    assert page.figures.keys() == set(FIGURES) - {"Hidden states by layer"}
    assert "The hidden states could not be read: sample" in page.words


def test_a_comparison_names_what_differs(tmp_path: Path, made: MadeStore) -> None:
    other = make_store(tmp_path / "other", LENGTHS[:9], edges=(64, 4096), layers=(0, 2, 4))
    stores = [store_stats(made.root), store_stats(other.root)]
    found = compare(stores)
    facts = {fact.name: fact for fact in found.facts}
    assert facts["layers"].values == ("0, 2", "0, 2, 4")
    assert facts["bucket edges"].values == ("32, 128, 4096", "64, 4096")
    assert facts["samples"].values == ("13", "9")
    for name in ("layers", "bucket edges", "samples", "tokens"):
        assert facts[name].differs
    for name in ("target", "stored as", "seed", "state"):
        assert not facts[name].differs
    ours, theirs = ({each.samples.sample_id(row) for row in range(len(each.samples))} for each in (made, other))
    assert found.common_samples == len(ours & theirs) > 0
    page = checked(store_page([look(each) for each in stores], found))
    rows = {row[0]: row[1:] for row in page.tables["Facts"][1:]}
    assert rows["layers (differs)"] == ["0, 2", "0, 2, 4"]
    assert rows["target"] == ["random", "random"]
    assert page.headings[0] == "Side by side"
    assert all(number == 2 for number in page.figures.values())


def test_three_stores_share_what_all_have(tmp_path: Path, made: MadeStore) -> None:
    others = [make_store(tmp_path / f"{n}", LENGTHS[:n]) for n in (9, 12)]
    found = compare([store_stats(each.root) for each in (made, *others)])
    ids = [{each.samples.sample_id(row) for row in range(len(each.samples))} for each in (made, *others)]
    assert found.common_samples == len(set.intersection(*ids))
    assert {len(fact.values) for fact in found.facts} == {3}


def test_a_store_of_many_buckets_shows_its_page(made: MadeStore) -> None:
    seen = store_stats(made.root)
    edges = tuple(range(20, 20 * 41, 20))
    manifest = seen.manifest.model_copy(update={"edges": edges})
    buckets = [dataclasses.replace(seen.buckets[0], bucket=b, lower=20 * b, upper=edge) for b, edge in enumerate(edges)]
    wide: StoreStats = dataclasses.replace(seen, manifest=manifest, buckets=buckets)
    page = checked(store_page([look(wide)]))
    assert len(page.tables["Buckets"]) == 41
    assert not any(math.isnan(float(row[1].rstrip(" %"))) for row in page.tables["Supervised share"][1:])
