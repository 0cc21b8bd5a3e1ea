"""What a training plan is made of: the cost of each sample's blocks, and a step plan for each epoch."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_tool.buckets import StepPlan, copy_ids
from dflash_tool.errors import StoreError
from dflash_tool.store.joined import AnySamples, JoinedSamples

Int64s = NDArray[np.int64]

_PIECE_TOKENS = 1 << 22


def anchor_counts(samples: AnySamples) -> Int64s:
    """Count the valid anchors of every sample: positions a with mask[a] and mask[a + 1] both supervised.

    Reads the column `loss_mask` once, through the memory map, a few MB at a time; no other column.

    Returns:
        int64 `[N]`, 0 for a sample without two supervised tokens in a row.

    Raises:
        StoreError: a sample's mask isn't as long as the sample.
    """
    if isinstance(samples, JoinedSamples):
        return samples.gather([anchor_counts(part) for part in samples.parts])
    counts = np.zeros(len(samples), np.int64)
    row = 0
    with pa.memory_map(str(samples.path)) as file:
        reader = pa.ipc.open_file(file)
        for position in range(reader.num_record_batches):
            masks = reader.get_batch(position).column("loss_mask")
            offsets = np.asarray(masks.offsets, np.int64)
            values = masks.values.to_numpy()
            lengths = samples.lengths[row : row + len(masks)]
            bad = np.flatnonzero(np.diff(offsets) != lengths)
            if bad.size or (offsets[0] < 0 or offsets[-1] > len(values)):
                where = row + (int(bad[0]) if bad.size else 0)
                raise StoreError(
                    f"{samples.path} is damaged: row {where} doesn't have its {samples.lengths[where]} values of the "
                    "loss mask; run extract again: it prepares the data again"
                )
            _count(values, offsets, counts[row : row + len(masks)])
            row += len(masks)
    return counts


def _count(values: NDArray[np.uint8], offsets: Int64s, counts: Int64s) -> None:
    """Count into `counts` [n], for samples at `offsets` [n + 1] of `values`, all of them at least 1 long."""
    first = 0
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _PIECE_TOKENS, side="right")) - 1)
        begin, end = int(offsets[first]), int(offsets[last])
        supervised = values[begin:end] != 0
        pairs = np.zeros(end - begin, np.bool_)
        np.logical_and(supervised[:-1], supervised[1:], out=pairs[:-1])
        pairs[offsets[first + 1 : last] - begin - 1] = False  # the next token is another sample's
        where = np.flatnonzero(pairs)
        counts[first:last] = np.diff(np.searchsorted(where, offsets[first : last + 1] - begin))
        first = last


def epoch_plans(
    samples: AnySamples,
    rows: Int64s,
    *,
    anchors_of: Int64s,
    anchors: int,
    block_size: int,
    seed: int,
    batch_samples: int,
    context_budget: int,
    block_budget: int,
) -> Callable[[int], StepPlan]:
    """Make the function that plans an epoch over `rows` (int64 `[M]`); plan row i is sample row `rows[i]`.

    Every copy of a sample is shuffled on its own, and steps hold their share of every stratum.

    anchors_of: int64 `[N]`, what `anchor_counts` gave; a sample counts min(valid anchors, `anchors`) x `block_size`
    block tokens. Everything else as `StepPlan` takes it, which also says what it raises.
    """
    ids, lengths = copy_ids(samples.ids[rows], samples.copies[rows]), samples.lengths[rows].astype(np.int64)
    buckets = samples.buckets[rows].astype(np.int64)
    strata = None if samples.strata is samples.buckets else samples.strata[rows].astype(np.int64)
    block_tokens = np.minimum(anchors_of[rows], anchors) * block_size

    def plan(epoch: int) -> StepPlan:
        return StepPlan(
            ids=ids,
            lengths=lengths,
            buckets=buckets,
            block_tokens=block_tokens,
            seed=seed,
            epoch=epoch,
            batch_samples=batch_samples,
            context_budget=context_budget,
            block_budget=block_budget,
            strata=strata,
        )

    return plan
