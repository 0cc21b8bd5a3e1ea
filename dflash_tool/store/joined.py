"""Several stores read as one, each as heavy as its weight says.

A row of the whole is (store, sample row, copy), in that order: the samples of the first store, each as many times as
it has copies, then those of the second. A store of weight 1 alone has the rows of its `samples.arrow`. Copies of a
sample id are numbered through all stores, so (id, copy) names a row, also where two stores hold the same conversation.

The buckets of several stores are chosen anew, over all rows, as many as the store of the most has. Strata are
(store, bucket): every step then holds each store's share of each length.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from dflash_tool.buckets import assign_buckets, choose_edges, count_copies, number_copies
from dflash_tool.schemas.config import LayerId
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.store.manifest import settings_fingerprint
from dflash_tool.store.reader import HiddenStore, Located
from dflash_tool.store.samples import Samples

Int64s = NDArray[np.int64]


class JoinedSamples:
    """The samples of several stores (N rows in all); has what `Samples` has.

    parts: the samples of each store. store, row, copies [N] int64: where each row comes from. ids [N, 2] uint64 words,
    lengths / buckets / strata [N].
    """

    def __init__(self, stores: Sequence[HiddenStore], weights: Sequence[float], *, seed: int) -> None:
        parts = self.parts = [store.samples for store in stores]
        counts = [count_copies(samples.ids, weight, seed=seed) for samples, weight in zip(parts, weights, strict=True)]
        self.row = np.concatenate([np.repeat(np.arange(len(count)), count) for count in counts])
        self.store = np.repeat(np.arange(len(counts)), [int(count.sum()) for count in counts])
        self.ids: NDArray[np.uint64] = self.gather([samples.ids for samples in parts])
        self.lengths: NDArray[np.int32] = self.gather([samples.lengths for samples in parts])
        self.copies = number_copies(self.ids)
        self.buckets: NDArray[Any] = self.gather([samples.buckets for samples in parts])
        self.strata: NDArray[Any] = self.buckets
        if len(parts) > 1 and len(self):
            lengths = self.lengths.astype(np.int64)
            edges = choose_edges(lengths, max(len(store.manifest.edges) for store in stores))
            self.buckets = assign_buckets(lengths, edges)
            self.strata = self.store * len(edges) + self.buckets

    def __len__(self) -> int:
        return len(self.row)

    def tokens(self, row: int) -> NDArray[np.int32]:
        """[T] token ids."""
        return self._part(row).tokens(int(self.row[row]))

    def mask(self, row: int) -> NDArray[np.uint8]:
        """[T] 1 where the token is supervised."""
        return self._part(row).mask(int(self.row[row]))

    def source(self, row: int) -> str:
        """`file:line` the sample comes from."""
        return self._part(row).source(int(self.row[row]))

    def gather(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """One column of each store, by its sample rows -> the column [N, ...] of all rows."""
        return np.concatenate([column[self.row[self.store == at]] for at, column in enumerate(columns)])

    def _part(self, row: int) -> Samples:
        return self.parts[int(self.store[row])]


class JoinedStore:
    """Opened stores of one target, one dtype and one hidden size, read as one; has what `HiddenStore` has for readers.

    manifest: the first store's; what readers take from it is the same in all. weights: one for each store.
    """

    def __init__(self, stores: Sequence[HiddenStore], weights: Sequence[float], *, seed: int) -> None:
        self.stores, self.weights = tuple(stores), tuple(weights)
        first = self.stores[0]
        self.root, self.manifest, self.width, self.dtype = first.root, first.manifest, first.width, first.dtype
        self.samples = JoinedSamples(stores, weights, seed=seed)

    @property
    def fingerprint(self) -> str:
        """Of all stores' settings and weights (hex); of a store of weight 1 alone, of its settings."""
        return joint_fingerprint([store.manifest for store in self.stores], self.weights)

    def refresh(self) -> None:
        """Look for newly committed shards of the stores that still grow. One thread at a time."""
        for store in self.stores:
            if not store.manifest.complete:
                store.refresh()

    def settled(self, rows: Int64s) -> NDArray[np.bool_]:
        """[n] whether no extraction will change what is known of these rows: `HiddenStore.settled`."""
        return self._ask(rows, lambda store, own: store.settled(own))

    def holes(self, rows: Int64s) -> NDArray[np.bool_]:
        """[n] whether the samples of these rows are quarantined."""
        return self._ask(rows, lambda store, own: store.holes(own))

    def read(
        self,
        row: int,
        layers: Sequence[LayerId] | None = None,
        out: Mapping[LayerId, NDArray[Any]] | None = None,
        *,
        verify: bool = False,
    ) -> dict[LayerId, NDArray[Any]]:
        """The hidden states of one row, as `HiddenStore.read` gives them."""
        store = self.stores[int(self.samples.store[row])]
        return store.read(int(self.samples.row[row]), layers, out, verify=verify)

    def locate(self, row: int) -> Located:
        """Where the hidden states of one row are, as `HiddenStore.locate` says it."""
        return self.stores[int(self.samples.store[row])].locate(int(self.samples.row[row]))

    def _ask(self, rows: Int64s, ask: Callable[[HiddenStore, Int64s], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        answers = np.empty(len(rows), np.bool_)
        store_of, own = self.samples.store[rows], self.samples.row[rows]
        for at, store in enumerate(self.stores):
            answers[store_of == at] = ask(store, own[store_of == at])
        return answers


def joint_fingerprint(manifests: Sequence[Manifest], weights: Sequence[float]) -> str:
    """What `JoinedStore.fingerprint` is of stores with these manifests and weights."""
    settings = [settings_fingerprint(manifest) for manifest in manifests]
    if tuple(weights) == (1.0,):
        return settings[0]
    named = " ".join(f"{each}*{float(weight)}" for each, weight in zip(settings, weights, strict=True))
    return xxhash.xxh3_128_hexdigest(named.encode())


AnySamples: TypeAlias = Samples | JoinedSamples
AnyStore: TypeAlias = HiddenStore | JoinedStore
