"""`python tests/check_wheel.py DIST`: the wheel in DIST, built from the sdist, holds exactly the package's files.

Every git-tracked file of `dflash_tool/`, `commands/` and `schemas/` must be in the wheel under `dflash_tool/`, and
nothing else beside the metadata. Then the wheel is installed into an empty folder and imported from there.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tracked_files() -> set[str]:
    """What must be inside, as names in the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "dflash_tool", "commands", "schemas"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    links = {"dflash_tool/commands", "dflash_tool/schemas"}
    return {
        name if name.startswith("dflash_tool/") else f"dflash_tool/{name}"
        for name in listed
        if name not in links and Path(ROOT / name).is_file()
    }


def main(dist: Path) -> None:
    """Compare, install, import; exits with a message at the first difference."""
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if ".dist-info/" not in name}
    expected = tracked_files()
    if inside != expected:
        sys.exit(f"{wheel.name}: missing {sorted(expected - inside)}, extra {sorted(inside - expected)}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        sys.exit(f"{wheel.name}: no LICENSE")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, str(wheel)],
            check=True,
        )
        shown = subprocess.run(
            [sys.executable, "-m", "dflash_tool", "--version"],
            cwd=folder, env={"PYTHONPATH": folder, "PATH": ""}, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    print(f"{wheel.name}: {len(inside)} files, as tracked; installed alone it says: {shown.strip()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
