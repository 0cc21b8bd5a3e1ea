"""Each wrong input: one clear message, the right exit code, nothing written or lost, no traceback."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from dflash_tool.store.reader import HiddenStore

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's


def _refused(result: object, code: int, *says: str) -> None:
    assert result.code == code, result.err  # type: ignore[attr-defined]
    assert result.out == ""  # type: ignore[attr-defined]
    for words in says:
        assert words in " ".join(result.err.split()), result.err  # type: ignore[attr-defined]
    assert "Traceback" not in result.err  # type: ignore[attr-defined]


@pytest.fixture
def words(random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path) -> list[object]:
    return ["extract", "--target", random_target(), "--data", token_rows(40), "--out", tmp_path / "store"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--target", "nowhere"], 1, ["no target at nowhere", "--target"]),
        (["--data", "nowhere.jsonl"], 1, ["nowhere.jsonl", "no such data file"]),
        (["--data", "."], 1, ["is a folder"]),
        (["--layers", "1,9"], 2, ["9 is out of range", "0..4"]),
        (["--layers", "1,1"], 2, ["more than once"]),
        (["--layers", "1,5"], 2, ["the last layer", "0..4"]),
        (["--layers", "one"], 2, ["--layers", "'one'"]),
        (["--inflight-gib", "0.000001"], 2, ["the largest batch needs", "--inflight-gib", "--batch-tokens"]),
        (["--inflight-gib", "0"], 2, ["--inflight-gib", "greater than 0"]),
        (["--max-length", "100000"], 2, ["--max-length", "256 tokens"]),
        (["--buckets", "8,4"], 2, ["--buckets: edge number 2 is 4", "ascending"]),
        (["--buckets", "8,16"], 2, ["last edge is 16", "--max-length 16"]),
        (["--buckets", "0"], 2, ["--buckets"]),
        (["--store-dtype", "int8"], 2, ["--store-dtype", "bfloat16"]),
        (["--target-device", "tpu"], 2, ["tpu"]),
        (["--mask-token-id", "95"], 2, ["--mask-token-id", "eos"]),
        (["--config", "nowhere.yaml"], 2, ["--config: can't read nowhere.yaml: No such file or directory"]),
        (["--config", "broken.yaml"], 2, ["--config: broken.yaml is not YAML: line 2: expected ',' or ']'"]),
        (["--chat-template", "nowhere.jinja"], 2, ["--chat-template"]),
        (["--template-arg", "noequals"], 2, ["--template-arg"]),
        (["--no-such-option"], 2, ["--no-such-option"]),
        (["--out", ""], 2, ["--out: got an empty value"]),
        (["--target="], 2, ["--target: got an empty value"]),
    ],
)
def test_wrong_options(
    words: list[object], options: list[str], code: int, says: list[str], tmp_path: Path, dflash: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("layers: [1\nseed: 2\n")
    replaced = {"--target", "--data"} & set(options)
    given = list(words)
    for option in replaced:
        place = given.index(option)
        del given[place : place + 2]
    _refused(dflash(*given, *options), code, *says)
    assert not (tmp_path / "store").exists()


def test_needed_options_are_named(dflash: Run) -> None:
    _refused(dflash("extract"), 2, "--target is needed", "--data is needed", "--out is needed")


def test_a_setting_that_no_one_knows(words: list[object], tmp_path: Path, dflash: Run) -> None:
    (tmp_path / "run.yaml").write_text("batch_token: 100\n")
    _refused(dflash(*words, "--config", tmp_path / "run.yaml"), 2, "'batch_token'", "did you mean batch_tokens?")


def test_targets_that_lack_something(
    words: list[object], random_target: Callable[..., Path], data: Path, tmp_path: Path, dflash: Run
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(random_target(), bare)
    for file in bare.glob("token*"):
        file.unlink()
    _refused(dflash(*words[:1], "--target", bare, *words[3:]), 1, "no tokenizer here")
    chats = ("--data", data / "openai.jsonl", "--out", tmp_path / "store")
    _refused(dflash("extract", "--target", random_target(), *chats), 1, "no chat template", "--chat-template")
    assert not (tmp_path / "store").exists()


def test_data_that_give_nothing(words: list[object], data: Path, tmp_path: Path, dflash: Run) -> None:
    base = [*words[:3], "--out", tmp_path / "store"]
    _refused(dflash(*base, "--data", data / "empty.jsonl"), 1, "empty.jsonl", "nothing to do")
    only_bad = tmp_path / "bad.jsonl"
    only_bad.write_text('{"foo": 1}\nnot json\n')
    _refused(dflash(*base, "--data", only_bad), 1, "1 not JSON", "1 unknown keys", f"{only_bad}:1")
    _refused(dflash(*base, "--data", data / "bad_tokens.jsonl", "--strict"), 1, "bad_tokens.jsonl:1", "--strict")
    assert not (tmp_path / "store").exists()


def test_bad_token_rows_are_skipped_and_counted(words: list[object], data: Path, tmp_path: Path, dflash: Run) -> None:
    done = dflash(*words[:3], "--data", data / "bad_tokens.jsonl", "--out", tmp_path / "store", "--json")
    assert done.code == 0
    assert json.loads(done.out)["skipped"] == {
        "length mismatch": 1, "negative token id": 1, "token id beyond the vocabulary": 1, "empty": 1,
        "mask not 0/1": 1, "token id not an integer": 1,
    }  # fmt: skip
    store = HiddenStore.open(tmp_path / "store")
    assert [store.samples.tokens(row).tolist() for row in range(len(store.samples))] == [[4, 5, 6]]


def test_out_that_holds_something_else(words: list[object], tmp_path: Path, dflash: Run) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "thesis.tex").write_text("years of work")
    _refused(dflash(*words), 1, "holds something else", "thesis.tex")
    assert [file.name for file in store.iterdir()] == ["thesis.tex"]
    shutil.rmtree(store)
    store.write_text("a file")
    _refused(dflash(*words), 1, "is a file")
    store.unlink()
    store.symlink_to("nowhere")
    _refused(dflash(*words), 1, "is a link to nothing (nowhere)")


def test_a_store_of_other_settings_or_data(words: list[object], tmp_path: Path, dflash: Run) -> None:
    assert dflash(*words, "--layers", "1,2").code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file()}
    other = dflash(*words, "--layers", "1,3", "--seed", "5")
    _refused(other, 1, "--layers", "the store has [1, 2], this run [1, 3]", "the store has 0, this run 5")
    _refused(dflash(*words, "--layers", "1,2", "--buckets", "3"), 1, "--buckets", "edges")
    data = Path(str(words[4]))
    original = data.read_text()
    try:
        data.write_text(original + '{"input_ids": [1, 2], "loss_mask": [1, 1]}\n')
        _refused(dflash(*words, "--layers", "1,2"), 1, "--data", "other settings")
    finally:
        data.write_text(original)
    assert before == {file: file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file()}


def test_data_that_changed_before_the_first_shard_are_prepared_again(
    words: list[object],
    random_target: Callable[..., Path],
    tmp_path: Path,
    dflash: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_tool.errors import TargetError

    def fail(*_args: object, **_named: object) -> None:
        raise TargetError("stopped before the first shard")

    with monkeypatch.context() as patch:
        patch.setattr("dflash_tool.pipeline.extraction.load_targets", fail)
        assert dflash(*words, "--layers", "1").code == 1
    assert (tmp_path / "store" / "manifest.json").exists()
    data = Path(str(words[4]))
    original = data.read_text()
    try:
        data.write_text(original.splitlines(keepends=True)[0] * 3)
        done = dflash(*words, "--layers", "2", "--json")
        assert json.loads(done.out)["samples"] == 3
        assert json.loads(done.out)["prepared"]["duplicates"] == 2
    finally:
        data.write_text(original)


def test_two_runs_on_one_store(words: list[object], tmp_path: Path, dflash: Run) -> None:
    from dflash_tool.store.lock import RunLock

    with RunLock(tmp_path / "store"):
        _refused(dflash(*words), 1, "is being written by run", f"pid {os.getpid()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_no_space_on_the_disk(words: list[object], tmp_path: Path, dflash: Run) -> None:
    """Too small for the plan: refused with both numbers; with room enough the same command runs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("can't mount a tmpfs here")
    base = [*words[:5], "--out", disk / "store"]
    try:
        _refused(dflash(*base), 1, "bytes more", "bytes free")
        assert not (disk / "store").exists()
        subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
        assert dflash(*base, "--dry-run", "--json").code == 0
        assert dflash(*base).code == 0
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # the samples may still be mapped


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_store_that_can_only_be_read(words: list[object], tmp_path: Path, dflash: Run) -> None:
    """`stats` works on it, `extract` says what to do."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=False).returncode:
        pytest.skip("can't mount a tmpfs here")
    base = [*words[:5], "--out", disk / "store"]
    try:
        assert dflash(*base).code == 0
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert dflash("stats", disk / "store", "--verify").code == 0
        _refused(dflash(*base), 1, "read-only", "choose another")
        _refused(dflash(*words[:5], "--out", disk / "new"), 1, "read-only", "choose another")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_disk_that_fills_up_leaves_committed_shards_good(
    words: list[object], tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from dflash_tool.store import writer

    out, written = tmp_path / "store", 0
    write_all = writer.write_all

    def until_full(fd: int, data: memoryview) -> None:
        nonlocal written
        written += data.nbytes
        if written > 120_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(fd, data)

    small = ("--shard-mib", "0.05", "--batch-tokens", "128", "--buckets", "1")
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_all", until_full)
        _refused(dflash(*words, *small), 1, "No space left", "committed shards are kept")
    held = int(HiddenStore.open(out).committed.sum())
    assert 0 < held < 40
    done = dflash(*words, *small, "--json")
    assert json.loads(done.out)["held_samples"] == held
    assert dflash("stats", out, "--verify").code == 0


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("dflash_tool.target.head.save_file", SafetensorError),
        ("transformers.PreTrainedTokenizerFast.save_pretrained", Exception),
    ],
)
def test_a_disk_that_refuses_the_head(
    words: list[object], tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch, what: str, error: type[Exception]
) -> None:
    def full(*_: object) -> None:
        raise error("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(what, full)
        _refused(dflash(*words), 1, "can't write", "head", "No space left", "run the same command again")
    assert dflash(*words).code == 0
    assert dflash("stats", tmp_path / "store", "--verify").code == 0


def test_stats_of_what_is_no_store(tmp_path: Path, dflash: Run) -> None:
    _refused(dflash("stats", tmp_path), 1, "is no store")
    _refused(dflash("stats", tmp_path / "absent"), 1, "is no store")


def test_damage_is_named_and_made_again(words: list[object], tmp_path: Path, dflash: Run) -> None:
    out = tmp_path / "store"
    assert dflash(*words).code == 0
    rows = next((out / "shards").glob("b0-*/hidden/1/c/0/0"))
    original = rows.read_bytes()
    flipped = bytearray(original)
    flipped[10] ^= 4
    rows.write_bytes(flipped)
    said = dflash("stats", out, "--verify")
    assert said.code == 1
    assert str(rows) in "".join(said.out.split("\n"))
    document = json.loads(dflash("stats", out, "--verify", "--json").out)
    assert [(found["kind"], found["path"]) for found in document["damage"]] == [("rows", str(rows))]
    assert dflash(*words, "--verify").code == 0
    assert dflash("stats", out, "--verify").code == 0
