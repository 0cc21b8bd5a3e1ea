"""Hashes that stand in for randomness: pure functions of words, the same on every machine and numpy.

A word is any integer, taken modulo 2^64. The words are folded one after another through the finaliser of
SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014):

    h = 0;   for each word w:   h = mix((h + GOLDEN) ^ w)

`mix` is a bijection, so two samples that differ in one word alone never share a key.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def hash_words(*words: int) -> int:
    """Hash any number of integers (negative ones too) to one Python int in [0, 2^64)."""
    h = 0
    for word in words:
        h = ((h + _GOLDEN) & _MASK) ^ (word & _MASK)
        h = ((h ^ (h >> 30)) * _MIX_1) & _MASK
        h = ((h ^ (h >> 27)) * _MIX_2) & _MASK
        h ^= h >> 31
    return h


def hash_arrays(prefix: int, *columns: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Continue a hash over columns of words: row i is `hash_words(*prefix words, column[i], ...)`.

    Args:
        prefix: what `hash_words` gave for the words before.
        columns: one or more uint64 arrays of one shape `[N]`.

    Returns:
        uint64 `[N]`.
    """
    golden = np.uint64(_GOLDEN)
    h = np.full(columns[0].shape, prefix, dtype=np.uint64)
    for column in columns:
        h += golden
        h ^= column
        h ^= h >> np.uint64(30)
        h *= np.uint64(_MIX_1)
        h ^= h >> np.uint64(27)
        h *= np.uint64(_MIX_2)
        h ^= h >> np.uint64(31)
    return h


def sample_keys(ids: NDArray[np.uint64], *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Give each sample its shuffling key: sorting by it is the shuffle of an epoch.

    A key depends on its own sample alone, so leaving a sample out moves no other one.

    Args:
        ids: uint64 `[N, 2]`, the two words of a sample id.
        seed: of the run.
        epoch: counted from 0; each has its own shuffle.

    Returns:
        uint64 `[N]`, equal to `hash_words(seed, epoch, ids[i, 0], ids[i, 1])`.

    Raises:
        ValueError: `ids` is no uint64 array of shape `[N, 2]`.
    """
    if ids.ndim != 2 or ids.shape[1] != 2 or ids.dtype != np.uint64:
        raise ValueError(f"sample ids: got {ids.dtype} {list(ids.shape)}, expected uint64 [N, 2]")
    return hash_arrays(hash_words(seed, epoch), ids[:, 0], ids[:, 1])
