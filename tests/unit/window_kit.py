"""Acquires in threads of their own. No sleeps: a hook in the gate reports the moment one has begun to wait."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from dflash_tool.window import InflightWindow, Sleeper

HANG = 10  # seconds until a wait of the test itself counts as a hang


class Acquire(threading.Thread):
    """One acquire in a thread of its own; ``outcome`` is what it raised, None if it was granted."""

    def __init__(self, stage: Stage, bucket: int, nbytes: int) -> None:
        super().__init__(daemon=True)
        self.stage, self.bucket, self.nbytes = stage, bucket, nbytes
        self.state = "running"
        self.outcome: BaseException | None = None
        self.interrupted = False
        self.sleeper: Any = None

    def run(self) -> None:
        try:
            self.stage.window.acquire(self.bucket, self.nbytes)
        except BaseException as error:
            self.outcome = error
        self.stage.events.put((self, "ended"))


class Stage:
    """A window, and the acquires on it, which report by themselves that they wait or have ended."""

    def __init__(self, limit_bytes: int, places: int) -> None:
        self.events: queue.SimpleQueue[tuple[Acquire, str]] = queue.SimpleQueue()
        self.now = 0.0
        self.window = InflightWindow(limit_bytes, places, clock=lambda: self.now)

    def acquire(self, bucket: int, nbytes: int) -> Acquire:
        """Start an acquire and return once it waits or has ended."""
        call = Acquire(self, bucket, nbytes)
        call.start()
        while call.state == "running":
            self.next_report()
        return call

    def ended(self, *calls: Acquire) -> list[BaseException | None]:
        """Wait until these have ended (nobody else may have to do anything for it); their outcomes."""
        while any(call.state != "ended" for call in calls):
            self.next_report()
        for call in calls:
            call.join(HANG)
            assert not call.is_alive()
        return [call.outcome for call in calls]

    def next_report(self) -> None:
        call, state = self.events.get(timeout=HANG)  # queue.Empty: an acquire hangs that should have gone on
        call.state = state


def report_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each `Acquire` report to its stage when it begins to wait."""
    sleep = Sleeper.sleep

    def report_and_sleep(sleeper: Sleeper) -> None:
        call = threading.current_thread()
        if isinstance(call, Acquire) and not sleeper.done:
            call.sleeper = sleeper
            call.stage.events.put((call, "waits"))
        sleep(sleeper)
        if isinstance(call, Acquire) and call.interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sleeper, "sleep", report_and_sleep)
