"""Files of every kind: the same rows give the same samples; what is damaged is told."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tool.errors import DataError
from dflash_tool.prompts import Reason, Skipped, json_files, parquet_files, read_rows
from dflash_tool.prompts.files import read_entries

from .prompts_kit import CHATML, chat, make_tokenizer, run

Rows = list[Any]
TOKENIZER = make_tokenizer(CHATML)


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\r\n" for row in rows).encode()


def array(rows: Rows, indent: int | None = 1) -> bytes:
    return b"\xef\xbb\xbf\n " + json.dumps(rows, ensure_ascii=False, indent=indent).encode() + b"\n"


def zipped(make: Callable[[Rows], bytes]) -> Callable[[Rows], bytes]:
    return lambda rows: gzip.compress(make(rows)[:7]) + gzip.compress(make(rows)[7:])  # two members


def parquet(rows: Rows, **options: Any) -> bytes:
    """Each row with every column, each struct with every key, null where there is none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **{"row_group_size": 3, "write_page_checksum": True, **options})
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[Rows], bytes]] = {
    "array": array, "short array": lambda rows: array(rows, None), "gzipped lines": zipped(lines),
    "gzipped array": zipped(array), "parquet": parquet,
}  # fmt: skip
# Only what a column of one type can hold.
CONTENT = st.text(alphabet='日🗼é the\n"\\[],{}', max_size=8)
CALLS = st.sampled_from([None, [{"function": {"name": "f", "arguments": {"x": 1}}}], [{"function": {"name": "g"}}]])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "wizard"]), "content": CONTENT},
        optional={"name": CONTENT, "tool_calls": CALLS},
    ),
    max_size=3,
)
SHAREGPT = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt"]), "value": CONTENT})
IDS = st.lists(st.integers(0, 500), max_size=6)
ROWS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"messages": MESSAGES}, optional={"id": st.integers(0, 9)}),
        st.fixed_dictionaries({"conversations": st.lists(SHAREGPT)}),
        st.builds(lambda ids: {"input_ids": ids, "loss_mask": [1] * len(ids)}, IDS),
        st.fixed_dictionaries({"prompt": CONTENT, "completion": CONTENT}),
        st.fixed_dictionaries({"text": CONTENT}),
        st.just({"foo": "bar"}),
    ),
    max_size=8,
)  # fmt: skip


def outcome(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    try:
        samples, stats = run(path, TOKENIZER, vocab_size=480)
    except DataError as error:
        return "nothing to do" in str(error)
    kept = [(sample["input_ids"], sample["loss_mask"], sample["sample_id"], sample["source"]) for sample in samples]
    skipped = None if content.startswith(b"PAR1") else stats.skipped  # an empty row there is a row of nulls
    return kept, stats.rows, sum(stats.skipped.values()), skipped


@given(rows=ROWS, block=st.integers(1, 40), batch=st.integers(1, 4))
def test_the_same_rows_give_the_same_samples(
    rows: Rows, block: int, batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows"
    expected = outcome(path, lines(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "_BLOCK_CHARACTERS", block)
        patch.setattr(parquet_files, "_BATCH_ROWS", batch)
        for kind, make in KINDS.items():
            if rows or kind != "parquet":
                found = outcome(path, make(rows))
                if kind == "parquet" and found is not True:
                    assert found[:3] == expected[:3]
                else:
                    assert found == expected, kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(rows=st.lists(JSON, max_size=6), block=st.integers(1, 20), indent=st.sampled_from([None, 0, 3]))
def test_an_array_gives_what_its_elements_give_as_lines(
    rows: Rows, block: int, indent: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """NaN and Infinity too, which Python writes and JSON lacks."""
    folder = tmp_path_factory.getbasetemp()
    (folder / "lines").write_bytes(lines(["no array", *rows]))
    (folder / "array").write_bytes(json.dumps(rows, indent=indent).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "_BLOCK_CHARACTERS", block)
        found, expected = (
            [v.reason if isinstance(v, Skipped) else v for _, v, _ in read_entries(folder / name, ())]
            for name in ("array", "lines")
        )
    assert found == expected[1:]


def test_sources_and_progress(tmp_path: Path) -> None:
    rows = [{"text": f"row {number} " + "x" * 300} for number in range(2000)]
    path = tmp_path / "rows"
    for make in (lines, *KINDS.values()):
        path.write_bytes(make(rows))
        size = path.stat().st_size
        entries = list(read_entries(path, {"text"}))
        assert [entry.source for entry in entries] == [f"{path}:{number}" for number in range(1, 2001)]
        assert [entry.value for entry in entries] == rows
        done = [entry.bytes_done for entry in entries]
        assert done == sorted(done)
        assert 0 < done[0] <= done[-1] <= size
        assert done[-1] > 0.95 * size


def test_an_array_is_read_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a second block is read before the first one's rows are out."""
    monkeypatch.setattr(json_files, "_BLOCK_CHARACTERS", 1000)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "x" * 100}] * 10_000))
    entries = read_entries(path, ())
    assert next(entries).bytes_done < 50_000
    assert next(entries).bytes_done < 50_000


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[{"a": 1},\n {"a": 2}', r":2 \(line 2\).*: the file ends here"),
        ('[{"a": 1},\n {"a": "x', r":2 \(line 2\).*: the file ends in the middle"),
        ('[{"a": 1},\n {"a": 2} {"a": 3}]', r":2 \(line 2\).*: expected ',' or '\]', found '{\"a\": 3}\]'"),
        ('[{"a": 1},\n\n {"a": 2},]', r":3 \(line 3\).*Expecting value"),
        ("[{'a': 1}]" + " " * 99, r":1 \(line 1\).*Expecting property name"),
        ('[{"a": "new\nline"}]', r":1 \(line 1\).*Invalid control character"),
        ('[{"a": 1}]\n{"a": 2}', r":1 \(line 2\).*something follows the array's end: '{\"a\": 2}'"),
        ("[", r":1 \(line 1\).*the file ends"),
        ("[" + "[" * 100_000, r":1 \(line 1\).*nested too deeply"),
    ],
)
def test_damaged_arrays(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    if "follows" in error:  # else it would be taken for lines
        path.write_text(text.replace("[", "[\n", 1))
        error = error.replace("line 2", "line 3")
    with pytest.raises(DataError, match=r"rows\.json" + error):
        list(read_entries(path, ()))


def test_a_broken_array_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "_BLOCK_CHARACTERS", 1000)
    path = tmp_path / "rows.json"
    path.write_text('[{"a": oops}, ' + '{"a": 1}, ' * 10_000 + "]")
    reads: list[int] = []
    original = json_files._Array._read_more
    monkeypatch.setattr(json_files._Array, "_read_more", lambda self: (reads.append(1), original(self))[1])
    with pytest.raises(DataError, match=r"rows\.json:1 "):
        list(read_entries(path, ()))
    assert len(reads) == 1


def test_an_array_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes('[{"text": "é"}]'.encode("latin-1"))
    with pytest.raises(DataError, match=r"rows\.json:0 or after: not UTF-8 \(byte 0xe9\)"):
        list(read_entries(path, ()))


def test_lines_of_which_the_first_is_a_list(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('[1, 2, 3]\n{"text": "a"}\n')
    assert [value for _, value, _ in read_entries(path, ())] == [[1, 2, 3], {"text": "a"}]
    path.write_text('[{"text": "a"}]\n\n')
    assert [value for _, value, _ in read_entries(path, ())] == [{"text": "a"}]


def test_what_a_file_is_its_name_does_not_say(tmp_path: Path) -> None:
    rows = [{"text": "a"}]
    for name, make in (("a.parquet", lines), ("a.jsonl", parquet), ("a.gz", array), ("a.json", zipped(lines))):
        (tmp_path / name).write_bytes(make(rows))
        assert [value for _, value, _ in read_entries(tmp_path / name, {"text"})] == rows
    for name in ("empty.gz", "empty.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match="no rows"):
            run(tmp_path / name, TOKENIZER)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04rest", "a zip archive"),
        (b"\x28\xb5\x2f\xfdrest", "zstd"),
        (b"BZh9", "bzip2"),
        (b"\xfd7zXZ\x00", "xz"),
        ('{"text": "a"}'.encode("utf-16"), "UTF-16"),
        (b"ARROW1\x00\x00", "an Arrow file"),
        (gzip.compress(parquet([{"text": "a"}])), "gzipped Parquet"),
        (gzip.compress(gzip.compress(b"{}")), "gzipped twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time: two processes' would differ
)
def test_kinds_that_are_not_read(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"this file is .*{said}.*--data takes .*convert it"):
        list(read_entries(path, ()))


def damaged(content: bytes) -> Iterator[bytes]:
    """Cut, and with a byte changed, at many places."""
    rng = random.Random(7)
    for _ in range(60):
        place = rng.randrange(6, len(content))
        yield content[:place]
        yield content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]


def test_damaged_gzip(tmp_path: Path) -> None:
    """A checksum covers every byte of the content: the whole content comes out, or an error."""
    rows = [{"text": f"row {number}"} for number in range(200)]
    path = tmp_path / "rows.jsonl.gz"
    refused = 0
    for content in damaged(gzip.compress(lines(rows))):
        path.write_bytes(content)
        try:
            assert [value for _, value, _ in read_entries(path, ())] == rows
        except DataError:
            refused += 1
    assert refused > 100
    path.write_bytes(gzip.compress(lines(rows)) + b"garbage")
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: a damaged gzip file: .*download it again"):
        list(read_entries(path, ()))


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_damaged_parquet(tmp_path: Path, compression: str) -> None:
    rows = [{"messages": chat(f"q{number}", "a" * (number % 7 + 1))} for number in range(50)]
    path = tmp_path / "rows.parquet"
    whole = parquet(rows, compression=compression)
    refused = 0
    for content in damaged(whole):
        path.write_bytes(content)
        try:
            list(read_rows(path))
        except DataError:
            refused += 1
    assert refused > 60, "each cut file at least"
    path.write_bytes(whole[:-10])
    with pytest.raises(DataError, match=r"rows\.parquet: a damaged Parquet file.*download it again"):
        list(read_entries(path, {"messages"}))


def test_parquet_columns(tmp_path: Path) -> None:
    """Ids and masks of any integer type, masks of booleans; what is no integer is told."""
    path = tmp_path / "rows.parquet"
    for ids, masks in ((pa.int64(), pa.int8()), (pa.uint16(), pa.bool_()), (pa.int32(), pa.float32())):
        table = pa.table(
            {
                "input_ids": pa.array([[1, 2, 3], [4, 5], None], pa.list_(ids)),
                "loss_mask": pa.array([[0, 1, 1], [1, 1], [1]]).cast(pa.large_list(masks)),
                "blob": pa.array([b"\xff"] * 3),
            }
        )
        pq.write_table(table, path)
        if pa.types.is_floating(masks):
            reasons = [row.reason for row, _ in read_rows(path) if isinstance(row, Skipped)]
            assert reasons == [Reason.MASK_NOT_BINARY] * 2 + [Reason.NOT_A_LIST]
            continue
        samples, stats = run(path, TOKENIZER)
        assert [(s["input_ids"], s["loss_mask"]) for s in samples] == [([1, 2, 3], [0, 1, 1]), ([4, 5], [1, 1])]
        assert stats.skipped == {"not a list": 1}


def test_parquet_that_has_none_of_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet([{"question": "q", "answer": "a"}] * 2))
    with pytest.raises(DataError, match=r"2 unknown keys, first: .*:1: 'question', 'answer'; expected 'messages'"):
        run(path, TOKENIZER)


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    plain = {"compression": "none", "write_page_checksum": False, "use_dictionary": False, "write_statistics": False}
    good = parquet([{"text": f"row MARK {number}"} for number in range(4)], **plain)
    path.write_bytes(good.replace(b"MARK 3", b"MAR\xff 3"))
    with pytest.raises(DataError, match=r"rows\.parquet:1 or after: text that isn't UTF-8"):
        list(read_entries(path, {"text"}))
