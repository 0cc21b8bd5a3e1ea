"""The validation split: by a hash of the content, so that a conversation is never on both sides.

A content is a candidate where hash(seed, content) / 2^64 < fraction, and the `at_most` candidates of the
smallest hashes are held out; other candidates are trained on. Whether a content is held out doesn't depend on
which samples are committed so far. Validation has each content once: its further copies are left out of both
sides, since in validation they would weigh double and in training they would leak.
"""

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import hash_arrays, hash_words
from dflash_tool.errors import ConfigError

Int64s = NDArray[np.int64]

_SPLIT = 0x53504C4954  # keeps these hashes apart from those of the order
_CONTENT_BITS = np.uint64(0xFFFFFFFF)  # of an id's second word; the rest is the occurrence number


def split_validation(
    ids: NDArray[np.uint64], usable: NDArray[np.bool_], *, seed: int, fraction: float = 0.01, at_most: int = 512
) -> tuple[Int64s, Int64s]:
    """Split the usable samples into training rows and validation rows.

    With a positive `fraction` and `at_most` and two usable contents or more, each side gets at least one.

    Args:
        ids: uint64 `[N, 2]`, sample ids (12 bytes of content, 4 of occurrence number).
        usable: bool `[N]`; rows that are False (quarantined, not committed) are on neither side.
        seed: of the run.
        fraction: of the contents to hold out, in [0, 1).
        at_most: samples to hold out, at least 0.

    Returns:
        Training rows and validation rows, int64, each ascending.

    Raises:
        ConfigError: `fraction` or `at_most` is out of range.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"--val-fraction: got {fraction}, allowed 0 <= fraction < 1; 0 holds nothing out")
    if at_most < 0:
        raise ConfigError(f"--val-samples: got {at_most}, allowed 0 or more; 0 holds nothing out")
    content = np.stack([ids[:, 0], ids[:, 1] & _CONTENT_BITS], axis=1)
    keys = hash_arrays(hash_words(seed, _SPLIT), content[:, 0], content[:, 1])
    # One row a content, by ascending hash; equal hashes (never seen) are told apart by the content itself.
    order = np.lexsort((np.arange(len(ids)), content[:, 1], content[:, 0], keys))
    sorted_content = content[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (sorted_content[1:] != sorted_content[:-1]).any(axis=1)
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(begins) - 1  # the rank of each row's content among the hashes

    held_out = _held_out(keys[order][begins], np.unique(group[usable]), fraction, at_most)
    in_validation = np.isin(group, held_out)
    usable_rows = np.flatnonzero(usable)
    candidates = usable_rows[in_validation[usable_rows]]
    _, first = np.unique(group[candidates], return_index=True)  # the first usable copy of each content
    return np.flatnonzero(usable & ~in_validation), np.sort(candidates[first])


def _held_out(keys: NDArray[np.uint64], usable: Int64s, fraction: float, at_most: int) -> Int64s:
    """Ranks of the contents to hold out; `keys` are all contents' hashes, ascending, `usable` their usable ranks."""
    if fraction == 0 or at_most == 0 or usable.size < 2:
        return np.empty(0, np.int64)
    count = min(int(np.searchsorted(keys, np.uint64(int(fraction * 2**64)))), at_most)
    held_out = usable[usable < count]
    if held_out.size == 0:
        return usable[:1]
    return held_out[: usable.size - 1]
