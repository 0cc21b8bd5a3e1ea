"""Runs as their folders tell them: whole, at work, killed, damaged; what waited; the page and the summary."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dflash_tool.errors import DflashError
from dflash_tool.report.run_page import run_page
from dflash_tool.report.runs import Run, differing, read_run
from dflash_tool.report.summary import facts, median, runs_json, slots
from dflash_tool.report.waits import fills, parts, waits
from dflash_tool.store.lock import RunLock

from .report_kit import checked, make_run, train_row, validation_row

ROWS = [validation_row(0, 1.0), *(train_row(step) for step in range(1, 11)), validation_row(10, 1.5)]


def live_row(step: int, *, waiting: float, computing: float, queued: int, **more: Any) -> dict[str, Any]:
    target = {"tokens": 10 * step, "padded_tokens": 11 * step, "computing": computing, "waiting": waiting, "idle": 0.0}
    return train_row(
        step, targets={"target 0 on cpu": target}, inflight_bytes=50 * queued, inflight_limit_bytes=1000,
        queued={"0": queued, "1": queued}, **more,
    )  # fmt: skip


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", ROWS))
    assert run.series("loss") == [(float(step), 8.0 / (step + 1)) for step in range(1, 11)]
    assert run.series("walk_tau", "validation") == [(0.0, 1.0), (10.0, 1.5)]
    assert run.buckets == [0, 1]
    assert run.mix(0) == [(float(step), 5 / 8) for step in range(1, 11)]
    assert run.tau(1) == [(0.0, 0.8), (10.0, 1.3)]
    assert run.best == (10, 1.5)
    assert slots(run) == (10, [(1, 0.5, 0.5), (2, 0.25, 0.2), (3, 0.2, 0.1)])
    assert (run.step, run.total, run.saved, run.notes) == (10, 100, None, ())
    assert run.state == "stopped at step 10 of 100; it has no checkpoint"
    assert run.bucket_name(1) == "bucket 1"


def test_states(tmp_path: Path) -> None:
    killed = make_run(tmp_path / "killed", ROWS)
    state = killed / "checkpoints" / "last" / "state.json"
    state.parent.mkdir(parents=True)
    for step, at in ((7, 10), (12, 12)):  # rows are rarer than steps
        state.write_text(f'{{"step": {step}, "total_steps": 100}}')
        assert read_run(killed).state == f"stopped at step {at} of 100; its newest checkpoint is of step {step}"
    state.write_text('{"step": 7, "total_steps": 100}')
    assert read_run(killed).state == "stopped at step 10 of 100; its newest checkpoint is of step 7"
    with RunLock(killed):
        running = read_run(killed)
        assert running.state == "running: step 10 of 100"
        assert running.at_work
        assert "running: step 10 of 100" in checked(run_page([running])).words
    finished = make_run(tmp_path / "finished", [*ROWS, train_row(100)])
    assert read_run(finished).state == "finished: 100 steps"
    begun = make_run(tmp_path / "begun", [validation_row(0, 1.0)])
    with RunLock(begun):
        assert read_run(begun).state == "running: no step logged yet"
    empty = make_run(tmp_path / "empty", [])
    (empty / "metrics.jsonl").unlink()
    assert read_run(empty).state == "stopped before its first step was logged"


@pytest.mark.parametrize("rows", [[], [validation_row(0, 1.0)], [train_row(1)], [train_row(1), train_row(2)]])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    run = read_run(make_run(tmp_path / "run", rows))
    page = checked(run_page([run]))
    assert ("nothing to draw" in page.words) == (not rows)
    assert ("Loss" in page.figures) == any(row["kind"] == "train" for row in rows)
    assert ("Tau by slot" in page.figures) == any(row["kind"] == "validation" for row in rows)
    json.dumps(runs_json([run]), allow_nan=False)


def test_damaged_files_are_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ROWS)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    lines[3:5] = [b"\xff\xfe broken", b"[1, 2]", b'{"kind": "other", "step": 1}', b'{"kind": "train", "step": "x"}']
    metrics.write_bytes(b"\n".join(lines) + b'\n{"kind": "train", "st')
    (folder / "train.yaml").write_text("- no\n- settings")
    state = folder / "checkpoints" / "last" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{")
    run = read_run(folder)
    assert run.notes == (
        f"{folder / 'train.yaml'} is damaged", f"4 lines of {metrics} can't be read; they are left out",
        f"{state} is damaged",
    )  # fmt: skip
    assert [row["step"] for row in run.train] == [1, 2, 5, 6, 7, 8, 9, 10]
    words = checked(run_page([run])).words
    assert all(note in words for note in run.notes)


@pytest.mark.parametrize(
    "value", [None, "text", [], {}, {"0": "x"}, {"0": None}, {"x": 1}, float("nan"), float("inf"), True, -1]
)
def test_fields_of_another_kind_harm_nothing(tmp_path: Path, value: Any) -> None:
    fields = [*train_row(1), "targets", "queued", "inflight_bytes", "inflight_limit_bytes"]
    graded = list(validation_row(0, 1.0))
    rows = [
        train_row(1),
        *(train_row(step, **{name: value}) for step, name in enumerate(fields, 2) if name not in {"kind", "step"}),
    ]
    rows += [
        {**validation_row(step, 1.0), name: value} for step, name in enumerate(graded) if name not in {"kind", "step"}
    ]
    run = read_run(make_run(tmp_path / "run", rows))
    checked(run_page([run]))
    facts(run)
    json.dumps(runs_json([run]), allow_nan=False)


def test_what_is_no_run_is_refused_in_words(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "none", "there is no such folder"), (tmp_path, "is no run: it has no train.yaml")):
        with pytest.raises(DflashError, match=said):
            read_run(folder)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DflashError, match=r"is a store: look at it with `dflash stats"):
        read_run(tmp_path)


def test_waits_are_differences_and_begin_anew_after_a_resume(tmp_path: Path) -> None:
    rows = [
        live_row(1, waiting=1.0, computing=3.0, queued=2),
        live_row(2, waiting=2.0, computing=4.0, queued=8),
        live_row(3, waiting=0.5, computing=1.5, queued=4),  # another process
        live_row(4, waiting=0.5, computing=3.5, queued=0),
    ]
    run = read_run(make_run(tmp_path / "run", rows, live=True))
    drafter, target = waits(run)
    assert (drafter.name, target.name) == ("drafter 0, for data", "target 0 on cpu, for batches")
    assert drafter.points == [(float(step), 1 / 8) for step in range(1, 5)]
    assert target.points == [(1.0, 0.25), (2.0, 0.5), (3.0, 0.25), (4.0, 0.0)]
    assert (target.waited, target.whole) == (2.5, 10.0)
    queue, window = fills(run)
    assert queue.points == [(1.0, 4 / 16), (2.0, 1.0), (3.0, 8 / 16), (4.0, 0.0)]
    assert queue.most == 16
    assert window.points == [(1.0, 0.1), (2.0, 0.4), (3.0, 0.2), (4.0, 0.0)]
    page = checked(run_page([run]))
    assert [row[0] for row in page.tables["Who waited"][1:]] == [drafter.name, target.name]
    assert page.tables["Who waited"][2][2] == "25.0 %"
    assert page.tables["Queue and window"][1] == ["queue", "16", "7", "16", "0"]


def test_time_by_part_is_the_whole_time(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", ROWS))
    found = parts(run)
    assert [name for name, *_ in found] == ["data", "forward", "backward", "between steps"]
    assert math.fsum(seconds for *_, seconds in found) == pytest.approx(100.0)
    assert [share for _, points, _ in found for _, share in points[:1]] == pytest.approx([0.1, 0.3, 0.4, 0.2])


PICTURES = {
    "Loss", "Tau", "Speed", "Memory", "Learning rate", "Gradient norm", "Tau by slot", "Tau by bucket",
    "Mix of lengths in each step", "Where the time went", "Who waited",
}  # fmt: skip


def test_the_page_has_every_picture_with_its_numbers(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", ROWS, store=["nowhere"]))
    page = checked(run_page([run]))
    assert page.figures == dict.fromkeys(PICTURES, 1)
    assert [row[0] for row in page.tables["Loss"][1:]] == [str(step) for step in range(1, 11)]
    assert page.tables["Loss"][1] == ["1", "4"]
    assert page.tables["Tau"] == [["step", "walk tau", "anchor tau"], ["0", "1.00", "1.10"], ["10", "1.50", "1.60"]]
    assert page.tables["Tau by slot"][1:] == [
        ["slot 1", "50 %", "50 %"], ["slot 2", "20 %", "25 %"], ["slot 3", "10 %", "20 %"],
    ]  # fmt: skip
    assert page.tables["Mix of lengths in each step"][1] == ["bucket 0", "62.5 %", "62.5 %", "62.5 %"]
    assert ["seed", "0"] in page.tables["Resolved settings"]


def test_several_runs_share_pictures_and_say_what_differs(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a" / "run", ROWS, gamma=1.0)
    second = make_run(tmp_path / "b" / "run", [train_row(step, loss=1.0) for step in (5, 15)], gamma=4.0, extra=1)
    runs = [read_run(first), read_run(second)]
    assert differing(runs) == [("gamma", ("1.0", "4.0"))]
    page = checked(run_page(runs))
    assert page.tables["Settings"] == [["setting", str(first), str(second)], ["gamma", "1.0", "4.0"]]
    losses = {row[0]: row[1:] for row in page.tables["Loss"]}
    assert losses["5"] == ["1.333", "1"]
    assert (losses["15"], losses["10"]) == (["", "1"], ["0.7273", ""])
    assert page.figures["Loss"] == 1
    assert page.figures["Mix of lengths in each step"] == 2
    assert runs_json(runs)["differing"] == {"gamma": ["1.0", "4.0"]}
    same = [read_run(first), read_run(first)]
    assert "the same settings" in checked(run_page(same)).words


def test_names_can_not_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)<b onclick='x'>&amp;\""
    rows = [live_row(1, waiting=1, computing=1, queued=1), validation_row(1, 1.0)]
    drafters = {evil: {"compute": 1.0, "data": 1.0}}
    row = rows[0] | {"drafters": drafters, "targets": {evil: {"computing": 1, "waiting": 1}}}
    settings: dict[str, Any] = {"store": [evil, "<img src=x>"], "<b>": "</style><script>"}
    folder = make_run(tmp_path / evil, [row, rows[1]], **settings)
    run = read_run(folder)
    for page in (checked(run_page([run])), checked(run_page([run, run]))):
        assert evil in page.words
        assert "</style><script>" in page.words


def test_a_long_run_has_a_page_of_bounded_size(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", [train_row(step) for step in range(1, 3001)]))
    text = run_page([run])
    assert len(text) < 400_000
    page = checked(text)
    assert len(page.tables["Loss"]) == 61
    assert page.tables["Loss"][1][0] == "1"
    assert page.tables["Loss"][-1][0] == "3,000"


def test_the_median() -> None:
    assert median([(0, 3.0), (1, math.nan), (2, 1.0), (3, 2.0)]) == 2.0
    assert median([(0, 3.0), (1, 1.0)]) == 2.0
    assert median([(0, math.inf)]) is None


def test_every_fact_is_said_once(tmp_path: Path) -> None:
    run: Run = read_run(make_run(tmp_path / "run", ROWS))
    said = dict(facts(run))
    assert said["loss"] == "4.000 at step 1, 0.727 at the end"
    assert said["walk tau"] == "1.00 at first, 1.50 last, best 1.50 at step 10"
    assert said["speed"] == "106 context tokens/s (median)"
    assert said["time"] == "data 10 %, forward 30 %, backward 40 %, between steps 20 %"
    assert said["waited"] == "drafter 0, for data 12.5 %"
