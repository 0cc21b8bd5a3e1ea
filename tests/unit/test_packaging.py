"""The package list in pyproject.toml is what lies on disk; nothing is importable under a bare name."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_packages_are_those_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "dflash_tool").rglob("__init__.py")
    } | {f"dflash_tool.{name}" for name in ("commands", "schemas")}  # rglob does not follow the links everywhere
    assert sorted(listed) == sorted(on_disk)


def test_symlinks_are_committed_as_links() -> None:
    for name in ("commands", "schemas"):
        link = ROOT / "dflash_tool" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
