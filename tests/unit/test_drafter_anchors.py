"""Anchors, labels and counted slots against plain loops; the same anchors in any batch."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_tool.buckets.keys import hash_words
from dflash_tool.drafter.anchors import (
    Anchors,
    decay_weights,
    default_gamma,
    draw_anchors,
    every_anchor,
    make_blocks,
)


def some_samples(
    count: int, seed: int = 0
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.uint8]], NDArray[np.uint64]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, count)
    tokens = [rng.integers(0, 1000, n).astype(np.int32) for n in lengths]
    masks = [(rng.random(n) < rng.choice([0.3, 0.8, 1.0])).astype(np.uint8) for n in lengths]
    return tokens, masks, rng.integers(0, 2**64, (count, 2), dtype=np.uint64)


def pairs(anchors: Anchors) -> list[tuple[int, int]]:
    return list(zip(anchors.sample.tolist(), anchors.position.tolist(), strict=True))


def test_valid_anchors_are_those_of_a_plain_loop() -> None:
    _, masks, _ = some_samples(40)
    expected = [(i, a) for i, m in enumerate(masks) for a in range(len(m) - 1) if m[a] and m[a + 1]]
    assert pairs(every_anchor(masks)) == expected
    assert len(every_anchor([])) == 0
    assert len(every_anchor([np.array([0, 1, 0, 1])])) == 0  # no two supervised tokens in a row: no anchor


def test_labels_and_counted_slots_are_those_of_a_plain_loop() -> None:
    tokens, masks, _ = some_samples(40)
    anchors = every_anchor(masks)
    for size in (2, 5, 16):
        blocks = make_blocks(tokens, masks, anchors, block_size=size)
        assert blocks.size == size
        for n, (i, a) in enumerate(pairs(anchors)):
            assert blocks.tokens[n] == tokens[i][a]
            for k in range(1, size):  # slot k predicts the token at a + k, no shift
                counts = a + k < len(masks[i]) and all(masks[i][a + 1 : a + k + 1])
                assert blocks.counted[n, k - 1] == counts
                assert blocks.labels[n, k - 1] == (tokens[i][a + k] if counts else 0)
        assert blocks.counted[:, 0].all()  # a valid anchor always has one label, whatever the block size


def test_no_anchor_no_block() -> None:
    blocks = make_blocks([np.arange(3)], [np.array([0, 1, 0])], every_anchor([np.array([0, 1, 0])]), block_size=4)
    assert blocks.labels.shape == (0, 3)
    assert blocks.total_weight(decay_weights(4)) == 0.0


def test_drawn_anchors_do_not_depend_on_the_batch() -> None:
    _, masks, ids = some_samples(30)
    copies = np.arange(30) % 3

    def drawn(rows: list[int], epoch: int = 0, seed: int = 5) -> dict[int, list[int]]:
        anchors = draw_anchors([masks[r] for r in rows], ids[rows], copies[rows], count=6, seed=seed, epoch=epoch)
        assert pairs(anchors) == sorted(pairs(anchors))
        return {r: anchors.position[anchors.sample == at].tolist() for at, r in enumerate(rows)}

    whole = drawn(list(range(30)))
    alone = {row: drawn([row])[row] for row in range(30)}
    backwards = drawn(list(range(29, -1, -1)))
    assert whole == alone == backwards
    assert whole != drawn(list(range(30)), epoch=1)
    assert whole != drawn(list(range(30)), seed=6)
    valid = every_anchor(masks)
    for row, positions in whole.items():
        possible = set(valid.position[valid.sample == row].tolist())
        assert len(set(positions)) == len(positions) == min(6, len(possible))
        assert set(positions) <= possible


def test_a_second_copy_has_other_anchors() -> None:
    mask, ids = [np.ones(100)] * 2, np.array([[1, 2], [1, 2]], np.uint64)
    anchors = draw_anchors(mask, ids, np.array([0, 1]), count=8, seed=0, epoch=0)
    assert anchors.position[:8].tolist() != anchors.position[8:].tolist()


def test_drawn_anchors_are_the_smallest_keys() -> None:
    mask, ids = [np.ones(50)], np.array([[7, 2**64 - 1]], np.uint64)
    anchors = draw_anchors(mask, ids, np.array([2]), count=5, seed=3, epoch=4)
    keys = {a: hash_words(3, 4, 7, 2**64 - 1, 2, a) for a in range(49)}
    assert anchors.position.tolist() == sorted(sorted(keys, key=keys.__getitem__)[:5])


def test_every_valid_position_is_drawn_equally_often() -> None:
    mask, ids = [np.ones(21)], np.array([[1, 2]], np.uint64)
    seen: Counter[int] = Counter()
    for epoch in range(2000):
        seen.update(draw_anchors(mask, ids, np.zeros(1), count=5, seed=0, epoch=epoch).position.tolist())
    assert set(seen) == set(range(20))
    deviations = np.array([seen[a] for a in range(20)]) - 500  # standard deviation sqrt(2000 / 4 * 3 / 4) = 19.4
    assert np.abs(deviations).max() < 4.5 * 19.4


def test_decay_weights() -> None:
    assert [default_gamma(size) for size in (16, 10, 8, 12, 3)] == [7, 5, 4, 6, 1.5]
    assert decay_weights(4, 2.0) == pytest.approx([1.0, 0.6065306597126334, 0.36787944117144233])
    assert decay_weights(16)[7] == pytest.approx(np.exp(-1))


def test_total_weight_is_the_sum_over_counted_slots() -> None:
    mask = [np.array([1, 1, 1, 0, 1, 1])]
    blocks = make_blocks([np.arange(6)], mask, every_anchor(mask), block_size=4)
    assert blocks.position.tolist() == [0, 1, 4]
    assert blocks.total_weight(np.array([1.0, 0.5, 0.25])) == (1 + 0.5) + 1 + 1
