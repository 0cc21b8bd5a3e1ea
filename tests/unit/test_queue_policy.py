"""The queue's rules against a naive model: one flat list of items, searched from the front."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_tool.errors import ConfigError
from dflash_tool.queue import BucketPolicy, Item

buckets = st.integers(0, 4)


class PolicyMachine(RuleBasedStateMachine):
    """Random puts, gets and takes; the model is a list in order of arrival."""

    @initialize(
        max_items=st.none() | st.integers(1, 4),
        max_bytes=st.none() | st.integers(1, 30),
    )
    def start(self, max_items: int | None, max_bytes: int | None) -> None:
        self.policy: BucketPolicy[str] = BucketPolicy(max_items_per_bucket=max_items, max_bytes=max_bytes)
        self.max_items, self.max_bytes = max_items, max_bytes
        self.model: list[Item[str]] = []
        self.behind_since: dict[int, int] = {}  # by bucket: when it was served last, or first came
        self.moment = 0
        self.next_index = 0
        self.out: Counter[int] = Counter()
        self.overtaken: dict[int, Counter[int]] = defaultdict(Counter)  # others' turns while a bucket waits

    def sizes(self) -> Counter[int]:
        return Counter(item.bucket for item in self.model)

    def room(self, item: Item[str]) -> bool:
        return (self.max_items is None or self.sizes()[item.bucket] < self.max_items) and (
            self.max_bytes is None or sum(i.nbytes for i in self.model) + item.nbytes <= self.max_bytes
        )

    @rule(bucket=buckets, nbytes=st.integers(0, 10))
    def put(self, bucket: int, nbytes: int) -> None:
        item = Item(self.next_index, bucket, nbytes, f"payload {self.next_index}")
        self.next_index += 1
        if self.max_bytes is not None and nbytes > self.max_bytes:
            with pytest.raises(ConfigError, match=rf"{nbytes} bytes.*{self.max_bytes} bytes"):
                self.policy.try_put(item)
            return
        fits = self.room(item)
        assert self.policy.try_put(item) is fits
        if fits:
            if not self.sizes()[bucket]:
                self.overtaken[bucket].clear()
            self.model.append(item)
            self.moment += 1
            self.behind_since.setdefault(bucket, self.moment)
        else:
            assert self.model, "a full queue has something to get"

    @rule()
    def get(self) -> None:
        item = self.policy.try_get()
        if not self.model:
            assert item is None
            return
        assert item is not None
        bucket = min(self.sizes(), key=lambda b: self.behind_since[b])
        assert item is next(i for i in self.model if i.bucket == bucket)
        for other in self.sizes():
            self.overtaken[other][bucket] += 1
            assert other == bucket or self.overtaken[other][bucket] <= 1, "more than one round of the others"
        self.overtaken[bucket].clear()
        self.moment += 1
        self.behind_since[bucket] = self.moment
        self.leaves(item)

    @rule(choice=st.integers(0, 50))
    def take(self, choice: int) -> None:
        index = choice % (self.next_index + 1)
        expected = next((i for i in self.model if i.index == index), None)
        assert self.policy.try_take(index) is expected
        if expected is not None:
            self.leaves(expected)

    @precondition(lambda self: self.model)
    @rule()
    def get_and_restore(self) -> None:
        """An item handed out and brought back stands where it stood; only the turn is used up."""
        item = self.policy.try_get()
        assert item is not None
        self.moment += 1
        self.behind_since[item.bucket] = self.moment
        self.overtaken.clear()
        self.policy.restore(item)

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, 50))
    def put_again(self, choice: int) -> None:
        twin = self.model[choice % len(self.model)]
        with pytest.raises(ValueError, match=f"index {twin.index} is in the queue already"):
            self.policy.try_put(twin)

    def leaves(self, item: Item[str]) -> None:
        self.model.remove(item)
        self.out[item.index] += 1
        assert self.out[item.index] == 1

    @invariant()
    def agrees(self) -> None:
        assert len(self.policy) == len(self.model)
        assert self.policy.bucket_sizes() == dict(self.sizes())
        assert self.policy.nbytes == sum(item.nbytes for item in self.model)
        assert self.max_items is None or all(n <= self.max_items for n in self.sizes().values())
        assert self.max_bytes is None or self.policy.nbytes <= self.max_bytes


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)


def test_gets_go_round_the_buckets_that_hold_items() -> None:
    policy: BucketPolicy[None] = BucketPolicy()
    for index, bucket in enumerate([2, 2, 2, 2, 0, 0, 1]):
        assert policy.try_put(Item(index, bucket, 1, None))
    order = [item.bucket for item in iter(policy.try_get, None)]
    assert order == [2, 0, 1, 2, 0, 2, 2]


def test_a_bucket_that_was_empty_is_not_set_back() -> None:
    policy: BucketPolicy[None] = BucketPolicy()
    for index, bucket in enumerate([0, 1, 1, 1]):
        policy.try_put(Item(index, bucket, 1, None))
    assert [policy.try_get().bucket for _ in range(3)] == [0, 1, 1]  # type: ignore[union-attr]
    policy.try_put(Item(9, 0, 1, None))
    assert policy.try_get() == Item(9, 0, 1, None)  # its last turn is longer ago than that of bucket 1


def test_a_long_queue_is_drained_in_linear_time_from_the_middle_too() -> None:
    policy: BucketPolicy[None] = BucketPolicy()
    for index in range(50_000):
        policy.try_put(Item(index, 0, 1, None))
    for index in range(25_000):  # a list would move 10^9 entries here
        taken, got = policy.try_take(49_999 - index), policy.try_get()
        assert taken is not None
        assert got is not None
        assert (taken.index, got.index) == (49_999 - index, index)
    assert len(policy) == policy.nbytes == 0


@pytest.mark.parametrize("bounds", [{"max_items_per_bucket": 0}, {"max_bytes": 0}, {"max_bytes": -5}])
def test_bounds_below_one_are_refused(bounds: dict[str, int]) -> None:
    name, value = next(iter(bounds.items()))
    with pytest.raises(ConfigError, match=f"{name} is {value}, needs at least 1"):
        BucketPolicy(**bounds)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="item 3 has -1 bytes"):
        BucketPolicy[None]().try_put(Item(3, 0, -1, None))
