"""What isn't ours is never touched, what is missing is never called complete, and signals end a run in any phase."""

import json
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tool import pipeline
from dflash_tool.errors import StoreError
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.store.manifest import read_manifest, write_manifest
from tests.warm import Warm

from .running import Store, contents, extract_words, wait_until

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("samples.arrow", b"years of work"),
        ("manifest.json", b"{ // a web app"),
        ("manifest.json", b'{"name": "a web app"}'),
        ("head/precious.txt", b"years of work"),
        ("shards/x", b"years of work"),
    ],
)
def test_somebody_else_s_files_of_our_names(
    finished: Store, tmp_path: Path, dflash: Run, name: str, content: bytes
) -> None:
    words = finished.words
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    before = _files(tmp_path)
    refused = dflash(*words, "--out", tmp_path / "out")
    assert refused.code == 1, refused.out
    assert "Traceback" not in refused.err
    assert _files(tmp_path) == before


@pytest.mark.parametrize("harm", ["gone", "empty", "cut"])
def test_a_store_without_its_head_is_not_complete(copied: Store, dflash: Run, harm: str) -> None:
    """Seen, and mended, also without --verify."""
    words, out = copied
    head = out / "head" / "head.safetensors"
    content = head.read_bytes()
    if harm == "gone":
        head.unlink()
    else:
        head.write_bytes(b"" if harm == "empty" else content[:-1])
    assert dflash("stats", out, "--verify").code == 1
    assert dflash(*words, "--out", out).code == 0
    assert head.read_bytes() == content
    assert dflash("stats", out, "--verify").code == 0


def test_a_link_in_the_head_is_mended(copied: Store, tmp_path: Path, dflash: Run) -> None:
    words, out = copied
    (tmp_path / "elsewhere").write_text("not ours")
    (out / "head" / "x.json").symlink_to(tmp_path / "elsewhere")
    assert dflash("stats", out, "--verify").code == 1
    assert dflash(*words, "--out", out, "--verify").code == 0
    assert dflash("stats", out, "--verify").code == 0
    assert (tmp_path / "elsewhere").read_text() == "not ours"


def test_a_manifest_that_counts_wrong_is_made_again(finished: Store, copied: Store, dflash: Run) -> None:
    words, out = copied
    manifest = read_manifest(out)
    write_manifest(out, manifest.model_copy(update={"samples": manifest.samples - 1}))
    assert dflash("stats", out, "--verify").code == 1
    assert dflash(*words, "--out", out, "--verify").code == 0
    assert read_manifest(out).samples == manifest.samples
    assert contents(out) == contents(finished.out)


def test_a_refused_run_leaves_the_samples_of_a_store_without_manifest(
    finished: Store, copied: Store, dflash: Run
) -> None:
    words, out = copied
    (out / "manifest.json").write_text("{")
    before = _files(out)
    assert dflash(*words, "--out", out, "--max-length", "50").code == 1
    assert _files(out) == before
    assert dflash(*words, "--out", out).code == 0
    assert contents(out) == contents(finished.out)


def test_the_run_that_is_refused_leaves_the_other_one_its_folder(
    finished: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs begin at once on a new folder: the second finds the lock, and removes nothing."""
    from dflash_tool.pipeline import extraction

    words = finished.words
    config = ExtractConfig(target=str(words[2]), data=(Path(str(words[4])),), out=tmp_path / "store", layers=(1,))
    holds, go_on = threading.Event(), threading.Event()
    inner = extraction._extract

    def wait_first(*args: object) -> object:
        holds.set()
        assert go_on.wait(60)
        return inner(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(extraction, "_extract", wait_first)
    results: list[object] = []
    first = threading.Thread(target=lambda: results.append(pipeline.extract(config)), daemon=True)
    first.start()
    assert holds.wait(60)
    with pytest.raises(StoreError, match="is being written"):
        pipeline.extract(config)
    go_on.set()
    first.join(60)
    assert len(results) == 1
    assert read_manifest(tmp_path / "store").complete


def test_data_may_move(copied: Store, tmp_path: Path, dflash: Run) -> None:
    words, out = copied
    shutil.copy(str(words[4]), tmp_path / "moved.jsonl")
    done = dflash(*words[:3], "--data", tmp_path / "moved.jsonl", *words[5:], "--out", out)
    assert "Nothing to do" in done.out


def test_names_are_no_markup(finished: Store, tmp_path: Path, dflash: Run) -> None:
    words = finished.words
    target = tmp_path / "bra[/b] we[red]ird"
    shutil.copytree(str(words[2]), target)
    done = dflash("extract", "--target", target, *words[3:], "--out", tmp_path / "store")
    assert done.code == 0
    assert "we[red]ird" in done.out.replace("\n", "").replace(" ", "").replace("weird", "")
    assert dflash("stats", tmp_path / "store").code == 0


@pytest.mark.parametrize(
    "changed", [{"planned_padded_tokens": 0}, {"quarantined": ["zz"]}, {"samples": 0}, {"edges": [-1]}]
)
def test_hostile_manifests(finished: Store, copied: Store, dflash: Run, changed: dict[str, object]) -> None:
    """With a right checksum: still refused or found, never a traceback."""
    from dflash_tool.store import manifest as store_manifest

    words, out = copied
    fields = json.loads((out / "manifest.json").read_text())
    fields.pop("xxh3")
    fields |= changed
    fields["xxh3"] = store_manifest._checksum(fields)
    (out / "manifest.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
    for command in (["stats", out], ["stats", out, "--verify"], [*words, "--out", out]):
        result = dflash(*command)
        assert "Traceback" not in result.err
    assert dflash("stats", out, "--verify").code == 0
    assert contents(out) == contents(finished.out)


@pytest.mark.parametrize("option", ["--inflight-gib", "--shard-mib", "--commit-every"])
def test_numbers_that_are_none(finished: Store, tmp_path: Path, dflash: Run, option: str) -> None:
    words = finished.words
    for value in ("inf", "nan", "1e-9"):
        result = dflash(*words, "--out", tmp_path / "store", option, value)
        assert "Traceback" not in result.err
        assert result.code == 2 or option == "--commit-every"


def test_a_signal_while_the_target_loads(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm
) -> None:
    """The most likely moment for a big target: still 143, and how to go on."""
    out = tmp_path / "store"
    words = extract_words(random_target(), token_rows(40), out)
    # As soon as the manifest is there the target is being loaded.
    run = warm.start(words)
    wait_until(run, (out / "manifest.json").exists)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    if run.returncode != 0:  # a target this small may have been faster than the signal
        assert run.returncode == 143, err
        assert "Run the same command to go on" in err or "run the same command to go on" in err
    assert "Traceback" not in err
    warm.start(words).end()
    assert read_manifest(out).complete
    assert (out / "head" / "head.safetensors").stat().st_mode & 0o444 == 0o444
