"""tau by the serving rule: the joint prefix match and the walk, against hand-made cases and a plain simulation."""

import numpy as np
import pytest

from dflash_tool.drafter.acceptance import Yield, accepted_lengths, anchor_yield, walk_yield
from dflash_tool.drafter.anchors import every_anchor


def test_accepted_is_the_prefix_not_the_sum() -> None:
    correct = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    assert accepted_lengths(correct).tolist() == [2, 0, 4, 0]
    assert accepted_lengths(np.zeros((0, 3), bool)).tolist() == []


def test_anchor_tau_includes_the_bonus_token() -> None:
    assert anchor_yield(np.array([2, 0, 4, 0])) == Yield(10, 4)
    assert anchor_yield(np.array([2, 0, 4, 0])).tau == 2.5
    assert anchor_yield(np.array([], np.int64)).tau == 0.0


def test_a_walk_by_hand() -> None:
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 1, 0])  # an answer of 7 tokens at 2..8
    positions = np.arange(2, 8)
    accepted = np.array([2, 0, 0, 0, 1, 1])  # at 2: two accepted, so to 5; at 5: none, to 6; at 6: one, to 8: the end
    assert walk_yield(mask, positions, accepted) == Yield(6, 3)


def test_a_walk_goes_through_every_answer_and_trims_its_last_block() -> None:
    mask = np.array([1, 1, 1, 0, 1, 0, 1, 1])
    # 0 accepts both remaining tokens; their bonus token would lie behind the end. A lone token needs no forward.
    assert walk_yield(mask, np.array([0, 1, 6]), np.array([2, 1, 1])) == Yield(2 + 1, 1 + 1)
    assert walk_yield(np.zeros(3), np.array([], np.int64), np.array([], np.int64)) == Yield(0, 0)
    assert Yield(1, 2) + Yield(3, 4) == Yield(4, 6)


def test_a_walk_needs_every_anchor() -> None:
    with pytest.raises(ValueError, match="position 1"):
        walk_yield(np.ones(4), np.array([0, 2]), np.array([0, 0]))


def test_the_walk_simulates_generation() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = (rng.random(rng.integers(2, 60)) < 0.85).astype(np.uint8)
        anchors = every_anchor([mask])
        accepted = np.array([rng.integers(0, mask[a + 1 : a + 8].cumprod().sum() + 1) for a in anchors.position])
        by_position = dict(zip(anchors.position.tolist(), accepted.tolist(), strict=True))
        tokens = forwards = at = 0
        while at < len(mask):
            if not mask[at]:
                at += 1
                continue
            while at + 1 < len(mask) and mask[at + 1]:  # draft, verify, move on, until nothing is left to draft
                forwards += 1
                for _ in range(by_position[at] + 1 if at in by_position else 1):
                    if at + 1 < len(mask) and mask[at + 1]:
                        at += 1
                        tokens += 1
            at += 1
        assert walk_yield(mask, anchors.position, accepted) == Yield(tokens, forwards)
