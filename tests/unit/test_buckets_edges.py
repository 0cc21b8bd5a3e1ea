"""Edges against every possible choice, and against a plain quadratic program where those are too many."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tool.buckets import assign_buckets, check_edges, choose_edges
from dflash_tool.errors import ConfigError, DataError

some = settings(max_examples=100, deadline=None, derandomize=True)


def slots(lengths: list[int], edges: tuple[int, ...]) -> int:
    """Padded tokens, sample by sample."""
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


@some
@given(st.lists(st.integers(1, 12) | st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 5))
def test_no_other_edges_pad_less(lengths: list[int], k: int) -> None:
    distinct = sorted(set(lengths))[-9:]  # keeps "every choice" small
    lengths = [length for length in lengths if length in distinct]
    edges = choose_edges(np.array(lengths), k)
    assert list(edges) == sorted(set(edges))
    assert len(edges) == min(k, len(distinct)), "one more edge never hurts"
    assert set(edges) <= set(lengths)
    assert edges[-1] == max(lengths)
    best = min(
        slots(lengths, (*inner, distinct[-1]))
        for size in range(k)
        for inner in combinations(distinct[:-1], min(size, len(distinct) - 1))
    )
    assert slots(lengths, edges) == best


@pytest.mark.parametrize("k", [1, 2, 6, 23])
def test_many_lengths_equal_the_quadratic_program(k: int) -> None:
    lengths = np.clip(np.random.default_rng(k).lognormal(5, 1, 700), 3, 4000).astype(np.int64)
    values, counts = np.unique(lengths, return_counts=True)
    size = len(values)
    group = [[values[j] * counts[i : j + 1].sum() for j in range(size)] for i in range(size)]  # one bucket, i..j
    row = group[0]
    for _ in range(k - 1):
        row = [min(row[j], *(row[i] + group[i + 1][j] for i in range(j)), row[j]) for j in range(size)]
    assert slots(lengths.tolist(), choose_edges(lengths, k)) == row[-1]


def test_more_distinct_lengths_than_any_model_has_context() -> None:
    lengths = np.arange(1, 131_073)
    assert choose_edges(lengths, 4) == (32_768, 65_536, 98_304, 131_072)  # even spacing, by symmetry


@some
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.lists(st.integers(1, 80), min_size=1, max_size=6, unique=True),
)
def test_a_sample_goes_to_the_first_bucket_that_holds_it(lengths: list[int], edges: list[int]) -> None:
    edges.sort()
    if max(lengths) > edges[-1]:
        with pytest.raises(
            ConfigError, match=rf"last one is {edges[-1]} tokens.*raise the last edge to {max(lengths)}"
        ):
            assign_buckets(np.array(lengths), edges)
        return
    for length, bucket in zip(lengths, assign_buckets(np.array(lengths), edges).tolist(), strict=True):
        assert length <= edges[bucket]
        assert bucket == 0 or length > edges[bucket - 1]


def test_edges_of_a_user_are_checked() -> None:
    assert check_edges([256, 512]) == (256, 512)
    for edges, message in (
        ([], "got no edges.*for example 256,512"),
        ([0, 5], "number 1 is 0, allowed 1 or more"),
        ([-3], "number 1 is -3"),
        ([5, 5], "number 2 is 5, but number 1 is 5; give ascending"),
        ([9, 5], "number 2 is 5, but number 1 is 9"),
        ([1.5], "number 1 is 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_edges(edges)  # type: ignore[arg-type]


def test_lengths_and_k_are_checked() -> None:
    with pytest.raises(ConfigError, match="number of buckets: got 0"):
        choose_edges(np.array([5]), 0)
    with pytest.raises(DataError, match="no sample"):
        choose_edges(np.array([], dtype=np.int64), 3)
    with pytest.raises(DataError, match=r"sample 1 .*length of 0"):
        choose_edges(np.array([4, 0, 7]), 3)
    with pytest.raises(DataError, match=r"sample 2 .*length of -1"):
        assign_buckets(np.array([4, 1, -1]), [8])
    with pytest.raises(ValueError, match="shape"):
        choose_edges(np.array([[4]]), 3)
