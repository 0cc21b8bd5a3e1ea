"""How many tokens a target forward yields, from which slots were right. Two means, never mixed. No torch.

Greedy serving accepts the longest prefix of a block's drafts that the target agrees with (the joint match, not a
product of single accuracies), then adds the target's own next token.

- *anchor tau*: mean over every valid anchor of accepted + 1. Comparable between training steps.
- *walk tau*: what generation would yield on this very answer: begin at its first supervised token, jump by
  accepted + 1, to its end, where the last block is trimmed. On answers that the target generated greedily it equals
  (new tokens - 1) / (target forwards - 1) of generation.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Yield(NamedTuple):
    """Tokens out of target forwards; add them up field by field, over samples, buckets or ranks."""

    tokens: int
    forwards: int

    @property
    def tau(self) -> float:
        """Tokens a forward; 0 without any."""
        return self.tokens / self.forwards if self.forwards else 0.0

    def __add__(self, other: "Yield") -> "Yield":  # type: ignore[override]
        return Yield(self.tokens + other.tokens, self.forwards + other.forwards)


NOTHING = Yield(0, 0)


def accepted_lengths(correct: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Accepted drafts `[N]` of each block: right slots before the first wrong one.

    correct: bool `[N, B-1]`, slots 1..B-1 counted *and* right: what does not count is never accepted.
    """
    accepted: NDArray[np.int64] = np.logical_and.accumulate(correct, axis=1).sum(axis=1, dtype=np.int64)
    return accepted


def anchor_yield(accepted: NDArray[np.int64]) -> Yield:
    """Anchor tau's sums over these anchors (all valid ones of a validation set): accepted + 1 tokens each."""
    return Yield(int(accepted.sum()) + len(accepted), len(accepted))


def walk_yield(mask: NDArray[Any], positions: NDArray[np.int64], accepted: NDArray[np.int64]) -> Yield:
    """Walk tau's sums over one sample: every answer (run of supervised tokens) walked from its first token.

    Args:
        mask: `[T]`, the loss mask.
        positions: int64 `[n]`, every valid anchor of the sample.
        accepted: int64 `[n]`, of the blocks that begin there.

    Raises:
        ValueError: a valid anchor that the walk comes to is not among the positions.
    """
    jump = np.zeros(len(mask) + 1, np.int64)
    jump[positions] = accepted + 1
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(mask) != 0, [0])).astype(np.int8)))
    tokens = forwards = 0
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        at = start
        while at < end - 1:
            if jump[at] == 0:
                raise ValueError(f"position {at} is a valid anchor, but no block begins there: pass every anchor")
            at += int(jump[at])
            forwards += 1
        tokens += end - 1 - start
    return Yield(tokens, forwards)
