"""One sample at a time: checked, cut to length, given its id; and many of them as a record batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_tool.prompts.reasons import Reason, Skipped
from dflash_tool.schemas.arrow import SAMPLES_SCHEMA, content_hash, make_sample_id
from dflash_tool.wording import counted

# samples.arrow without its bucket, which is known once all lengths are.
PREPARED_SCHEMA = pa.schema([column for column in SAMPLES_SCHEMA if column.name != "bucket"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What decides which samples the data give. `vocab_size` counts the rows of the target's embedding.

    A sample longer than `max_length` tokens (None: no limit) is cut or skipped, as `overlength` says.
    `turns` concerns split conversations: a sample for each assistant turn, or for the last one only.
    """

    vocab_size: int
    max_length: int | None = None
    overlength: Literal["truncate", "skip"] = "truncate"
    turns: Literal["each", "last"] = "each"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    mask_token_id: int | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """A prepared sample: `input_ids` [T] int32, `loss_mask` [T] uint8, its id (16 bytes), its `file:line`."""

    sample_id: bytes
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    source: str
    truncated: bool

    @property
    def duplicate(self) -> bool:
        """Another sample before this one has the same content."""
        return any(self.sample_id[12:])


class SampleMaker:
    """Token ids and masks -> samples with their ids, or why they are none. Numbers duplicates."""

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._seen: Counter[bytes] = Counter()

    def make(self, source: str, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> Sample | Skipped:
        """`ids` [T] int32 and `mask` [T] uint8 of one sample, T >= 0."""
        fault = self._fault(ids, mask)
        limit = self._options.max_length
        truncated = fault is None and limit is not None and len(ids) > limit
        if truncated:
            whole = len(ids)
            if self._options.overlength == "skip":
                fault = Reason.TOO_LONG, f"{whole} tokens, --max-length is {limit}"
            ids, mask = ids[:limit], mask[:limit]
            if fault is None and not has_anchor(mask):
                fault = Reason.NO_ANCHOR_AFTER_CUT, f"the first {limit} of {whole} tokens hold no answer"
        if fault is not None:
            return Skipped(source, *fault)
        content = content_hash(ids, mask)
        occurrence = self._seen[content]
        self._seen[content] += 1
        return Sample(make_sample_id(content, occurrence), ids, mask, source, truncated)

    def _fault(self, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> tuple[Reason, str] | None:
        options = self._options
        if not len(ids):
            return Reason.EMPTY, "no tokens"
        if (highest := int(ids.max())) >= options.vocab_size:
            return Reason.ID_BEYOND_VOCABULARY, f"id {highest}, the target has {options.vocab_size}"
        if options.mask_token_id is not None and bool((ids == options.mask_token_id).any()):
            return Reason.MASK_TOKEN, f"id {options.mask_token_id}, reserved for the drafter's slots"
        if not has_anchor(mask):
            return Reason.NO_ANCHOR, f"{int(mask.sum())} of {counted(len(ids), 'token')} supervised, no two in a row"
        return None


def has_anchor(mask: NDArray[np.uint8]) -> bool:
    """Whether a loss mask [T] of 0 and 1 has two supervised tokens in a row: without, no block can start."""
    return bool((mask[:-1] & mask[1:]).any())


def record_batch(samples: Sequence[Sample]) -> pa.RecordBatch:
    """At least one sample -> a record batch of `PREPARED_SCHEMA`."""
    lengths = np.array([len(sample.input_ids) for sample in samples], np.int32)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    ids = np.concatenate([sample.input_ids for sample in samples])
    masks = np.concatenate([sample.loss_mask for sample in samples])
    id_type = PREPARED_SCHEMA.field("sample_id").type
    columns = {
        "sample_id": pa.array([sample.sample_id for sample in samples], id_type),
        "length": pa.array(lengths),
        "supervised": pa.array(np.array([sample.loss_mask.sum() for sample in samples], np.int32)),
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32())),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(masks, pa.uint8())),
        "source": pa.array([sample.source for sample in samples], pa.string()),
    }
    arrays = [columns[name] for name in PREPARED_SCHEMA.names]
    return pa.RecordBatch.from_arrays(arrays, schema=PREPARED_SCHEMA)
