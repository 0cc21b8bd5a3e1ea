"""Anchor counts against a plain loop; plans over a store's rows; how evenly 20,000 lengths spread over the steps."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_tool.buckets import StepPlan, assign_buckets, choose_edges
from dflash_tool.errors import StoreError
from dflash_tool.loader import anchor_counts, epoch_plans, plans
from dflash_tool.schemas.arrow import SAMPLE_ID_BYTES
from dflash_tool.store.samples import RAW_SAMPLES_SCHEMA, Samples, SamplesWriter
from tests.store_kit import write_samples


def samples_of(root: Path, masks: list[list[int]], lengths: list[int] | None = None, batch: int = 4) -> Samples:
    """A `samples.arrow` of these masks, `batch` rows a record batch."""
    lengths = lengths or [len(mask) for mask in masks]
    with SamplesWriter(root) as writer:
        for first in range(0, len(masks), batch):
            part = slice(first, first + batch)
            count = len(masks[part])
            columns = [
                pa.array([(first + i).to_bytes(SAMPLE_ID_BYTES) for i in range(count)], pa.binary(SAMPLE_ID_BYTES)),
                pa.array(lengths[part], pa.int32()),
                pa.array([sum(mask) for mask in masks[part]], pa.int32()),
                pa.array([[1] * len(mask) for mask in masks[part]], pa.list_(pa.int32())),
                pa.array(masks[part], pa.list_(pa.uint8())),
                pa.array(["x:1"] * count),
            ]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=RAW_SAMPLES_SCHEMA))
        return writer.finish([10_000])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=20),
    batch=st.integers(1, 20),
    piece=st.integers(1, 60),
)
def test_valid_anchors(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    masks: list[list[int]],
    batch: int,
    piece: int,
) -> None:
    monkeypatch.setattr(plans, "_PIECE_TOKENS", piece)
    samples = samples_of(tmp_path_factory.mktemp("samples"), masks, batch=batch)
    expected = [sum(1 for a in range(len(mask) - 1) if mask[a] and mask[a + 1]) for mask in masks]
    assert anchor_counts(samples).tolist() == expected


def test_a_mask_of_another_length_is_named(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [[1, 1, 1], [1, 1], [1]], lengths=[3, 4, 1])
    with pytest.raises(StoreError, match=r"samples\.arrow is damaged: row 1 doesn't have its 4 values"):
        anchor_counts(samples)


def test_plans_of_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = write_samples(tmp_path, rng.integers(2, 200, 90).tolist(), (50, 200))
    rows, counts = np.arange(0, 90, 2), anchor_counts(samples)
    plan_of = epoch_plans(
        samples,
        rows,
        anchors_of=counts,
        anchors=20,
        block_size=8,
        seed=3,
        batch_samples=16,
        context_budget=400,
        block_budget=500,
    )
    for epoch in (0, 1):
        plan = plan_of(epoch)
        assert plan.epoch == epoch
        assert plan.samples_fingerprint == plan_of(epoch).samples_fingerprint
        for batch in (batch for step in plan for batch in step.microbatches):
            held = rows[batch.rows]
            assert (samples.buckets[held] == batch.bucket).all()
            assert samples.lengths[held].max() == batch.width
            assert batch.block_tokens == sum(min(int(counts[row]), 20) * 8 for row in held)
            assert len(held) == 1 or (batch.padded_tokens <= 400 and batch.block_tokens <= 500)
    assert plan_of(0).samples_fingerprint != plan_of(1).samples_fingerprint


@pytest.mark.parametrize(
    ("step_samples", "buckets", "ratio"), [(32, 6, 0.25), (64, 6, 0.25), (512, 6, 0.1), (512, 16, 0.25)]
)
def test_mixing_of_twenty_thousand_lengths(step_samples: int, buckets: int, ratio: float) -> None:
    """Bucket counts of every step, and its tokens: their standard deviation over random order's."""
    rng = np.random.default_rng(7)
    lengths = np.clip(rng.lognormal(5.5, 0.8, 20_000), 8, 4096).astype(np.int64)
    edges = choose_edges(lengths, buckets)
    bucket_of = assign_buckets(lengths, edges)
    plan = StepPlan(
        ids=rng.integers(0, 2**64, (20_000, 2), dtype=np.uint64),
        lengths=lengths,
        buckets=bucket_of,
        block_tokens=np.full(20_000, 4096),
        seed=1,
        epoch=0,
        batch_samples=step_samples,
        context_budget=8192,
        block_budget=1 << 17,
    )
    share = np.bincount(bucket_of, minlength=len(edges)) / 20_000
    held = [plan.samples(index) for index in range(len(plan))]
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(20_000))
    for index, rows in enumerate(held):
        counts = np.bincount(bucket_of[rows], minlength=len(edges))
        assert np.abs(counts - share * len(rows)).max() < 2, index

    whole = 20_000 // step_samples * step_samples
    random = [lengths[rng.permutation(20_000)[:whole]].reshape(-1, step_samples).sum(1).std() for _ in range(5)]
    spread = lengths[plan.order[:whole]].reshape(-1, step_samples).sum(1).std()
    assert spread < np.mean(random) * ratio
