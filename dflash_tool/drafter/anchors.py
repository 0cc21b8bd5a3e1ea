"""Anchors, labels and counted slots of a microbatch's blocks, from tokens and loss masks alone. No torch.

Position a may be an anchor iff a and a + 1 are both supervised: at inference the anchor is a token that the target
just produced. That does not depend on the block size, and blocks may overlap. Slot k (1..B-1) predicts the token at
a + k; it counts iff a+1..a+k are all inside the sample and supervised, so the counted slots of a block are a prefix.

Anchors are drawn by a hash keyed (seed, epoch, sample id, copy, position): each valid position has a key, the
smallest keys win. So they are the same in any batch, on any rank, after any restart.

N blocks, B slots a block, S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets.keys import hash_arrays, hash_words

_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class Anchors:
    """Where blocks begin, sorted by (sample, position).

    sample [N] int64: row in the microbatch. position [N] int64: of the anchor, counted from 0 in its sample.
    """

    sample: NDArray[np.int64]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True)
class Blocks(Anchors):
    """What the drafter is asked and graded on: anchors and, for each block, its token and labels.

    tokens [N] int64: the anchor's token. labels [N, B-1] int64: the
    token that slot k = 1..B-1 predicts, 0 where it does not count. counted [N, B-1] bool: a prefix of each row.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    counted: NDArray[np.bool_]

    @property
    def size(self) -> int:
        """B: the anchor and B - 1 drafts."""
        return int(self.labels.shape[1]) + 1

    def total_weight(self, weights: NDArray[np.float64]) -> float:
        """Sum of the slots' weights `[B-1]` over all counted slots: this microbatch's share of the step's divisor."""
        return float(self.counted.sum(0) @ weights)


def every_anchor(masks: Sequence[NDArray[Any]]) -> Anchors:
    """All valid anchors of the samples with these loss masks (`[T]` each, non-zero = supervised)."""
    flat, starts = _flat(masks)
    valid = flat[:-1] & flat[1:]
    valid[starts[1:-1] - 1] = False  # the last position of a sample and the first of the next one
    places = np.flatnonzero(valid).astype(np.int64)
    sample = np.searchsorted(starts, places, side="right") - 1
    return Anchors(sample, places - starts[sample])


def draw_anchors(
    masks: Sequence[NDArray[Any]],
    ids: NDArray[np.uint64],
    copies: NDArray[Any],
    *,
    count: int,
    seed: int,
    epoch: int,
) -> Anchors:
    """Up to `count` anchors a sample, uniformly without replacement, new ones every epoch.

    Args:
        masks: the samples' loss masks, `[T]` each, non-zero = supervised.
        ids: uint64 `[S, 2]`, the two words of each sample id.
        copies: integers `[S]`, which copy of the sample this is (0 unless its store weighs more than 1).
        count: at most so many a sample (512 in the paper).
        seed: of the run.
        epoch: counted from 0.
    """
    valid = every_anchor(masks)
    words = (ids[valid.sample, 0], ids[valid.sample, 1], np.asarray(copies)[valid.sample], valid.position)
    keys = hash_arrays(hash_words(seed, epoch), *(word.astype(np.uint64) for word in words))
    order = np.lexsort((keys, valid.sample))
    by_sample = valid.sample[order]
    rank = np.arange(len(order)) - np.searchsorted(by_sample, by_sample)
    drawn = np.sort(order[rank < count])
    return Anchors(valid.sample[drawn], valid.position[drawn])


def make_blocks(
    tokens: Sequence[NDArray[Any]], masks: Sequence[NDArray[Any]], anchors: Anchors, *, block_size: int
) -> Blocks:
    """Labels and counted slots of the blocks that begin at these anchors.

    tokens, masks: of the microbatch's samples, `[T]` each (real tokens, no padding).
    """
    flat_mask, starts = _flat(masks)
    flat_tokens = np.concatenate([np.asarray(part, np.int64) for part in tokens] or [np.zeros(0, np.int64)])
    place = starts[anchors.sample] + anchors.position
    run_end = _run_ends(flat_mask, starts)[place]
    at = place[:, None] + np.arange(1, block_size)
    counted = at < run_end[:, None]
    labels = np.where(counted, flat_tokens[np.minimum(at, len(flat_tokens) - 1)], 0)
    return Blocks(anchors.sample, anchors.position, flat_tokens[place], labels, counted)


def default_gamma(block_size: int) -> float:
    """How slowly a slot's weight decays: 7 for blocks of 16, 5 for 10, 4 for 8, otherwise B / 2."""
    return _GAMMAS.get(block_size, block_size / 2)


def decay_weights(block_size: int, gamma: float | None = None) -> NDArray[np.float64]:
    """Weights `[B-1]` of slots 1..B-1: exp(-(k - 1) / gamma)."""
    return np.exp(-np.arange(block_size - 1) / (default_gamma(block_size) if gamma is None else gamma))


def _flat(masks: Sequence[NDArray[Any]]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """All masks end to end, and where each begins (and the last ends)."""
    flat = np.concatenate([np.asarray(mask) != 0 for mask in masks] or [np.zeros(0, np.bool_)])
    return flat, np.cumsum([0, *(len(mask) for mask in masks)], dtype=np.int64)


def _run_ends(flat: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each place, the first place at or after it that isn't supervised or belongs to the next sample."""
    stop = np.where(flat, len(flat), np.arange(len(flat)))
    ends = np.minimum.accumulate(stop[::-1])[::-1]
    sample = np.searchsorted(starts, np.arange(len(flat)), side="right") - 1
    return np.minimum(ends, starts[sample + 1])
