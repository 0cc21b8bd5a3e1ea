"""`dflash report`, and `dflash stats` with pages and several stores: as commands, on a real store and a real run."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.unit.report_kit import checked

from .running import ENV, Store, small_run


class Ran(NamedTuple):
    """What the command line gave back."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def trained(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run of a few steps, beside its store."""
    folder = tmp_path_factory.mktemp("trained")
    return small_run(random_target(), token_rows(60), folder, log_every=1, val_every=2)


def test_a_run_in_the_terminal_as_json_and_as_a_page(trained: Path, tmp_path: Path, dflash: Run) -> None:
    shown = dflash("report", trained)
    assert (shown.code, shown.err) == (0, "")
    for said in (str(trained), "finished: 4 steps", "walk tau", "from a store", "slot", "bucket"):
        assert said in shown.out
    printed = dflash("report", trained, "--json")
    document = json.loads(printed.out)["runs"][0]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert document["last_validation"] == [row for row in rows if row["kind"] == "validation"][-1]
    assert document["last_loss"] == [row for row in rows if row["kind"] == "train"][-1]["loss"]
    assert document["config"] == yaml.safe_load((trained / "train.yaml").read_text())
    assert (document["step"], document["total_steps"], document["checkpoint_step"]) == (4, 4, 4)
    page = tmp_path / "run.html"
    assert dflash("report", trained, "--html", page).out == f"Wrote {page}\n"
    found = checked(page.read_text())
    assert len(found.figures) == 11
    assert len(found.tables["Loss"]) == 5
    edges = json.loads((trained.parent / "store" / "manifest.json").read_text())["edges"]
    assert found.tables["Tau by bucket"][0][1] == f"0: 1-{edges[0]}"


def test_accepted_slots_make_up_anchor_tau(trained: Path) -> None:
    """In blocks that are counted whole; the short ones at the end of an answer have fewer slots, so nearly."""
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    (*_, row) = [row for row in rows if row["kind"] == "validation"]
    pairs = zip(row["accepted_by_slot"], row["accuracy_by_slot"], strict=True)
    assert all(0 <= accepted <= right <= 1 for accepted, right in pairs)
    assert row["accepted_by_slot"][0] == row["accuracy_by_slot"][0]
    assert 1 + sum(row["accepted_by_slot"]) >= row["anchor_tau"]


def test_a_report_starts_without_torch(trained: Path, tmp_path: Path) -> None:
    words = (
        ["report", str(trained), "--html", str(tmp_path / "run.html")],
        ["stats", str(trained.parent / "store"), "--html", str(tmp_path / "store.html")],
    )
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr))\n"
        "sys.argv = ['dflash', *sys.argv[1:]]\n"
        "from dflash_tool.cli import main\n"
        "main()"
    )
    for each in words:
        done = subprocess.run([sys.executable, "-c", code, *each], env=ENV, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.strip()) == (0, "")


def test_stores_side_by_side(finished: Store, store: Path, tmp_path: Path, dflash: Run) -> None:
    shown = dflash("stats", finished.out, store)
    assert (shown.code, shown.err) == (0, "")
    assert "Samples that all of them have, by content: 60" in " ".join(shown.out.split())
    marked = [line for line in shown.out.splitlines() if line.startswith("* ")]
    assert any(line.split()[1] == "layers" for line in marked)
    document = json.loads(dflash("stats", finished.out, store, "--json").out)
    assert document["stores"] == [json.loads(dflash("stats", each, "--json").out) for each in (finished.out, store)]
    assert document["common_samples"] == 60  # the data of one begin with those of the other
    differing = {fact["name"] for fact in document["facts"] if fact["differs"]}
    assert {"layers", "samples"} <= differing
    assert "hidden size" not in differing
    page = tmp_path / "both.html"
    assert dflash("stats", finished.out, store, "--html", page).code == 0
    assert set(checked(page.read_text()).figures.values()) == {2}
    assert json.loads(dflash("stats", finished.out, finished.out, "--json").out)["common_samples"] == 60


def test_damage_is_told_of_each_store(finished: Store, copied: Store, tmp_path: Path, dflash: Run) -> None:
    file = next((copied.out / "shards").rglob("c/0/0"))
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    page = tmp_path / "store.html"
    shown = dflash("stats", finished.out, copied.out, "--verify", "--html", page)
    assert shown.code == 1
    assert "Verified: every byte is as it was written." in shown.out
    assert "Damaged: 1 finding" in shown.out
    assert "Damaged: 1 finding" in checked(page.read_text()).words
    document = json.loads(dflash("stats", finished.out, copied.out, "--verify", "--json").out)
    assert [len(each["damage"]) for each in document["stores"]] == [0, 1]


@pytest.mark.parametrize("command", ["report", "stats"])
def test_a_page_that_can_not_be_written(trained: Path, tmp_path: Path, dflash: Run, command: str) -> None:
    source = trained if command == "report" else trained.parent / "store"
    for file, said in ((tmp_path, "is a folder"), (tmp_path / "none" / "x.html", "there is no folder")):
        done = dflash(command, source, "--html", file)
        assert done.code == 2
        assert done.err.startswith("dflash: --html: ")
        assert said in done.err
    old = tmp_path / "old.html"
    old.write_text("older")
    assert dflash(command, source, "--html", old).code == 0
    assert old.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [old]


def test_what_is_no_run(finished: Store, tmp_path: Path, dflash: Run) -> None:
    done = dflash("report", finished.out)
    assert (done.code, done.err) == (
        1, f"dflash: {finished.out} is a store: look at it with `dflash stats {finished.out}`\n",
    )  # fmt: skip
    assert "there is no such folder" in dflash("report", tmp_path / "none").err
    assert dflash("report").code == 2


@pytest.mark.parametrize("columns", ["60", "80", "160"])
def test_nothing_is_cut(trained: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    store = trained.parent / "store"
    for words in (["report", trained, trained], ["stats", store, store]):
        shown = dflash(*words).out
        assert max(map(len, shown.splitlines())) <= int(columns)
        assert "…" not in shown
        assert "\x1b" not in shown  # piped: no colour
