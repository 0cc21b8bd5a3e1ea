"""Several stores as one, against a plain list of (store, sample row, copy)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dflash_tool.buckets import assign_buckets, choose_edges, count_copies
from dflash_tool.store.joined import JoinedStore
from dflash_tool.store.manifest import settings_fingerprint
from dflash_tool.store.reader import HiddenStore
from tests.store_kit import make_store

SEED = 6


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[HiddenStore]:
    """30 and 20 samples of other lengths in other buckets, and a copy of the first store."""
    root = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    make_store(root / "a", rng.integers(1, 90, 30).tolist(), edges=(30, 90))
    make_store(root / "b", rng.integers(1, 150, 20).tolist(), edges=(20, 50, 150), seed=1)
    shutil.copytree(root / "a", root / "c")
    return [HiddenStore.open(root / name) for name in "abc"]


@pytest.mark.parametrize("weights", [(1, 1, 1), (2, 0.5, 1), (0.3, 0, 2.5)])
def test_rows_are_stores_samples_copies(stores: list[HiddenStore], weights: tuple[float, ...]) -> None:
    joined = JoinedStore(stores, weights, seed=SEED)
    samples = joined.samples
    rows = [
        (at, row)
        for at, (store, weight) in enumerate(zip(stores, weights, strict=True))
        for row, count in enumerate(count_copies(store.samples.ids, weight, seed=SEED))
        for _ in range(count)
    ]
    assert list(zip(samples.store.tolist(), samples.row.tolist(), strict=True)) == rows
    assert len(samples) == len(rows)
    for place, (at, row) in enumerate(rows):
        theirs = stores[at].samples
        np.testing.assert_array_equal(samples.ids[place], theirs.ids[row])
        assert samples.lengths[place] == theirs.lengths[row]
        assert samples.source(place) == theirs.source(row)
        np.testing.assert_array_equal(samples.tokens(place), theirs.tokens(row))
        np.testing.assert_array_equal(samples.mask(place), theirs.mask(row))
        for layer, states in joined.read(place, [2], verify=True).items():
            np.testing.assert_array_equal(states, stores[at].read(row)[layer])
    named = {(*words, copy) for words, copy in zip(samples.ids.tolist(), samples.copies.tolist(), strict=True)}  # type: ignore[misc]
    assert len(named) == len(rows)  # (id, copy) names a row, though two stores hold the same samples
    edges = choose_edges(samples.lengths.astype(np.int64), 3)
    np.testing.assert_array_equal(samples.buckets, assign_buckets(samples.lengths.astype(np.int64), edges))
    pairs = list(zip(samples.store.tolist(), samples.buckets.tolist(), strict=True))
    assert len(set(samples.strata.tolist())) == len(set(pairs))
    assert len({(*pair, stratum) for pair, stratum in zip(pairs, samples.strata.tolist(), strict=True)}) == len(
        set(pairs)
    )


def test_a_store_of_weight_one_alone_is_as_it_is(stores: list[HiddenStore]) -> None:
    (store, *_) = stores
    joined = JoinedStore([store], [1.0], seed=SEED)
    for name in ("ids", "lengths", "buckets", "copies", "strata"):
        np.testing.assert_array_equal(getattr(joined.samples, name), getattr(store.samples, name))
    assert joined.samples.strata is joined.samples.buckets
    assert joined.fingerprint == settings_fingerprint(store.manifest)


def test_the_fingerprint_is_of_all_stores_and_weights(stores: list[HiddenStore]) -> None:
    a, b, _ = stores
    kinds = [([a], [1.0]), ([a], [2.0]), ([a, b], [1.0, 1.0]), ([a, b], [1.0, 2.0]), ([b, a], [1.0, 1.0])]
    assert len({JoinedStore(each, weights, seed=SEED).fingerprint for each, weights in kinds}) == len(kinds) - 1 + (
        settings_fingerprint(a.manifest) != settings_fingerprint(b.manifest)
    )


def test_what_is_known_of_rows_is_asked_of_their_stores(tmp_path: Path) -> None:
    """One store lacks its last sample, and still may get it."""
    make_store(tmp_path / "whole", [5, 6, 7])
    make_store(tmp_path / "growing", [8, 9], seed=1, complete=False)
    stores = [HiddenStore.open(tmp_path / name) for name in ("growing", "whole")]
    joined = JoinedStore(stores, [2, 1], seed=SEED)
    rows = np.arange(len(joined.samples))[::-1]
    assert joined.settled(rows).tolist() == [True] * 3 + [False, False] + [True] * 2
    assert not joined.holes(rows).any()
    stores[0].quarantined[1] = True
    assert joined.settled(rows).all()
    assert joined.holes(rows).tolist() == [False] * 3 + [True, True] + [False] * 2
