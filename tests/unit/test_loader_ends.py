"""Memory against a ledger, every way to stop, every error where it belongs."""

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_tool.buckets import StepPlan
from dflash_tool.errors import ConfigError, DataError, StoreError
from dflash_tool.loader import LoaderClosed, MixingLoader
from dflash_tool.loader.prefetch import Prefetch, batch_bytes
from dflash_tool.store.layout import array_file
from dflash_tool.store.reader import HiddenStore
from tests.store_kit import MadeStore, make_store

from .loader_kit import (
    LONGEST,
    WINDOW,
    Watched,
    loader_of,
    no_threads_left,
    plans_of,
    read_steps,
)


@pytest.mark.parametrize("batches", [1, 3])
def test_the_window_holds(made: MadeStore, batches: int) -> None:
    """A ledger of the memory that reads go to: never more than the window, never what the consumer still holds."""
    tokens = 1 + LONGEST
    window = (tokens * (32 + 9) + 256) * batches
    lock = threading.Lock()
    live: dict[int, int] = {}  # start -> end of what was read and not yet given back
    touched: list[int] = []

    def enter(row: int, out: dict[Any, NDArray[Any]]) -> None:
        with lock:
            for view in out.values():
                start = view.__array_interface__["data"][0]
                end = start + view.nbytes
                assert all(end <= other or start >= live[other] for other in live)
                live[start] = end
                touched.extend((start, end))
            assert sum(end - start for start, end in live.items()) <= window
            assert max(touched) - min(touched) <= window

    with Watched.open(made.root) as watched:
        assert isinstance(watched, Watched)
        watched.before_read = enter
        loader = loader_of(watched, context_budget=LONGEST, window_bytes=window, threads=3)
        for step in loader:
            for batch in step:
                first = batch.states.data_ptr()
                with lock:
                    for start in [start for start in live if first <= start < first + batch.states.nbytes]:
                        del live[start]
        assert not live
        assert 0 < loader.counters().peak_bytes <= window


def test_release_lets_the_next_batch_in(tmp_path: Path) -> None:
    """In a window of one batch nothing of the next is read before the release, and it is after an explicit one."""
    make_store(tmp_path, [10] * 20)
    reads: list[int] = []
    next_read = threading.Event()

    def enter(row: int, out: Any) -> None:
        reads.append(row)
        if len(reads) > 5:
            next_read.set()

    with Watched.open(tmp_path) as watched:
        watched.before_read = enter  # type: ignore[attr-defined]
        loader = loader_of(watched, layers=(0, 2), batch_samples=20, context_budget=50, window_bytes=50 * 41 + 192)
        steps = iter(loader)
        step = next(steps)
        assert len(step) == 4
        for number, batch in enumerate(step):
            assert len(batch.rows) == 5
            if number == 0:
                assert sorted(reads) == sorted(batch.rows.tolist())
                batch.release()
                batch.release()
                assert next_read.wait(30)
        assert sorted(reads) == list(range(20))
        loader.close()
        assert no_threads_left()


def test_stopping_early(store: HiddenStore) -> None:
    loader = loader_of(store, threads=3)
    for step in loader:
        for batch in step:
            assert len(batch.rows)
            break
        break
    assert loader.state_dict()["step"] == 0  # the step isn't consumed
    loader.close()
    assert no_threads_left()
    steps = iter(loader)
    step = next(steps)
    loader.close()
    assert no_threads_left()
    with pytest.raises(LoaderClosed):
        list(step)
    assert read_steps(loader) == read_steps(loader_of(store))
    assert no_threads_left()


@pytest.mark.parametrize("max_steps", [1, 3, 7, 9, 14, 20])
def test_nothing_is_read_beyond_the_last_step_to_be_taken(store: HiddenStore, max_steps: int) -> None:
    """Two epochs of seven steps; also from a checkpoint."""
    rows = np.arange(3, 100)
    every = read_steps(loader_of(store, rows, epochs=2))
    loader = loader_of(store, rows, epochs=2, max_steps=max_steps)
    assert read_steps(loader) == every[:max_steps]
    assert loader.counters().samples_read == sum(len(step[2]) for step in every[:max_steps])
    other = loader_of(store, rows, epochs=2, max_steps=max_steps)
    fingerprint = plans_of(store.samples, rows)(0).samples_fingerprint
    other.load_state_dict({"epoch": 0, "step": 1, "samples_fingerprint": fingerprint})
    assert read_steps(other) == every[1:max_steps]


def test_a_step_must_be_read_to_its_end(store: HiddenStore) -> None:
    steps = iter(loader_of(store))
    next(iter(next(steps)))
    with pytest.raises(RuntimeError, match="step 0 of epoch 0 wasn't read to its end"):
        next(steps)
    assert no_threads_left()


def test_the_first_error_reaches_the_consumer(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads fail, the second one only after the first."""
    aborted = threading.Event()
    numbers = itertools.count()
    abort = Prefetch.abort

    def abort_and_tell(prefetch: Prefetch, error: BaseException) -> None:
        abort(prefetch, error)
        if isinstance(error, StoreError):  # not the end of an earlier test's iteration that is collected now
            aborted.set()

    def enter(row: int, out: Any) -> None:
        if next(numbers):
            raise StoreError("the first")
        aborted.wait(30)
        raise StoreError("the second")

    monkeypatch.setattr(Prefetch, "abort", abort_and_tell)
    with Watched.open(made.root) as watched:
        watched.before_read = enter  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="the first"), loader_of(watched) as loader:
            read_steps(loader)
        assert no_threads_left()


def test_abort_and_errors_of_the_plan(store: HiddenStore, made: MadeStore) -> None:
    """Whoever waits is woken: here the reads never end on their own."""
    entered, leave = threading.Event(), threading.Event()

    def enter(row: int, out: Any) -> None:
        entered.set()
        leave.wait(30)

    with Watched.open(made.root) as watched:
        watched.before_read = enter  # type: ignore[attr-defined]
        loader = loader_of(watched)

        def stop() -> None:
            entered.wait(30)
            loader.abort(DataError("stop"))
            leave.set()

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(DataError, match="stop"), loader:
            read_steps(loader)
        stopper.join()
        assert no_threads_left()
        with pytest.raises(DataError, match="stop"):
            next(iter(loader))
        assert no_threads_left()

    rows = np.arange(100)
    good = plans_of(store.samples, rows)

    def plan_of(epoch: int) -> StepPlan:
        if epoch:
            raise DataError("no such epoch")
        return good(epoch)

    loader = MixingLoader(store, rows, plan_of, layers=(2,), epochs=2, window_bytes=WINDOW, threads=2, verify="never")
    with pytest.raises(DataError, match="no such epoch"), loader:
        read_steps(loader)


def test_changed_bytes_are_named_the_first_time(tmp_path: Path) -> None:
    made = make_store(tmp_path, [5, 6, 7])
    path = array_file(tmp_path / "shards" / "b0-r0-00000.zarr", 2)
    good = path.read_bytes()
    changed = bytearray(good)
    changed[6 * 16] ^= 4  # row 6: the second of sample 1
    path.write_bytes(changed)
    named = rf"{made.samples.sample_id(1).hex()} \(shard b0-r0-00000, rows 5 to 10\).*layer 2 have hash"
    with HiddenStore.open(tmp_path) as store:
        for verify in ("first", "always"):
            with pytest.raises(StoreError, match=named):
                read_steps(loader_of(store, layers=(0, 2), verify=verify))
        assert len(read_steps(loader_of(store, layers=(0, 2), verify="never"))) == 1
        assert len(read_steps(loader_of(store, layers=(0,)))) == 1

        for verify, checked in (("first", 3), ("always", None), ("never", 0)):
            path.write_bytes(good)
            # With a window of one batch, epoch 1 is read when epoch 0 has been used.
            loader = loader_of(
                store, layers=(0, 2), epochs=2, verify=verify, context_budget=21, window_bytes=batch_bytes(21, 32)
            )
            steps = iter(loader)
            batches = iter(next(steps))
            next(batches)
            assert loader.counters().samples_checked == (0 if verify == "never" else 3)
            path.write_bytes(changed)
            assert list(batches) == []
            if checked is None:
                with pytest.raises(StoreError, match=named):
                    read_steps(loader)
            else:
                assert len(list(next(steps))) == 1
                assert loader.counters().samples_checked == checked
            loader.close()


def test_refused_at_once(store: HiddenStore, tmp_path: Path) -> None:
    for changes, error, message in (
        ({"layers": (0, 3)}, ConfigError, r"--aux-layers 0,3: the store .* has no layer 3, only 0, 2, 4"),
        ({"layers": (4, 0)}, ValueError, "strictly ascending"),
        ({"layers": ()}, ValueError, "strictly ascending"),
        ({"verify": "sometimes"}, ValueError, "first, always, never"),
        ({"threads": 0}, ConfigError, "loader threads: got 0"),
        ({"epochs": 0}, ConfigError, "--epochs: got 0"),
        ({"rank": 1}, ValueError, "rank 1 of 1"),
        ({"rows": np.arange(0)}, DataError, "no sample to train on"),
        ({"window_bytes": 12_000}, ConfigError, r"12,000 bytes .* 300 tokens of 32 bytes, 12,3.* --microbatch-tokens"),
    ):
        with pytest.raises(error, match=message):
            loader_of(store, **changes)  # type: ignore[arg-type]
    make_store(tmp_path, [3, 4, 5], complete=False)
    with HiddenStore.open(tmp_path) as unfinished, pytest.raises(StoreError, match=r"row 2.*run extract again"):
        read_steps(loader_of(unfinished, layers=(0,)))
    assert no_threads_left()
