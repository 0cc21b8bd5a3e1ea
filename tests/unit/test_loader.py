"""Batches against a plain loop through the store, memory against a ledger, resume at every step, every way to stop."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_tool.buckets import StepPlan, assign
from dflash_tool.errors import ConfigError, DataError, StoreError
from dflash_tool.loader import LoaderClosed, MixedBatch, MixingLoader, anchor_counts, epoch_plans
from dflash_tool.loader.prefetch import Prefetch, batch_bytes
from dflash_tool.schemas.config import StoreDtype
from dflash_tool.store.layout import array_file
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.samples import Samples
from dflash_tool.store.testing import MadeStore, make_store

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LONGEST, G, CONTEXT = 150, 16, 300
WINDOW = 40_000  # CONTEXT tokens of 2 layers x 8 x bf16, ids and mask take 12,300 bytes


def lengths_of(count: int, seed: int = 0) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(3, 0.8, count), 1, LONGEST).astype(int).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    """100 samples in 3 buckets, layers 0, 2, 4 of 8 numbers, many small shards."""
    root = tmp_path_factory.mktemp("store")
    return make_store(root, lengths_of(100), edges=(20, 50, LONGEST), layers=(0, 2, 4), shard_bytes=8000)


@pytest.fixture
def store(made: MadeStore) -> Iterator[HiddenStore]:
    with HiddenStore.open(made.root) as opened:
        yield opened


def plans_of(samples: Samples, rows: NDArray[np.int64], **changes: Any) -> Callable[[int], StepPlan]:
    arguments = {"seed": 5, "batch_samples": G, "context_budget": CONTEXT, "block_budget": 500} | changes
    return epoch_plans(samples, rows, anchors_of=anchor_counts(samples), anchors=16, block_size=8, **arguments)


def loader_of(store: HiddenStore, rows: NDArray[np.int64] | None = None, **changes: Any) -> MixingLoader:
    rows = np.arange(len(store.samples)) if rows is None else rows
    planning = {name: changes.pop(name) for name in ("seed", "batch_samples", "context_budget") if name in changes}
    options: dict[str, Any] = {
        "layers": (0, 4),
        "epochs": 1,
        "window_bytes": WINDOW,
        "threads": 2,
        "verify": "first",
    }
    return MixingLoader(store, rows, plans_of(store.samples, rows, **planning), **{**options, **changes})


def read_steps(loader: MixingLoader) -> list[tuple[int, int, list[int]]]:
    """(epoch, step, sample rows in order of reading) to the end."""
    return [(step.epoch, step.index, [int(row) for batch in step for row in batch.rows]) for step in loader]


def as_sets(steps: list[tuple[int, int, list[int]]]) -> list[tuple[int, int, list[int]]]:
    return [(epoch, step, sorted(rows)) for epoch, step, rows in steps]


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


class Watched(HiddenStore):
    """A store that calls `before_read(row, out)` in the reading thread."""

    before_read: Callable[[int, dict[Any, NDArray[Any]]], None]

    def read(self, sample: Any, layers: Any = None, out: Any = None, *, verify: bool = False) -> Any:
        self.before_read(sample, out)
        return super().read(sample, layers, out, verify=verify)


def same_bits(got: torch.Tensor, expected: NDArray[Any]) -> bool:
    """Whether a tensor holds these bytes; numpy has no bfloat16."""
    return got.contiguous().view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(expected).tobytes()


def check_batch(batch: MixedBatch, store: HiddenStore, layers: tuple[int, ...]) -> None:
    """Every tensor of a batch against one sample after another, read the plain way."""
    samples, width = store.samples, int(batch.lengths.max())
    count, hidden = len(batch.rows), store.width
    context = batch.context()
    assert batch.states.shape == (len(layers), count, width, hidden)
    assert context.shape == (count, width, len(layers) * hidden)
    assert batch.input_ids.shape == batch.loss_mask.shape == (count, width)
    assert context.dtype == batch.states.dtype == TORCH[store.manifest.store_dtype]
    assert (batch.input_ids.dtype, batch.loss_mask.dtype, batch.lengths.dtype) == (
        torch.int64,
        torch.uint8,
        torch.int64,
    )
    np.testing.assert_array_equal(batch.sample_ids, samples.ids[batch.rows])
    assert batch.lengths.tolist() == sorted(batch.lengths.tolist())
    for place, row in enumerate(batch.rows.tolist()):
        rows = store.read(row, verify=True)
        length = int(samples.lengths[row])
        assert batch.lengths[place] == length
        assert samples.buckets[row] == batch.bucket
        side_by_side = np.zeros((width, len(layers) * hidden), store.dtype)
        for at, layer in enumerate(layers):
            side_by_side[:length, at * hidden : (at + 1) * hidden] = rows[layer]
            assert same_bits(batch.states[at, place, :length], rows[layer])
        assert same_bits(context[place], side_by_side)
        padding = [0] * (width - length)
        assert batch.input_ids[place].tolist() == samples.tokens(row).tolist() + padding
        assert batch.loss_mask[place].tolist() == samples.mask(row).tolist() + padding
        assert not batch.states[:, place, length:].view(torch.uint8).any()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_store_any_settings(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=25))
    dtype: StoreDtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    root = tmp_path_factory.mktemp("store")
    hidden = data.draw(st.integers(1, 9))
    make_store(root, lengths, edges=(20, LONGEST), layers=(0, 2, 4), hidden_size=hidden, store_dtype=dtype)
    layers = tuple(sorted(data.draw(st.sets(st.sampled_from([0, 2, 4]), min_size=1))))
    rows = np.array(sorted(data.draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1))))
    epochs = data.draw(st.integers(1, 2))
    with HiddenStore.open(root) as store:
        loader = loader_of(
            store,
            rows,
            layers=layers,
            epochs=epochs,
            batch_samples=data.draw(st.integers(1, 30)),
            context_budget=data.draw(st.integers(1, 500)),
            window_bytes=data.draw(st.integers(80_000, 200_000)),
            threads=data.draw(st.integers(1, 4)),
            verify=data.draw(st.sampled_from(["first", "always", "never"])),
        )
        seen: list[list[int]] = [[] for _ in range(epochs)]
        for step in loader:
            held = []
            for batch in step:
                check_batch(batch, store, layers)
                held += batch.rows.tolist()
            assert sorted(held) == sorted(step.rows.tolist())
            seen[step.epoch] += held
        assert [sorted(epoch) for epoch in seen] == [rows.tolist()] * epochs
        assert loader.counters().samples_read == len(rows) * epochs
        token_bytes = hidden * store.dtype.itemsize * len(layers)
        assert loader.counters().bytes_read == sum(lengths[row] for row in rows) * token_bytes * epochs


def test_every_step_is_a_fair_mixture_in_plan_order(tmp_path: Path) -> None:
    """A store of a few hundred samples: shares within 2, each sample once an epoch, batches as planned."""
    lengths = lengths_of(400, seed=3)
    make_store(tmp_path, lengths, edges=(8, 16, 32, 64, 100, LONGEST), hidden_size=4)
    with HiddenStore.open(tmp_path) as store:
        rows = np.arange(400)
        loader, plan_of = (
            loader_of(store, rows, layers=(0, 2), epochs=2, batch_samples=32),
            plans_of(store.samples, rows, batch_samples=32),
        )
        share = np.bincount(store.samples.buckets) / 400
        seen: list[list[int]] = [[], []]
        for step in loader:
            planned = plan_of(step.epoch).step(step.index)
            assert len(step) == len(planned.microbatches)
            counts = np.zeros(6)
            for batch, expected in zip(step, planned.microbatches, strict=True):
                assert (batch.index_in_step, batch.bucket) == (expected.index_in_step, expected.bucket)
                np.testing.assert_array_equal(batch.rows, expected.rows)
                counts[batch.bucket] += len(batch.rows)
                seen[step.epoch] += batch.rows.tolist()
            assert np.abs(counts - share * len(step.rows)).max() < 2
        assert [sorted(epoch) for epoch in seen] == [rows.tolist()] * 2
        assert seen[0] != seen[1]


def test_resume_at_every_step(store: HiddenStore) -> None:
    """Another number of threads, budget, window: the same samples in the same steps, from wherever it stopped."""
    rows = np.arange(3, 100)
    loader = loader_of(store, rows, epochs=2)
    states, steps = [loader.state_dict()], []
    for step in loader:
        before = loader.state_dict()
        assert before == states[-1]
        held = []
        for batch in step:
            assert loader.state_dict() == before
            held += batch.rows.tolist()
        steps.append((step.epoch, step.index, sorted(held)))
        states.append(loader.state_dict())
    assert len(steps) == 2 * 7
    assert (states[0]["epoch"], states[0]["step"]) == (0, 0)
    assert (states[7]["epoch"], states[7]["step"], states[8]["epoch"], states[8]["step"]) == (0, 7, 1, 1)
    assert set(states[0]) == {"epoch", "step", "samples_fingerprint"}
    for done, state in enumerate(states):
        other = loader_of(
            store,
            rows,
            epochs=2,
            threads=1 + done % 4,
            context_budget=50 + 90 * (done % 5),
            verify="never",
            window_bytes=20_000 + 999 * done,
        )
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert as_sets(read_steps(other)) == steps[done:]
        assert other.state_dict() == states[-1]
        assert read_steps(other) == []


def test_ranks_share_each_step(store: HiddenStore) -> None:
    whole = read_steps(loader_of(store))
    shares = [loader_of(store, rank=rank, world=9) for rank in range(9)]  # some have no work
    read = [[(len(step), [int(row) for batch in step for row in batch.rows]) for step in loader] for loader in shares]
    for place, (_, _, rows) in enumerate(whole):
        held = [rows for ours in read for rows in ours[place][1]]
        assert sorted(held) == sorted(rows)
    assert any(count == 0 for ours in read for count, _ in ours)
    assert all(loader.state_dict() == shares[0].state_dict() for loader in shares)


def test_a_checkpoint_of_another_plan_is_refused(store: HiddenStore) -> None:
    loader = loader_of(store)
    for step in loader:
        list(step)
        break
    state = loader.state_dict()
    for change in ({"seed": 6}, {"batch_samples": 17}, {"rows": np.arange(99)}):
        other = loader_of(store, **change)
        before = other.state_dict()
        with pytest.raises(ConfigError, match=rf"{state['samples_fingerprint']}.*--batch-samples") as caught:
            other.load_state_dict(state)
        assert before["samples_fingerprint"] in str(caught.value)
        assert other.state_dict() == before
    with pytest.raises(ConfigError, match="step 8, epoch 0 has 7"):
        loader.load_state_dict({**state, "step": 8})
    with pytest.raises(ConfigError, match=r"epoch 1 .*--epochs"):
        loader.load_state_dict({**state, "epoch": 1})


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


def test_context_into_a_given_tensor(store: HiddenStore) -> None:
    loader = loader_of(store)
    buffer = torch.empty(LONGEST * G * 16)
    for step in loader:
        for batch in step:
            count, width = batch.input_ids.shape
            out = buffer[: count * width * 16].view(count, width, 16)
            inputs = batch.to("cpu", torch.float32, out=out)
            assert inputs.context.data_ptr() == buffer.data_ptr()
            expected = torch.cat([batch.states[0], batch.states[1]], dim=-1).float()
            assert torch.equal(inputs.context, expected)
            assert torch.equal(batch.context(dtype=torch.float64), expected.double())
            assert inputs.input_ids is batch.input_ids
            assert inputs.lengths is batch.lengths


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


@pytest.mark.parametrize(("world", "drafters"), [(1, 2), (2, 1), (2, 3), (1, 9)])
def test_every_drafter_of_every_rank_gets_its_share(store: HiddenStore, world: int, drafters: int) -> None:
    """By `assign`, in plan order, each in a thread of its own, through a ring of hardly more than a microbatch."""
    plan = plans_of(store.samples, np.arange(len(store.samples)))(0)
    got: dict[tuple[int, int, int], list[list[int]]] = {}

    def read(rank: int, drafter: int, index: int, share: Iterator[MixedBatch]) -> None:
        got[index, rank, drafter] = [batch.rows.tolist() for batch in share]

    for rank in range(world):
        with loader_of(store, window_bytes=WINDOW // 2, rank=rank, world=world, drafters=drafters) as loader:
            for step in loader:
                before = loader.state_dict()
                threads = [
                    threading.Thread(target=read, args=(rank, drafter, step.index, share), daemon=True)
                    for drafter, share in enumerate(step.shares)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                    assert not thread.is_alive()
                assert before["step"] == step.index  # consumed only when every share is
                assert loader.state_dict()["step"] == step.index + 1
    for step in plan:
        for worker, share in enumerate(assign(step, world * drafters)):
            expected = [step.microbatches[place].rows.tolist() for place in share]
            assert got[step.index, worker // drafters, worker % drafters] == expected


def test_an_abort_wakes_every_drafter(store: HiddenStore) -> None:
    reached = threading.Barrier(3)
    raised: list[BaseException] = []

    def read(share: Iterator[MixedBatch]) -> None:
        try:
            reached.wait(60)
            for _ in share:
                pass
        except RuntimeError as error:
            raised.append(error)

    hold, error = threading.Event(), RuntimeError("a drafter failed")

    def before_read(row: int, out: dict[Any, NDArray[Any]]) -> None:
        assert hold.wait(60)

    with Watched.open(store.root) as watched:
        watched.before_read = before_read  # type: ignore[attr-defined]
        with loader_of(watched, drafters=2) as loader:
            steps = iter(loader)
            step = next(steps)
            threads = [threading.Thread(target=read, args=(share,), daemon=True) for share in step.shares]
            for thread in threads:
                thread.start()
            reached.wait(60)
            step.abort(error)
            hold.set()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            assert raised == [error, error]
    assert no_threads_left()
