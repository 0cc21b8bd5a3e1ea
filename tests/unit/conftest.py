"""The store that the tests of the loader read."""

from collections.abc import Iterator

import pytest

from dflash_tool.store.reader import HiddenStore
from tests.store_kit import MadeStore, make_store

from .loader_kit import LONGEST, lengths_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    """100 samples in 3 buckets, layers 0, 2, 4 of 8 numbers, many small shards."""
    root = tmp_path_factory.mktemp("store")
    return make_store(root, lengths_of(100), edges=(20, 50, LONGEST), layers=(0, 2, 4), shard_bytes=8000)


@pytest.fixture
def store(made: MadeStore) -> Iterator[HiddenStore]:
    with HiddenStore.open(made.root) as opened:
        yield opened
