"""The `dflash` command line, from its first import to its last byte of output.

However it ends, the user sees one message and an exit code: a signal while the libraries are still being imported, an
error of ours, output that can't be written. Until `main` has taken the signals over, next to nothing is imported.
"""

import io
import os
import sys
from typing import TextIO

from dflash_tool.errors import DflashError, Interrupted
from dflash_tool.signals import StopSignals


def main() -> None:
    """Run the command that `sys.argv` names and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal in latin-1 gets ? where it has no such character
    sys.exit(_written(_run()))


def _run() -> int:
    signals = StopSignals(remedy="")
    try:
        with signals:
            from dflash_tool.commands.app import app

            app(prog_name="dflash")  # also as `python -m dflash_tool`
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        # What a signal raises in the middle of an import may come out as an error of whoever imported.
        told = signals.stopped or error
        if isinstance(told, DflashError | Interrupted):
            return _say(str(told), told.exit_code)
        if isinstance(error, OSError) and _written(0, "\n"):  # output was refused, as it is once more
            return 1
        raise
    return 0


def _written(code: int, last: str = "") -> int:
    """The exit code once all output is written: not 0 where it can't be, which is said unless a pipe was closed."""
    try:
        if sys.stdout is not None:
            sys.stdout.write(last)
            sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            _say(f"can't write the output: {error.strerror or error}; free some space, or send it elsewhere", 1)
        return code or 1
    return code


def _say(text: str, code: int) -> int:
    """One message on stderr, in red if it is a failure; returns the exit code."""
    text = f"dflash: {text}"
    if sys.stderr is None:
        return code
    if sys.stderr.isatty() and code < 128 and "NO_COLOR" not in os.environ:
        text = f"\x1b[31m{text}\x1b[0m"
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere: Python would try to write it when it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
