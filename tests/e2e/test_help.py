"""Help as a page, completion, and what a typo is told."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from .running import ENV

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
COMMANDS = ("extract", "train", "live", "stats", "report", "eval", "export")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_of_help(dflash: Run, monkeypatch: pytest.MonkeyPatch, command: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = dflash(command, "--help")
    assert shown.code == 0
    assert shown.out.startswith(("\n", " "))
    assert f"Usage: dflash {command}" in shown.out
    assert f"Example: dflash {command}" in shown.out
    assert "Exit codes: 0 done, 1 could not be done" in shown.out
    assert "<bool>" not in shown.out
    assert "…" not in shown.out
    assert max(map(len, shown.out.splitlines())) <= columns
    assert re.search(r"--help +Show this message and exit\. +│\n╰─+╯\n +\n Exit codes", shown.out), "--help comes last"


def test_panels_of_live_are_those_of_extract_and_train(dflash: Run) -> None:
    pages = {name: dflash(name, "--help").out for name in ("extract", "train", "live")}
    panels = {name: re.findall(r"^╭─ (.+?) ─+╮$", page, re.MULTILINE) for name, page in pages.items()}
    options = {name: re.findall(r"^│ (--[a-z-]+)", page, re.MULTILINE) for name, page in pages.items()}
    assert panels["live"] == [
        "Input", "Target", "Drafter", "Loss", "Optimizer steps", "Batches and memory", "Shards", "Run",
    ]  # fmt: skip
    assert set(panels["live"]) == {*panels["extract"], *panels["train"]} - {"Reading"}
    for name, listed in options.items():
        assert len(listed) == len(set(listed)), f"an option of {name} is listed twice"
    of_stores = {"--store", "--weight", "--follow", "--loader-threads", "--verify-reads"}
    assert {*options["live"]} == {*options["extract"], *options["train"], "--tee", "--max-steps-ahead"} - of_stores


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train", "--stor", "x"], "No such option: --stor. Did you mean --store?"),
        (["extract", "--bucket", "6"], "No such option: --bucket. Did you mean --buckets?"),
        (["live", "--drafter-devices", "cpu"], "No such option: --drafter-devices. Did you mean --drafter-device?"),
        (["stats", "x", "--verfy"], "No such option: --verfy. Did you mean --verify?"),
        (["--verson"], "No such option: --verson. Did you mean --version?"),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train", "--qqqqqq"], "No such option: --qqqqqq "),
    ],
)
def test_a_typo_is_told_what_was_meant(dflash: Run, words: list[str], meant: str) -> None:
    refused = dflash(*words)
    assert (refused.code, refused.out) == (2, "")
    assert meant in refused.err
    assert "--help' for help" in refused.err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("dflash tr", {"train"}),
        ("dflash train --st", {"--store"}),
        ("dflash live --max-", {"--max-length", "--max-steps", "--max-steps-ahead", "--max-bad"}),
        ("dflash extract --overlength ", {"truncate", "skip"}),
    ],
)
def test_completion(typed: str, offered: set[str]) -> None:
    """As a shell asks for it: the words so far, and which one is being typed; torch stays away."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr))\n"
        "sys.argv = ['dflash']\n"
        "from dflash_tool.cli import main\n"
        "main()"
    )
    asked = {"_DFLASH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = subprocess.run([sys.executable, "-c", code], env=ENV | asked, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == offered
    assert done.stderr.strip() == ""


def test_the_script_for_a_shell() -> None:
    words = [sys.executable, "-m", "dflash_tool", "--show-completion", "bash"]
    environment = {**os.environ, **ENV, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "_DFLASH_COMPLETE=complete_bash" in done.stdout
    assert done.stdout.rstrip().endswith("dflash")
