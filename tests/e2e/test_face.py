"""The command line where nothing is ordinary: signals before a run begins, output that can't be written or encoded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .running import ENV, Store

DFLASH = [sys.executable, "-m", "dflash_tool"]
SIGNALS = pytest.mark.parametrize(
    ("signum", "said"), [(signal.SIGINT, "stopped by Ctrl-C."), (signal.SIGTERM, "stopped by SIGTERM.")]
)


def environment(modules: Path, **more: str) -> dict[str, str]:
    """The modules in that folder go before all others."""
    paths = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ENV, "PYTHONPATH": os.pathsep.join(paths), **more}


@pytest.mark.parametrize("words", ["--help", "--version", "extract --help", "extract --no-such-option"])
def test_help_imports_no_heavy_library(words: str) -> None:
    code = (
        "import atexit, sys\n"
        "heavy = ('torch', 'transformers', 'numpy', 'pyarrow')\n"
        "atexit.register(lambda: print(*(set(heavy) & set(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = ['dflash', *{words.split()}]\n"
        "from dflash_tool.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "no-such" in words else 0)
    assert done.stderr.endswith("\n")
    assert done.stderr.splitlines()[-1] == ""


@SIGNALS
@pytest.mark.parametrize("module", ["typer", "torch", "torch, which makes it an error of its own"])
def test_a_signal_during_imports(tmp_path: Path, module: str, signum: signal.Signals, said: str) -> None:
    name, _, turned = module.partition(",")
    line = f"import signal; signal.raise_signal({int(signum)})\n"
    if turned:
        line = f"try:\n    {line}except BaseException:\n    raise ImportError('broken') from None\n"
    (tmp_path / f"{name}.py").write_text(line)
    words = [*DFLASH, "extract", "--target", "t", "--data", "d", "--out", "o"]
    done = subprocess.run(words, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", f"dflash: {said}\n")


@SIGNALS
def test_a_signal_while_options_are_read(tmp_path: Path, signum: signal.Signals, said: str) -> None:
    """The settings come from a pipe: whoever opens its other end knows that they are being read."""
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    run = subprocess.Popen([*DFLASH, "extract", "--config", pipe], env=ENV, stderr=subprocess.PIPE, text=True)
    with pipe.open("w"):
        run.send_signal(signum)
        _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (128 + signum, f"dflash: {said}\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["stats", "STORE", "--verify"], ["stats", "STORE", "--json"]]
)
def test_a_full_disk_behind_the_output(finished: Store, words: list[str], unbuffered: str) -> None:
    words = [str(finished.out) if word == "STORE" else word for word in words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*DFLASH, *words], env=ENV | {"PYTHONUNBUFFERED": unbuffered}, stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("dflash: can't write the output: No space left on device")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["stats", "STORE"], ["stats", "STORE", "--json"]])
def test_a_reader_that_is_gone(finished: Store, words: list[str], unbuffered: str) -> None:
    words = [str(finished.out) if word == "STORE" else word for word in words]
    reader, writer = os.pipe()
    os.close(reader)
    environ = ENV | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run([*DFLASH, *words], env=environ, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""


def test_nobody_hears_of_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*DFLASH, "stats", tmp_path], env=ENV, stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize(
    "encoding",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=str,
)
def test_what_a_terminal_can_not_show_is_replaced(finished: Store, tmp_path: Path, encoding: dict[str, str]) -> None:
    done = subprocess.run([*DFLASH, "stats", finished.out], env=ENV | encoding, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"length, samples" in done.stdout
    missing = tmp_path / "東京"
    done = subprocess.run([*DFLASH, "stats", missing], env=ENV | encoding, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"is no store" in done.stderr
    assert b"Traceback" not in done.stderr
