"""Signals end a run in order wherever they find the main thread."""

import signal
import sys
import threading

import pytest

from dflash_tool.errors import Interrupted
from dflash_tool.signals import StopSignals


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_raised_where_the_main_thread_is(signum: signal.Signals) -> None:
    before = signal.getsignal(signum), sys.unraisablehook
    with pytest.raises(Interrupted) as raised, StopSignals():
        signal.raise_signal(signum)
    assert raised.value.exit_code == 128 + signum
    assert (signal.getsignal(signum), sys.unraisablehook) == before


def test_not_lost_inside_a_finalizer(capsys: pytest.CaptureFixture[str]) -> None:
    """Python swallows whatever `__del__` raises: a library's finalizer must not eat the signal."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def run() -> None:
        with StopSignals():
            Finalized()
            assert not threading.Event().wait(60)  # the signal that comes again ends it

    with pytest.raises(Interrupted):
        run()
    assert "Traceback" not in capsys.readouterr().err


def test_other_finalizers_keep_their_report(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("not ours")

    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda swallowed: seen.append(str(swallowed.exc_value)))
    with StopSignals():
        Broken()
    assert seen == ["not ours"]


def test_forwarded_while_threads_run() -> None:
    aborted: list[BaseException] = []
    told = threading.Event()

    def abort(error: BaseException) -> None:
        aborted.append(error)
        told.set()

    with StopSignals() as signals, signals.forward_to(abort):
        signal.raise_signal(signal.SIGTERM)
        assert told.wait(60)
    assert isinstance(aborted[0], Interrupted)
