"""A picture of a running command: redrawn on a terminal, a plain line now and then elsewhere. All on stderr."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, RenderableType
from rich.live import Live

_PLAIN_SECONDS = 10.0


@contextmanager
def show_live(panel: Callable[[], RenderableType], line: Callable[[], str], console: Console) -> Iterator[None]:
    """Draw `panel()` on a terminal while the body runs; elsewhere print `line()` now and then."""
    if console.is_terminal:
        with Live(get_renderable=panel, console=console, refresh_per_second=4, transient=True):
            yield
        return
    done = threading.Event()

    def print_lines() -> None:
        with suppress(OSError):  # a log that can't be written is no reason to stop
            while not done.wait(_PLAIN_SECONDS):
                console.print(line(), soft_wrap=True, highlight=False, markup=False)

    printer = threading.Thread(target=print_lines, name="progress", daemon=True)
    printer.start()
    try:
        yield
    finally:
        done.set()
        printer.join()
