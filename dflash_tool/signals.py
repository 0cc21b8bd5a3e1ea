"""Ctrl-C and SIGTERM as an error that the pipeline handles like any other.

Before and after the threads run, the signal raises `Interrupted` where the main thread is. While they run
(`forward_to`), it is handed to `abort` from a thread of its own: a signal handler may have interrupted a call
that holds a queue's lock. A second signal ends the process at once.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from dflash_tool.errors import Interrupted

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopSignals:
    """A context in which SIGINT and SIGTERM end the run in order (only in the main thread; elsewhere no effect)."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._abort: Callable[[BaseException], None] | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for signum in _NAMES:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def forward_to(self, abort: Callable[[BaseException], None]) -> Iterator[None]:
        """While the body runs, a signal calls `abort(Interrupted)` instead of raising."""
        self._abort = abort
        try:
            yield
        finally:
            self._abort = None

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        stopped = f"stopped by {_NAMES[signal.Signals(signum)]}."
        if self._abort is None:
            raise Interrupted(f"{stopped} Run the same command to go on.", signum)
        error = Interrupted(stopped, signum)
        threading.Thread(target=self._abort, args=(error,), name="stop", daemon=True).start()
