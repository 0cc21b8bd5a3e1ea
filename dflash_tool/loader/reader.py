"""Samples from the store into their places in a batch, by any number of threads."""

import threading
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import ConfigError
from dflash_tool.schemas.config import LayerId
from dflash_tool.store.joined import AnyStore

VerifyReads = Literal["first", "always", "never"]
VERIFY_READS: tuple[VerifyReads, ...] = get_args(VerifyReads)


class SampleReader:
    """Reads rows, token ids and masks of single samples; remembers whose rows were found unchanged.

    layers: strictly ascending ids of stored layers. verify: hash rows the first time, each time or never.

    Raises:
        ConfigError: the store lacks one of the layers.
        ValueError: `layers` is empty or not ascending, or `verify` is unknown.
    """

    def __init__(self, store: AnyStore, layers: tuple[int, ...], verify: VerifyReads) -> None:
        if not layers or list(layers) != sorted(set(layers)):
            raise ValueError(f"layers: got {layers}, expected one or more ids, strictly ascending")
        if verify not in VERIFY_READS:
            raise ValueError(f"verify: got {verify!r}, expected one of {', '.join(VERIFY_READS)}")
        stored = store.manifest.layer_ids
        missing = [layer for layer in layers if layer not in stored]
        if missing:
            raise ConfigError(
                f"--aux-layers {','.join(map(str, layers))}: the store {store.root} has no layer "
                f"{', '.join(map(str, missing))}, only {', '.join(map(str, stored))}; choose among those"
            )
        self.store = store
        self.layers = layers
        self.row_bytes = store.manifest.layer_row_bytes * len(layers)
        self._verify = verify
        self._checked = np.zeros(len(store.samples), np.bool_)
        self._lock = threading.Lock()
        self.samples_read = self.samples_checked = self.bytes_read = 0

    def read(
        self, rows: list[int], states: NDArray[Any], input_ids: NDArray[np.int64], loss_mask: NDArray[np.uint8]
    ) -> None:
        """Fill states `[n, B, S, H]`, input_ids `[B, S]` and loss_mask `[B, S]`, with zeros behind each sample.

        Raises:
            StoreError: a sample isn't committed, its rows are damaged or changed; names sample, shard and rows.
        """
        samples, width = self.store.samples, input_ids.shape[1]
        tokens = checks = 0
        for place, row in enumerate(rows):
            length = int(samples.lengths[row])
            check = self._verify == "always" or (self._verify == "first" and not self._checked[row])
            out: dict[LayerId, NDArray[Any]] = {
                layer: states[at, place, :length] for at, layer in enumerate(self.layers)
            }
            self.store.read(row, self.layers, out, verify=check)
            input_ids[place, :length], loss_mask[place, :length] = samples.tokens(row), samples.mask(row)
            if length < width:
                states[:, place, length:] = 0
                input_ids[place, length:], loss_mask[place, length:] = 0, 0
            tokens += length
            if check:
                self._checked[row] = True
                checks += 1
        with self._lock:
            self.samples_read += len(rows)
            self.samples_checked += checks
            self.bytes_read += tokens * self.row_bytes
