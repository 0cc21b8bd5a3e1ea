"""The order of an epoch: its guarantee in whole numbers, its hashes against a second implementation."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_tool.buckets import epoch_order, hash_words, interleave, sample_keys
from dflash_tool.buckets import order as order_module

some = settings(max_examples=200, deadline=None, derandomize=True)
sizes = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 700), st.integers(0, 6000))
counts_of = st.lists(sizes, min_size=1, max_size=16)


def deviations(places: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """N x (samples so far - share so far) after every place, for each bucket: int64 [K, N + 1]."""
    total = len(places)
    seen = np.cumsum(places[None, :] == np.arange(len(counts))[:, None], axis=1)
    seen = np.concatenate([np.zeros((len(counts), 1), dtype=np.int64), seen], axis=1)
    return seen * total - counts[:, None] * np.arange(total + 1)


@some
@given(counts_of, st.integers(1, 512), st.integers(0, 5), st.integers(0, 5))
@example([1], 1, 0, 0)
@example([1, 1], 1, 0, 0)
@example([0, 0, 7], 3, 0, 0)
@example([1, 2000], 64, 0, 0)
@example([1] * 15 + [3000], 512, 0, 0)
@example([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 4000], 256, 0, 0)
def test_every_prefix_within_1_and_every_window_within_2(
    counts_list: list[int], step: int, seed: int, epoch: int
) -> None:
    counts = np.array(counts_list)
    total = int(counts.sum())
    places = interleave(counts, seed=seed, epoch=epoch)
    assert np.bincount(places, minlength=len(counts)).tolist() == counts_list
    if not total:
        return
    ahead = deviations(places, counts)
    assert (np.abs(ahead) < total).all(), "prefix within 1 of each share"
    assert (ahead.max(axis=1) - ahead.min(axis=1) < 2 * total).all(), "any window within 2 of each share"
    for start in range(0, total, step):  # said once more for the steps themselves
        held = np.bincount(places[start : start + step], minlength=len(counts))
        length = min(step, total - start)
        assert (np.abs(held * total - counts * length) < 2 * total).all()
    filled = np.count_nonzero(counts)
    if filled > 1 and (counts[counts > 0] ** 2 > total).all():
        assert (np.abs(ahead) * (2 * filled - 2) <= total * (2 * filled - 3)).all(), "the chairman's bound"


@pytest.mark.parametrize(
    ("counts", "step"),
    [
        ([1, 999], 64),
        ([1, 1, 998], 64),
        ([1, 40, 9959], 512),
        ([1, 5, 100, 9894], 512),
        ([3, 2, 1, 30, 400, 19564], 512),
        ([1, 1, 1, 97, 300, 600], 64),
        ([1, 1, 1, 1, 1, 1, 1, 1], 1),
    ],
)
def test_a_lone_sample_does_not_sit_in_the_same_step_each_epoch(counts: list[int], step: int) -> None:
    epochs = [interleave(np.array(counts), seed=0, epoch=epoch) for epoch in range(8)]
    for bucket in np.flatnonzero(np.array(counts) == 1):
        steps = {int(np.flatnonzero(places == bucket)[0]) // step for places in epochs}
        assert len(steps) >= 4, f"bucket {bucket} is only seen in steps {steps}"


def test_draws_in_vain_fall_back_to_due_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_DRAWS", 0)
    counts = np.array([1, 7, 1, 12, 3000])
    for epoch in range(8):
        places = interleave(counts, seed=1, epoch=epoch)
        assert (np.abs(deviations(places, counts)) < counts.sum()).all()


def test_counts_are_checked() -> None:
    with pytest.raises(ValueError, match="counts of the buckets"):
        interleave(np.array([3, -1]), seed=0, epoch=0)
    with pytest.raises(ValueError, match="overflow"):
        interleave(np.array([1 << 40, 1]), seed=0, epoch=0)


def splitmix64(state: int) -> int:
    """Give one output of the generator from its published definition: state += GAMMA, then finalise."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_the_finaliser_is_that_of_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # its first output for seed 0, as published
    assert hash_words(0) == splitmix64(0)
    assert hash_words(0, 0) == splitmix64(splitmix64(0))


ids_of = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 3)), min_size=1, max_size=60, unique=True).map(
    lambda rows: np.array(rows, dtype=np.uint64).reshape(-1, 2)
)


@some
@given(ids_of, st.integers(-5, 2**70), st.integers(0, 10**6))
def test_vector_and_scalar_hash_agree(ids: np.ndarray, seed: int, epoch: int) -> None:
    keys = sample_keys(ids, seed=seed, epoch=epoch)
    assert keys.dtype == np.uint64
    assert keys.tolist() == [hash_words(seed, epoch, int(a), int(b)) for a, b in ids]
    assert len(set(keys.tolist())) == len(keys)


def test_keys_never_change() -> None:
    ids = np.array([[0, 0], [1, 0], [0, 1], [2**64 - 1, 2**63]], dtype=np.uint64)
    assert [f"{key:016x}" for key in sample_keys(ids, seed=7, epoch=3).tolist()] == [
        "582097d8429c905c",
        "b1a57fa6cfc4b15b",
        "c661b3829155cbc8",
        "b8f71d0832c6dc75",
    ]
    assert interleave(np.array([5, 1, 3]), seed=7, epoch=3).tolist() == [1, 0, 2, 0, 2, 0, 2, 0, 0]


@some
@given(ids_of, st.integers(1, 5), st.data())
def test_leaving_a_sample_out_moves_no_other_inside_its_bucket(ids: np.ndarray, k: int, data: st.DataObject) -> None:
    buckets = (ids[:, 0] % np.uint64(k)).astype(np.int64)
    order = epoch_order(ids, buckets, seed=1, epoch=2)
    assert sorted(order.tolist()) == list(range(len(ids))), "each row once"
    gone = data.draw(st.integers(0, len(ids) - 1))
    kept = np.delete(np.arange(len(ids)), gone)
    shorter = kept[epoch_order(ids[kept], buckets[kept], seed=1, epoch=2)]
    for bucket in range(k):
        before = [row for row in order.tolist() if buckets[row] == bucket and row != gone]
        assert [row for row in shorter.tolist() if buckets[row] == bucket] == before


def test_epochs_and_seeds_shuffle_differently() -> None:
    ids = np.stack([np.arange(4000, dtype=np.uint64), np.zeros(4000, dtype=np.uint64)], axis=1)
    buckets = np.zeros(4000, dtype=np.int64)
    orders = [epoch_order(ids, buckets, seed=s, epoch=e) for s in (0, 1) for e in (0, 1)]
    for i, one in enumerate(orders):
        assert abs(np.corrcoef(one, np.arange(4000))[0, 1]) < 0.06
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.06


def test_arguments_are_checked() -> None:
    ids = np.zeros((3, 2), dtype=np.uint64)
    with pytest.raises(ValueError, match="sample ids"):
        sample_keys(ids.astype(np.int64), seed=0, epoch=0)
    with pytest.raises(ValueError, match="buckets"):
        epoch_order(ids, np.zeros(2, dtype=np.int64), seed=0, epoch=0)
    with pytest.raises(ValueError, match="buckets"):
        epoch_order(ids, np.array([0, -1, 0]), seed=0, epoch=0)


PRINT_PLAN = """
import numpy as np
from dflash_tool.buckets import StepPlan, assign_buckets, choose_edges, extraction_batches
n = 3000
number = np.arange(n, dtype=np.uint64)
ids = np.stack([number * np.uint64(0x9E3779B97F4A7C15), number], axis=1)
lengths = (ids[:, 0] % np.uint64(900)).astype(np.int64) + 16
buckets = assign_buckets(lengths, choose_edges(lengths, 6))
plan = StepPlan(ids=ids, lengths=lengths, buckets=buckets, block_tokens=lengths // 3, seed=5, epoch=1,
                batch_samples=64, context_budget=4096, block_budget=2000)
batches = extraction_batches(plan.order, lengths, buckets, batch_tokens=2048)
print(plan.fingerprint, [batch.rows.tolist() for batch in batches],
      [[m.rows.tolist() for m in step.microbatches] for step in plan])
"""


def test_two_processes_make_the_same_plan() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", PRINT_PLAN],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert len(printed[0]) > 10_000
