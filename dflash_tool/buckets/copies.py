"""Weights of stores as copies of samples: a pure function of ids and seed, so the same after every restart.

A weight w gives each sample floor(w) copies, and one more where its hash falls below the fraction of w. Copies of one
sample are numbered from 0; copy 0 has the sample's own key in the shuffle, so a weight of 1 changes no order.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets.keys import hash_arrays, hash_words

Int64s = NDArray[np.int64]

_FRACTION, _COPY = 0x46524143, 0x434F5059  # keep these hashes apart from each other and from those of the order


def count_copies(ids: NDArray[np.uint64], weight: float, *, seed: int) -> Int64s:
    """How many copies each sample has.

    Args:
        ids: uint64 `[N, 2]`, sample ids.
        weight: finite, at least 0.
        seed: of the run: decides which samples have one copy more.

    Returns:
        int64 `[N]`, floor(weight) or one more.
    """
    whole = math.floor(weight)
    below = np.uint64(int((weight - whole) * 2**64))
    hashes = hash_arrays(hash_words(seed, _FRACTION), ids[:, 0], ids[:, 1])
    return whole + (hashes < below).astype(np.int64)


def number_copies(ids: NDArray[np.uint64]) -> Int64s:
    """Number the rows of one id, in the order of the rows: int64 `[N]`, 0 for the first row of each id."""
    order = np.lexsort((ids[:, 1], ids[:, 0]))  # stable: equal ids stay in the order of the rows
    ordered = ids[order]
    begins = np.ones(len(ids), np.bool_)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    places = np.arange(len(ids), dtype=np.int64)
    numbers = np.empty(len(ids), np.int64)
    numbers[order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return numbers


def copy_ids(ids: NDArray[np.uint64], copies: Int64s) -> NDArray[np.uint64]:
    """Ids as the shuffle takes them, uint64 `[N, 2]`: of copy 0 the sample's own, of each other copy one of its own."""
    keyed = ids.copy()
    more = copies > 0
    keyed[more, 0] = hash_arrays(hash_words(_COPY), ids[more, 0], copies[more].astype(np.uint64))
    return keyed
