"""The split against its promises: one side a content, nothing unusable, nobody moves when others come and go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_tool.errors import ConfigError
from dflash_tool.loader import split_validation
from dflash_tool.schemas.arrow import make_sample_id

some = settings(max_examples=200, deadline=None, derandomize=True)


def ids_of(contents: list[int]) -> NDArray[np.uint64]:
    """Ids as `prompts` makes them: the n-th row of a content has occurrence number n."""
    seen: dict[int, int] = {}
    raw = b""
    for content in contents:
        digest = np.random.default_rng(content).bytes(12)
        raw += make_sample_id(digest, seen.setdefault(content, 0))
        seen[content] += 1
    return np.frombuffer(raw, "<u8").reshape(-1, 2).astype(np.uint64)


@some
@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40),
    st.integers(0, 2**63),
    st.sampled_from([0.0, 0.01, 0.3, 0.99]),
    st.integers(0, 6),
)
def test_sides(samples: list[tuple[int, bool]], seed: int, fraction: float, at_most: int) -> None:
    contents = np.array([content for content, _ in samples], np.int64)
    usable = np.array([good for _, good in samples], np.bool_)
    ids = ids_of(contents.tolist())
    train, val = split_validation(ids, usable, seed=seed, fraction=fraction, at_most=at_most)
    assert usable[train].all()
    assert usable[val].all()
    assert len(val) <= at_most
    assert not set(contents[train]) & set(contents[val])
    assert len(set(contents[val])) == len(val)  # each once
    left_out = set(np.flatnonzero(usable)) - set(train) - set(val)
    assert {contents[row] for row in left_out} <= set(contents[val])  # nothing else is left out
    assert sorted({*train, *val, *left_out}) == np.flatnonzero(usable).tolist()
    several = len(set(contents[usable])) > 1
    if several and fraction > 0 and at_most > 0:
        assert len(val) >= 1
    if several:
        assert len(train) >= 1
    if not several or fraction == 0 or at_most == 0:
        assert len(val) == 0
    for row in val:  # the first usable copy
        assert row == np.flatnonzero(usable & (contents == contents[row]))[0]


def test_a_tenth_of_ten_thousand() -> None:
    ids = ids_of(list(range(10_000)))
    everything = np.ones(len(ids), np.bool_)
    train, val = split_validation(ids, everything, seed=3, fraction=0.1, at_most=10_000)
    assert len(train) + len(val) == len(ids)
    assert abs(len(val) - 1000) < 100  # 3.3 standard deviations
    again = split_validation(ids, everything, seed=3, fraction=0.1, at_most=10_000)
    np.testing.assert_array_equal(val, again[1])
    other = split_validation(ids, everything, seed=4, fraction=0.1, at_most=10_000)[1]
    assert len(np.intersect1d(val, other)) < 200

    # Fewer are a subset, a larger fraction holds out more of the same.
    few = split_validation(ids, everything, seed=3, fraction=0.1, at_most=64)
    assert len(few[1]) == 64
    assert set(few[1]) < set(val)
    assert len(few[0]) == len(ids) - 64  # the others are trained on
    more = split_validation(ids, everything, seed=3, fraction=0.2, at_most=10_000)[1]
    assert set(val) < set(more)
    smaller = split_validation(ids, everything, seed=3, fraction=0.05, at_most=64)[1]
    np.testing.assert_array_equal(smaller, few[1])

    # Nobody changes sides when others are missing or stand elsewhere in the file.
    usable = np.random.default_rng(0).random(len(ids)) < 0.7
    part = split_validation(ids, usable, seed=3, fraction=0.1, at_most=10_000)
    np.testing.assert_array_equal(part[1], val[usable[val]])
    backwards = split_validation(ids[::-1], everything, seed=3, fraction=0.1, at_most=10_000)[1]
    np.testing.assert_array_equal(np.sort(len(ids) - 1 - backwards), val)
    half = split_validation(ids[:5000], everything[:5000], seed=3, fraction=0.1, at_most=10_000)[1]
    np.testing.assert_array_equal(half, val[val < 5000])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"fraction": 1.0}, "--val-fraction: got 1.0"), ({"fraction": -0.1}, "--val-fraction"), ({"at_most": -1}, "-1")],
)
def test_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_validation(ids_of([1, 2]), np.ones(2, np.bool_), seed=0, **options)  # type: ignore[arg-type]
