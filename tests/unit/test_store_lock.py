"""One run a store: the second is refused, a dead one is taken over, a lost one finds out."""

import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_tool.errors import StoreError
from dflash_tool.store.lock import LOCK, RunLock, WriterWatch, process_start


def dead_process() -> int:
    """Pid of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def write_lock(root: Path, age: float = 0.0, **fields: Any) -> None:
    """A lock as another run would have left it `age` seconds ago."""
    holder = RunLock(root).holder._replace(run_id="other", host="elsewhere")._asdict() | fields
    (root / LOCK).write_text(json.dumps(holder))
    then = (root / LOCK).stat().st_mtime - age
    os.utime(root / LOCK, (then, then))


def test_taken_and_given_back(tmp_path: Path) -> None:
    with RunLock(tmp_path / "new") as lock:
        holder = json.loads(lock.path.read_text())
        assert holder["pid"] == os.getpid()
        assert holder["run_id"] == lock.holder.run_id
    assert list((tmp_path / "new").iterdir()) == []
    with RunLock(tmp_path / "new"):
        pass


def test_a_second_run_is_refused_by_name(tmp_path: Path) -> None:
    with RunLock(tmp_path) as first:
        with pytest.raises(StoreError) as caught:
            RunLock(tmp_path).acquire()
        text = str(caught.value)
        for part in (
            str(tmp_path),
            first.holder.host,
            f"pid {os.getpid()}",
            first.holder.since,
            "wait until",
        ):
            assert part in text
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    write_lock(tmp_path, pid=dead_process())
    with RunLock(tmp_path) as lock:
        assert json.loads(lock.path.read_text())["run_id"] == lock.holder.run_id
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_reused_pid_fools_nobody(tmp_path: Path) -> None:
    write_lock(tmp_path, pid=os.getpid(), started="12345")
    with RunLock(tmp_path):
        pass


def test_a_living_process_holds_even_without_heartbeats(tmp_path: Path) -> None:
    write_lock(tmp_path, age=3600)
    with pytest.raises(StoreError, match=r"elsewhere.*last sign of life 3600 s ago"):
        RunLock(tmp_path).acquire()


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(process.pid) is None
    process.wait()
    assert process_start(os.getpid()) is not None


@pytest.mark.parametrize("machine", ["another boot", ""])
def test_another_machine_holds_until_its_heartbeat_is_stale(tmp_path: Path, machine: str) -> None:
    write_lock(tmp_path, age=50, machine=machine, pid=dead_process())
    with pytest.raises(StoreError, match="taken over 60 s after its last sign of life"):
        RunLock(tmp_path).acquire()
    write_lock(tmp_path, age=61, machine=machine)
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": 1}', b"[]", b"\xff", b"[" * 100_000])
def test_an_unreadable_lock_holds_until_it_is_stale(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(StoreError, match="can't be told from its lock file"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / LOCK, (1, 1))
    with RunLock(tmp_path):
        pass


def test_heartbeats_keep_the_lock_young(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_every=1e6) as lock:
        os.utime(lock.path, (1, 1))
        lock.beat()
        assert lock.path.stat().st_mtime > 1
        lock.check()


def test_the_thread_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beaten = threading.Event()
    monkeypatch.setattr(RunLock, "beat", lambda self: beaten.set())
    with RunLock(tmp_path, beat_every=0.001):
        assert beaten.wait(30)


def test_a_lock_taken_by_another_is_lost_and_not_removed(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_every=1e6) as lock:
        write_lock(tmp_path)
        lock.beat()
        with pytest.raises(StoreError, match=r"taken over .* run the same command again"):
            lock.check()
    assert json.loads((tmp_path / LOCK).read_text())["run_id"] == "other"


def test_a_disk_that_is_away_for_a_moment_loses_nothing(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_every=1e6) as lock:
        lock.path.rename(tmp_path / "away")
        lock.beat()
        lock.check()
        (tmp_path / "away").rename(lock.path)


@pytest.mark.parametrize("locked", ["nobody", "dead"])
def test_of_many_newcomers_one_gets_it(tmp_path: Path, locked: str) -> None:
    """Threads stand for processes: `flock` and exclusive creation keep them apart in the same way."""
    if locked == "dead":
        write_lock(tmp_path, pid=dead_process())
    newcomers = 16
    start = threading.Barrier(newcomers)

    def compete(lock: RunLock) -> RunLock | None:
        start.wait()
        try:
            lock.acquire()
        except StoreError:
            return None
        return lock

    with ThreadPoolExecutor(newcomers) as pool:
        winners = [lock for lock in pool.map(compete, [RunLock(tmp_path) for _ in range(newcomers)]) if lock]
    assert len(winners) == 1
    winners[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_newcomer_puts_back_what_another_machine_took_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a common flock: between looking at the dead lock and moving it aside, another takes it over."""
    write_lock(tmp_path, age=100, machine="a third machine")
    real_rename = os.rename

    def rename(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", real_rename)
        write_lock(tmp_path, machine="a fourth machine", run_id="faster")
        real_rename(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StoreError, match="run faster"):
        RunLock(tmp_path).acquire()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_reader_sees_whether_a_run_here_lives(tmp_path: Path) -> None:
    watch = WriterWatch(tmp_path)
    assert not watch.alive()
    with RunLock(tmp_path):
        assert watch.alive()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]  # nothing is touched
    assert not watch.alive()
    write_lock(tmp_path, pid=dead_process())
    assert not watch.alive()


def test_a_reader_watches_the_heartbeat_of_another_machine(tmp_path: Path) -> None:
    """Alive until the lock has stood still for 60 s by the reader's clock, however old its time looks."""
    now = 1000.0
    watch = WriterWatch(tmp_path, clock=lambda: now)
    write_lock(tmp_path, age=5000, machine="another")
    assert watch.alive()
    now += 59
    assert watch.alive()
    write_lock(tmp_path, age=4990, machine="another")
    now += 59
    assert watch.alive()
    now += 60
    assert not watch.alive()
