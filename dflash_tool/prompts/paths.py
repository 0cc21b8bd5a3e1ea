"""Names and patterns given as `--data` -> files that exist, each once."""

import glob
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from dflash_tool.errors import DataError
from dflash_tool.prompts.entries import TAKES

_WILD = re.compile(r"[*?\[]")


def find_files(names: Sequence[Path]) -> tuple[Path, ...]:
    """Each name that exists as it is, otherwise the sorted files that it matches as a pattern (`**`: any depth).

    Raises `DataError` for what is missing, a folder or unreadable, for a pattern that matches nothing, and
    for a file that comes twice (links to one file are that file): its samples would silently weigh double.
    """
    found: dict[tuple[int, int], tuple[Path, Path]] = {}
    for name in names:
        for path in _matches(name):
            status = _status(path)
            key = status.st_dev, status.st_ino
            if key in found:
                raise DataError(_twice(*found[key], path, name))
            found[key] = path, name
    return tuple(path for path, _ in found.values())


def check_files(paths: Sequence[Path]) -> list[int]:
    """Return the bytes of each. Raises `DataError` for what is missing, a folder or unreadable."""
    return [_status(path).st_size for path in paths]


def _matches(name: Path) -> list[Path]:
    if os.path.lexists(name) or not _WILD.search(str(name)):
        return [name]
    matches = sorted(glob.glob(str(name), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    paths = [path for path in map(Path, matches) if not path.is_dir()]
    if not paths:
        raise DataError(f"{name}: no file matches this pattern (looked from {Path.cwd()}); {TAKES}")
    return paths


def _status(path: Path) -> os.stat_result:
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder: {TAKES}; name the files in it, or a pattern such as '{path}/*.jsonl'")
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe that nobody writes to would wait for ever
            raise DataError(f"{path} is no regular file, and data are read more than once: write them to a file first")
        with path.open("rb") as file:
            return os.fstat(file.fileno())
    except FileNotFoundError:
        raise DataError(f"{path}: no such data file; {TAKES}") from None
    except OSError as error:
        raise DataError(f"{path}: can't read this data file: {error.strerror or error}") from error


def _twice(path: Path, name: Path, again: Path, name_again: Path) -> str:
    first, second = (str(p) if p == n else f"{p} (by {n})" for p, n in ((path, name), (again, name_again)))
    return f"the same data file is given twice, as {first} and as {second}: its rows would count double; name it once"
