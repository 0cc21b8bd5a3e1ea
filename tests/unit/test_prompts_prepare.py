"""The stream from files to record batches: the accounting, limits, ids, progress."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tool.errors import DataError, TargetError
from dflash_tool.prompts import PREPARED_SCHEMA, Preparation, PrepareOptions, preparation
from dflash_tool.schemas.arrow import SAMPLES_SCHEMA, content_hash, make_sample_id

from .prompts_kit import (
    CHATML,
    MARKED,
    PLAIN,
    QWEN3,
    chat,
    check_stats,
    make_tokenizer,
    run,
    run_chats,
    write_rows,
)


def test_strict_stops_at_the_first_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Also where a later row is found bad at an earlier stage."""
    lone = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": chat("q", "a")}, lone, "not json"])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: no anchor: 1 of 2 tokens supervised"):
        run(path, make_tokenizer(CHATML), strict=True)
    assert run(path, make_tokenizer(CHATML))[1].skipped == {"no anchor": 1, "not JSON": 1}


def test_duplicates_are_kept_numbered_and_told(tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "loss_mask": [0, 1, 1]} for ids in ([1, 2, 3], [4, 5, 6], [1, 2, 3], [1, 2, 3])]
    rows.append({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]})
    files = [write_rows(tmp_path / "a.jsonl", rows[:2]), write_rows(tmp_path / "b.jsonl", rows[2:])]
    stream = Preparation(files, make_tokenizer(), PrepareOptions(vocab_size=10))
    batches = list(stream)
    assert stream.stats.duplicates == 2
    ids = [i for batch in batches for i in batch.column("sample_id").to_pylist()]
    contents = []
    for batch in batches:
        for tokens, mask in zip(batch.column("input_ids"), batch.column("loss_mask"), strict=True):
            contents.append(content_hash(tokens.values.to_numpy(), mask.values.to_numpy()))
    assert ids == [make_sample_id(c, n) for c, n in zip(contents, [0, 0, 1, 2, 0], strict=True)]


def test_schema() -> None:
    assert PREPARED_SCHEMA.names == [name for name in SAMPLES_SCHEMA.names if name != "bucket"]


def test_batches_have_the_schema_and_the_order_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_CHUNK_ROWS", 3)
    tokenizer = make_tokenizer(CHATML)
    rows: list[Any] = [{"messages": chat(f"q{n}", f"a{n}")} for n in range(8)]
    rows[4] = "broken"
    rows.insert(2, {"input_ids": [9, 9, 9], "loss_mask": [0, 1, 1]})
    files = [write_rows(tmp_path / "a.jsonl", rows[:4]), write_rows(tmp_path / "b.jsonl", rows[4:])]
    seen: list[tuple[int, int, int]] = []
    stream = Preparation(files, tokenizer, PrepareOptions(vocab_size=1000), lambda *numbers: seen.append(numbers))
    batches = list(stream)
    assert all(batch.schema == PREPARED_SCHEMA and batch.num_rows <= 3 for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    sources = [source for batch in batches for source in batch.column("source").to_pylist()]
    assert sources == [f"{files[0]}:{n}" for n in (1, 2, 3, 4)] + [f"{files[1]}:{n}" for n in (1, 3, 4, 5)]
    total = sum(file.stat().st_size for file in files)
    assert all(of == total for _, of, _ in seen)
    assert seen[-1] == (total, total, 8)
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    alone = [run_chats(tmp_path, [row["messages"]], tokenizer)[0][0] for row in rows if "messages" in row]
    ids = [i for batch in batches for i in batch.column("input_ids").to_pylist() if i != [9, 9, 9]]
    assert ids == [sample["input_ids"] for sample in alone], "the chunk a row stands in changes nothing"


def test_too_long(tmp_path: Path) -> None:
    rows = [
        {"input_ids": list(range(10, 20)), "loss_mask": [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]},
        {"input_ids": list(range(10, 20)), "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]},
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 1, 1, 1, 1]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    samples, stats = run(path, make_tokenizer(), max_length=5, strict=True)
    check_stats(stats, samples)
    assert [sample["input_ids"] for sample in samples] == [[10, 11, 12, 13, 14], [1, 2, 3, 4, 5]]
    assert stats.truncated == 1
    assert stats.skipped == {"no anchor within the maximum length": 1}
    samples, stats = run(path, make_tokenizer(), max_length=5, overlength="skip", strict=True)
    check_stats(stats, samples)
    assert [sample["input_ids"] for sample in samples] == [[1, 2, 3, 4, 5]]
    assert (stats.truncated, stats.skipped) == (0, {"too long": 2})
    assert "10 tokens, --max-length is 5" in stats.examples["too long"][0]


def test_a_conversation_is_cut_like_its_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    chats = [chat("The quick brown fox", "jumps over the lazy dog, while the answer is good")]
    (whole,), _ = run_chats(tmp_path, chats, tokenizer)
    (cut,), stats = run_chats(tmp_path, chats, tokenizer, max_length=whole["length"] - 5)
    assert cut["input_ids"] == whole["input_ids"][:-5]
    assert cut["loss_mask"] == whole["loss_mask"][:-5]
    assert stats.truncated == 1


def test_ids_beyond_the_embedding_and_the_mask_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    mask_id = tokenizer.convert_tokens_to_ids("<|mask|>")
    chats = [chat("q", "a"), chat("q", "a <|mask|> inside"), chat("<|mask|>", "a"), chat("q", "<|end|>")]
    samples, stats = run_chats(
        tmp_path, chats, tokenizer, mask_token_id=mask_id, vocab_size=tokenizer.convert_tokens_to_ids("<|end|>")
    )
    check_stats(stats, samples)
    assert stats.skipped == {"contains the mask token": 2, "token id beyond the vocabulary": 1}
    rows = [{"input_ids": [1, mask_id, 2], "loss_mask": [0, 1, 1]}, {"input_ids": [1, 2], "loss_mask": [1, 1]}]
    samples, stats = run(write_rows(tmp_path / "ids.jsonl", rows), tokenizer, mask_token_id=mask_id)
    assert stats.skipped == {"contains the mask token": 1}


def test_no_anchor(tmp_path: Path) -> None:
    """The prompt's last blank belongs to the token " a": of the first answer only one token is left."""
    template = PLAIN.replace("{{ m.content }}\n", "{{ m.content }}|")
    (sample,), stats = run_chats(tmp_path, [chat("q", "a"), chat("q", "answer then")], make_tokenizer(template))
    check_stats(stats, [sample])
    assert stats.skipped == {"no anchor": 1}
    rows = [{"input_ids": [1, 2, 3, 4], "loss_mask": mask} for mask in ([0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1])]
    samples, stats = run(write_rows(tmp_path / "ids.jsonl", rows), make_tokenizer())
    check_stats(stats, samples)
    assert stats.skipped == {"no anchor": 2}


def test_split_conversations_are_counted(tmp_path: Path) -> None:
    thought = "<think>\nhm\n</think>\n\n"
    chats = [chat("q", thought + "a", "r", thought + "b", "s", thought + "c"), chat("q", thought + "a")]
    samples, stats = run_chats(tmp_path, chats, make_tokenizer(QWEN3))
    check_stats(stats, samples)
    assert (stats.rows, stats.samples, stats.split_rows, stats.split_parts) == (2, 4, 1, 3)
    assert len({sample["source"] for sample in samples}) == 2
    samples, stats = run_chats(tmp_path, chats, make_tokenizer(QWEN3), turns="last")
    check_stats(stats, samples)
    assert (stats.samples, stats.split_rows, stats.split_parts) == (2, 1, 1)
    _, stats = run_chats(tmp_path, chats[1:], make_tokenizer(QWEN3))
    assert (stats.split_rows, stats.split_parts) == (0, 0)


def test_turns_left_unsupervised_are_counted(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_start|>{{ m.role }}", "<|im_start|>{{ 'bot' if m.content == 'x' else m.role }}")
    chats = [chat("q", "x", "q", "a")]
    samples, stats = run_chats(tmp_path, chats, make_tokenizer(template))
    check_stats(stats, samples)
    assert stats.unsupervised == {"generation prompt differs": 1}
    assert stats.skipped == {}
    with pytest.raises(DataError, match="generation prompt differs"):
        run_chats(tmp_path, chats, make_tokenizer(template), strict=True)


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    chats = [chat("q", "a")]
    on, _ = run_chats(tmp_path, chats, make_tokenizer(QWEN3))
    off, _ = run_chats(tmp_path, chats, make_tokenizer(QWEN3), template_args={"enable_thinking": False})
    assert on[0]["input_ids"] == off[0]["input_ids"]
    assert on[0]["supervised"] > off[0]["supervised"] == 2


def test_nothing_left_says_why(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["x", {"messages": chat("q")}, "y"])
    message = f"{path}: nothing to do: none of 3 rows gives a sample: 2 not JSON, first: {path}:1: .*; 1 no assistant"
    with pytest.raises(DataError, match=message):
        run(path, make_tokenizer(CHATML))


def test_no_template_matters_only_for_conversations(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    path = write_rows(tmp_path / "rows.jsonl", [row, {"messages": chat("q", "a")}])
    with pytest.raises(TargetError, match="--chat-template"):
        run(path, make_tokenizer(None))


def test_missing_file_is_found_before_any_work(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2], "loss_mask": [1, 1]}])
    with pytest.raises(DataError, match="missing"):
        Preparation([good, tmp_path / "missing.jsonl"], make_tokenizer(), PrepareOptions(vocab_size=10))


ROWS = st.lists(
    st.one_of(
        st.sampled_from(["", "{", "7", '{"a": 1}']),
        st.tuples(st.sampled_from(["q", " ", ""]), st.sampled_from(["", "a", "b c", "<|mask|>", "x" * 60])).map(
            lambda pair: {"messages": chat(*pair)}
        ),
        st.lists(st.integers(-1, 12), max_size=6).map(lambda ids: {"input_ids": ids, "loss_mask": [1] * len(ids)}),
    ),
    max_size=12,
)


@given(rows=ROWS, chunk=st.integers(1, 4), limit=st.none() | st.integers(2, 40))
def test_nothing_is_lost_unsaid(
    rows: list[Any], chunk: int, limit: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_rows(tmp_path_factory.getbasetemp() / "rows.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_CHUNK_ROWS", chunk)
        stream = Preparation(
            [path], make_tokenizer(MARKED), PrepareOptions(vocab_size=420, max_length=limit, mask_token_id=3)
        )
        samples = []
        try:
            for batch in stream:
                samples += batch.to_pylist()
        except DataError:
            assert not samples
    check_stats(stream.stats, samples)
    assert stream.stats.rows == sum(row != "" for row in rows)
    contents = Counter(bytes(sample["sample_id"][:12]) for sample in samples)
    assert stream.stats.duplicates == sum(contents.values()) - len(contents)
    lines = [int(re.sub(r".*:", "", sample["source"])) for sample in samples]
    assert lines == sorted(lines)
