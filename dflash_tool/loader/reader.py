"""Samples from the store into their places in a batch, by any number of threads."""

import threading
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import ConfigError
from dflash_tool.schemas.config import LayerId
from dflash_tool.store.joined import AnyStore
from dflash_tool.store.reader import Located

VerifyReads = Literal["first", "always", "never"]
VERIFY_READS: tuple[VerifyReads, ...] = get_args(VerifyReads)


class SampleReader:
    """Reads the rows of single samples; remembers whose rows were found unchanged.

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
        self._checked: NDArray[np.bool_] = np.zeros(len(store.samples), np.bool_)
        self._lock = threading.Lock()
        self.samples_read = self.samples_checked = self.bytes_read = 0

    def read(self, row: int, sample: Located, out: Mapping[LayerId, memoryview]) -> None:
        """Fill the bytes of a layer each with the rows of `sample`, which is where row `row` is.

        Raises:
            StoreError: its rows are damaged or changed; names sample, shard and rows.
        """
        check = self._verify == "always" or (self._verify == "first" and not self._checked[row])
        sample.store.read_into(sample, out, verify=check)
        if check:
            self._checked[row] = True
        with self._lock:
            self.samples_read += 1
            self.samples_checked += check
            self.bytes_read += sample.length * self.row_bytes
