"""Ctrl-C and SIGTERM as an error that the pipeline handles like any other.

Before and after the threads run, the signal raises `Interrupted` where the main thread is. While they run
(`forward_to`), it is handed to `abort` from a thread of its own: a signal handler may have interrupted a call
that holds a queue's lock. A second signal ends the process at once.

Python swallows what is raised while some object's `__del__` runs (it calls `sys.unraisablehook` and goes on), and
that may be where the signal finds the main thread. The hook then has the signal delivered once more.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from dflash_tool.errors import Interrupted

_AGAIN_AFTER = 0.01
"""Seconds after which a swallowed signal is sent again: time enough to leave the `__del__` that swallowed it."""

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopSignals:
    """A context in which SIGINT and SIGTERM end the run in order (only in the main thread; elsewhere no effect).

    remedy: what the message says after "stopped by ...". `stopped`: what was raised, where others may swallow it.
    """

    def __init__(self, remedy: str = "Run the same command to go on.") -> None:
        self.stopped: Interrupted | None = None
        self._remedy = remedy
        self._before: dict[int, Any] = {}
        self._abort: Callable[[BaseException], None] | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for signum in _NAMES:
                self._before[signum] = signal.signal(signum, self._handle)
            self._hook = sys.unraisablehook
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._before:
            sys.unraisablehook = self._hook

    @contextmanager
    def forward_to(self, abort: Callable[[BaseException], None]) -> Iterator[None]:
        """While the body runs, a signal calls `abort(Interrupted)` instead of raising."""
        self._abort = abort
        try:
            yield
        finally:
            self._abort = None

    def _unraisable(self, swallowed: "sys.UnraisableHookArgs") -> None:
        error = swallowed.exc_value
        if not isinstance(error, Interrupted):
            self._hook(swallowed)
            return
        for each in self._before:
            signal.signal(each, self._handle)
        # Sent to the main thread itself: a lock that it waits for would hold up any other thread's signal.
        main = threading.main_thread().ident
        again = threading.Timer(_AGAIN_AFTER, signal.pthread_kill, [main, error.exit_code - 128])
        again.daemon = True
        again.start()

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        stopped = f"stopped by {_NAMES[signal.Signals(signum)]}."
        if self._abort is None:
            self.stopped = Interrupted(f"{stopped} {self._remedy}".rstrip(), signum)
            raise self.stopped
        error = Interrupted(stopped, signum)
        threading.Thread(target=self._abort, args=(error,), name="stop", daemon=True).start()
