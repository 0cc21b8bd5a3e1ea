"""Names and patterns -> files, each once."""

import os
from pathlib import Path

import pytest

from dflash_tool.errors import DataError
from dflash_tool.prompts import check_files, find_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub" / "deep.jsonl").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "c.parquet", "sub/a.jsonl", "sub/deep.jsonl/x.jsonl", "x[1].jsonl"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_patterns(folder: Path) -> None:
    def found(*names: str) -> list[str]:
        return [str(path.relative_to(folder)) for path in find_files([folder / name for name in names])]

    assert found("[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert found("c.parquet", "?.jsonl") == ["c.parquet", "a.jsonl", "b.jsonl"]
    assert found("sub/**/*.jsonl") == ["sub/a.jsonl", "sub/deep.jsonl/x.jsonl"]
    assert found("x[1].jsonl") == ["x[1].jsonl"], "a name that exists is no pattern"


def test_a_relative_pattern(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert find_files([Path("*.parquet"), Path("sub/*.jsonl")]) == (Path("c.parquet"), Path("sub/a.jsonl"))


def test_nothing_matches(folder: Path) -> None:
    for pattern in ("*.csv", "su*", "nowhere/*.jsonl"):
        with pytest.raises(DataError, match="no file matches this pattern"):
            find_files([folder / "a.jsonl", folder / pattern])


def test_the_same_file_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=r"given twice, as a\.jsonl and as a\.jsonl \(by \*\.jsonl\)"):
        find_files([Path("a.jsonl"), Path("*.jsonl")])
    with pytest.raises(DataError, match="given twice"):
        find_files([Path("a.jsonl"), folder / "a.jsonl"])
    (folder / "link").symlink_to("b.jsonl")
    os.link(folder / "b.jsonl", folder / "hard")
    for name in ("link", "hard"):
        with pytest.raises(DataError, match=f"given twice, as b.jsonl and as {name}"):
            find_files([Path("b.jsonl"), Path(name)])


def test_files_that_are_none(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for check in (check_files, find_files):
        with pytest.raises(DataError, match="no such data file"):
            check([folder / "missing.jsonl"])
        with pytest.raises(DataError, match=r"is a folder.*\*\.jsonl"):
            check([folder / "sub"])
        with pytest.raises(DataError, match="can't read"):
            check([folder / "a.jsonl" / "below-a-file"])
        with pytest.raises(DataError, match=r"pipe is no regular file.*write them to a file"):
            check([folder / "pipe"])
    (folder / "dangling.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"dangling\.jsonl: no such data file"):
        find_files([folder / "*.jsonl"])
    assert check_files([folder / "a.jsonl", folder / "c.parquet"]) == [7, 9]
