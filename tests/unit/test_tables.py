"""What the commands draw: nothing is cut on a narrow terminal, one of a thing isn't several."""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.filesize import decimal

from dflash_tool.commands.format import Columns
from dflash_tool.commands.panel import extract_panel, plain_line
from dflash_tool.commands.stats import stats_text
from dflash_tool.commands.train_tables import train_panel
from dflash_tool.stats import BucketStats, store_stats
from dflash_tool.telemetry import ExtractSnapshot, TrainSnapshot
from dflash_tool.wording import counted, short, size, verb
from tests.store_kit import make_store

WIDTHS = pytest.mark.parametrize("width", [60, 80])


def drawn(what: RenderableType, width: int) -> list[str]:
    """The lines of it on a terminal of that width."""
    file = io.StringIO()
    Console(file=file, width=width).print(what)
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def numbers(lines: list[str]) -> list[str]:
    return re.findall(r"[\d,./-]*\d", "\n".join(lines))


def test_counted() -> None:
    assert [counted(n, "sample") for n in (0, 1, 2, 1234)] == ["0 samples", "1 sample", "2 samples", "1,234 samples"]
    assert [counted(n, "batch", "batches") for n in (1, 3)] == ["1 batch", "3 batches"]
    assert [verb(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]


@given(st.integers(0, 10**21))
def test_sizes_are_those_of_rich(nbytes: int) -> None:
    if nbytes < 10**18 * 999:
        assert size(nbytes) == decimal(nbytes)


def test_short_numbers() -> None:
    numbers = (0, 0.0012, 12.5, 999, 1234, 12_345, 1_234_567, 12_300_000_000)
    assert [short(each) for each in numbers] == ["0", "0.0012", "12.5", "999", "1,234", "12.35k", "1.235M", "12.3G"]


@given(
    st.integers(2, 8).flatmap(lambda n: st.lists(st.lists(st.integers(0, 10**12), min_size=n, max_size=n), min_size=1)),
    st.integers(50, 120),
)
def test_columns_are_whole_at_any_width(rows: list[list[int]], width: int) -> None:
    cells = [[f"{number:,}" for number in row] for row in rows]
    names = [f"name {place}" for place in range(len(rows[0]))]
    blocks = "\n".join(drawn(Columns(names, cells), width)).split("\n\n")
    found: list[list[str]] = [[] for _ in cells]
    shown: list[str] = []
    for block in blocks:
        head, *lines = block.splitlines()
        columns = re.findall(r"name \d", head)
        assert columns[0] == "name 0"
        assert len(columns) > 1
        shown += columns[1:]
        for row, line, expected in zip(found, lines, cells, strict=True):
            first, *others = line.split()
            assert first == expected[0]
            row.extend(others)
    assert shown == names[1:]
    assert found == [row[1:] for row in cells]


def test_columns_that_fit_stand_in_one_block() -> None:
    columns = Columns(["a", "b", "c"], [["1", "22", "333"]])
    assert [line.rstrip() for line in drawn(columns, 10)] == ["a   b    c", "1  22  333"]
    assert [line.rstrip() for line in drawn(columns, 9)] == ["a   b", "1  22", "", "a    c", "1  333"]


@WIDTHS
def test_a_huge_store(tmp_path: Path, width: int) -> None:
    bucket = BucketStats(
        bucket=15, lower=16_384, upper=131_072, samples=123_456_789, planned=987_654_321, tokens=1_234_567_890_123,
        token_share=0.1234, padded_share=0.4567, shards=123_456,
    )  # fmt: skip
    seen = dataclasses.replace(
        store_stats(make_store(tmp_path, [3, 4]).root), samples=123_456_789, tokens=1_234_567_890_123,
        shard_sizes=[10**10] * 123_456, buckets=[bucket],
        histogram=[(100_001, 131_072, 123_456_789)], percentiles={50: 1_234, 100: 131_072},
    )  # fmt: skip
    lines = drawn(stats_text(seen), width)
    assert "…" not in "".join(lines)
    for number in (
        "16385-131072",
        "123,456,789/987,654,321",
        "1,234,567,890,123",
        "12.3",
        "45.7",
        "123,456",
        "131,072",
    ):
        assert number in numbers(lines)


@WIDTHS
def test_panels(width: int) -> None:
    extracting = ExtractSnapshot(
        stage="extracting", stage_done=0, stage_total=0, seconds=1000.0, samples=7_654_321, held_samples=1_000_000,
        samples_total=9_876_543, real_tokens=1_234_567_890, held_tokens=123, tokens_total=9_876_543_210,
        padded_tokens=1_240_000_000, bytes_written=12_345_678_901_234, shards=12_345, inflight_bytes=123_400_000_000,
        inflight_limit=234_500_000_000, peak_inflight=200_100_000_000, queued=dict.fromkeys(range(16), 11),
        targets={f"target {n} on cuda:{n}": 987_654_321 for n in range(8)}, waited={"writer for targets": 7384.0},
    )  # fmt: skip
    lines = drawn(extract_panel(extracting), width)
    assert "…" not in "".join(lines)
    for number in ("8,654,321", "9,876,543", "1,234,568", "12.3", "12,345", "123.4", "234.5", "200.1", "987,654"):
        assert number in numbers(lines)
    assert ("12,345 shards" in plain_line(extracting), "11 samples" in plain_line(extracting)) == (True, False)
    training = TrainSnapshot(
        stage="training", step=123_456, first_step=0, total_steps=1_234_567, seconds=9999.0, loss=12.345,
        losses=tuple((n, float(n % 7)) for n in range(100)), taus=tuple((n, n / 10) for n in range(100)), lr=0.000512,
        grad_norm=1.0, tokens=1_234_567, blocks=7_654_321, buckets=dict.fromkeys(range(16), 321), waited=99.0,
        spent={"forward": 1.0, "backward": 2.0},
    )  # fmt: skip
    lines = drawn(train_panel(training), width)
    assert "…" not in "".join(lines)
    for number in ("123,456/1,234,567", "12.345", "9.90", "1,234,567", "7,654,321", "321"):
        assert number in numbers(lines)
