"""Names parse only as they are written; sizes add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tool.store.layout import ShardName, array_file_bytes, chunk_index, padded_rows

small = st.integers(0, 10**8)


@given(small, small, small)
def test_a_name_comes_back(bucket: int, rank: int, number: int) -> None:
    name = ShardName(bucket, rank, number)
    assert ShardName.parse(str(name)) == name


def test_a_name_as_in_the_design() -> None:
    assert str(ShardName(2, 0, 7)) == "b2-r0-00007"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b2-r0-7",
        "b02-r0-00007",
        "b2-r0-000007",
        "b2-r0-00007\n",
        "b2-r0-00007.zarr",
        "b-1-r0-00007",
        "b²-r0-00007",
    ],
)
def test_other_names_are_foreign(text: str) -> None:
    assert ShardName.parse(text) is None


@given(st.integers(1, 5000), st.sampled_from([2, 16, 320, 8192]))
def test_overhead_is_less_than_a_chunk_and_its_index(rows: int, row_bytes: int) -> None:
    size = array_file_bytes(rows, row_bytes)
    assert size == padded_rows(rows) * row_bytes + len(chunk_index(rows, row_bytes))
    assert 0 <= size - rows * row_bytes - 4 - 16 * -(-rows // 64) <= 63 * row_bytes
