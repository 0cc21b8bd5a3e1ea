"""`dflash stats --verify` while `extract` writes that store, stopped at its most awkward moments."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_tool import pipeline
from dflash_tool.pipeline import extraction, targets
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.store import writer

from .running import Store

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
MOMENTS: dict[str, tuple[Any, str, Callable[[Path, Path], bool]]] = {
    # what to stop before, and which of its calls
    "the head is there, but not listed": (targets, "write_checksums", lambda _root, _path: True),
    "an index is there, but not its shard": (writer, "fsync_path", lambda root, path: path == root / "index"),
    "the last shard is there, but not said to be the last": (extraction, "complete", lambda _root, _plan: True),
}


@contextmanager
def stopped_at(moment: str, config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body runs while an extraction stands still there; then it goes on to its end."""
    module, name, this = MOMENTS[moment]
    inner, there, go_on = getattr(module, name), threading.Event(), threading.Event()

    def stop(first: Any, *rest: Any) -> Any:
        if not there.is_set() and this(config.out, first):
            there.set()
            assert go_on.wait(60)
        return inner(first, *rest)

    monkeypatch.setattr(module, name, stop)
    results: list[object] = []
    run = threading.Thread(target=lambda: results.append(pipeline.extract(config)), daemon=True)
    run.start()
    assert there.wait(60)
    try:
        yield
    finally:
        go_on.set()
        run.join(60)
    assert results


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_at_work_is_no_damage(
    finished: Store, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    config = ExtractConfig(
        target=str(finished.words[2]), data=(Path(str(finished.words[4])),), out=tmp_path / "store", layers=(1, 2)
    )
    with stopped_at(moment, config, monkeypatch):
        said = dflash("stats", config.out, "--verify")
        shown = " ".join(said.out.split())
        assert said.code == 0, said.out
        assert "of 60 samples so far, being written by run" in shown
        assert "every committed byte is as it was written" in shown
        assert "unfinished" not in shown
        document = json.loads(dflash("stats", config.out, "--verify", "--json").out)
        assert document["damage"] == []
        assert document["at_work"].startswith("run ")
    said = dflash("stats", config.out, "--verify")
    assert said.code == 0
    assert "complete" in said.out
    assert json.loads(dflash("stats", config.out, "--json").out)["at_work"] is None


def test_committed_damage_beside_a_run(
    finished: Store, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExtractConfig(
        target=str(finished.words[2]), data=(Path(str(finished.words[4])),), out=tmp_path / "store", layers=(1, 2)
    )
    with stopped_at("the last shard is there, but not said to be the last", config, monkeypatch):
        rows = next(config.out.glob("shards/b0-*/hidden/1/c/0/0"))
        good = rows.read_bytes()
        rows.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        said = dflash("stats", config.out, "--verify", "--json")
        assert said.code == 1
        assert [found["path"] for found in json.loads(said.out)["damage"]] == [str(rows)]
        rows.write_bytes(good)


def test_a_store_that_is_still_prepared(tmp_path: Path, dflash: Run) -> None:
    from dflash_tool.store.lock import RunLock

    with RunLock(tmp_path / "store") as lock:
        for words in ([], ["--verify"]):
            said = dflash("stats", tmp_path / "store", *words)
            assert said.code == 1
            assert f"run {lock.holder.run_id} on" in said.err
            assert "nothing is committed yet" in said.err
