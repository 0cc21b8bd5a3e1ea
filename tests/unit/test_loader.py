"""Batches against a plain loop through the store, each step a fair mixture, resume at every step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_tool.errors import ConfigError
from dflash_tool.loader import MixedBatch
from dflash_tool.schemas.config import StoreDtype
from dflash_tool.store.reader import HiddenStore
from tests.store_kit import make_store

from .loader_kit import LONGEST, TORCH, G, lengths_of, loader_of, plans_of, read_steps


def as_sets(steps: list[tuple[int, int, list[int]]]) -> list[tuple[int, int, list[int]]]:
    return [(epoch, step, sorted(rows)) for epoch, step, rows in steps]


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
