"""Held-out samples -> how good the drafter is: loss, accuracy by slot, anchor tau, walk tau, by bucket and by source.

Every valid anchor of every held-out sample is drafted (no draw, so steps are comparable), under the training step's
attention; what counts as accepted is the serving rule. As a yardstick, `bigram_yield` walks the same answers with a
table of the most frequent next token: what no hidden state is needed for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.drafter.acceptance import Yield, accepted_lengths, anchor_yield, walk_yield
from dflash_tool.drafter.anchors import decay_weights, every_anchor, make_blocks
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import decay_loss
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.store.joined import AnySamples, AnyStore
from dflash_tool.store.layout import NUMPY_DTYPE

Int64s = NDArray[np.int64]
_BLOCKS_A_FORWARD = 4096


@dataclass
class Validation:
    """Sums over held-out samples.

    right, reached, counted: `[B-1]` slots right, slots right with all before them right too (accepted), slots counted.
    by_bucket, by_source: (anchor, walk); a source is a data file.
    """

    numerator: float = 0.0
    weight: float = 0.0
    right: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    reached: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    counted: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    by_bucket: dict[int, tuple[Yield, Yield]] = field(default_factory=dict)
    by_source: dict[str, tuple[Yield, Yield]] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean cross-entropy weighted by slot: training's default loss, whatever it trains on."""
        return self.numerator / self.weight if self.weight else 0.0

    @property
    def anchor_tau(self) -> float:
        """Mean over every valid anchor."""
        return sum((anchor for anchor, _ in self.by_bucket.values()), Yield(0, 0)).tau

    @property
    def walk_tau(self) -> float:
        """What generation would yield on these answers."""
        return sum((walk for _, walk in self.by_bucket.values()), Yield(0, 0)).tau

    def as_row(self) -> dict[str, Any]:
        """A row of metrics.jsonl, without its step."""
        return {
            "kind": "validation",
            "loss": self.loss,
            "anchor_tau": self.anchor_tau,
            "walk_tau": self.walk_tau,
            "accuracy_by_slot": (self.right / np.maximum(self.counted, 1)).tolist(),
            "accepted_by_slot": (self.reached / np.maximum(self.counted, 1)).tolist(),
            "by_bucket": {
                str(bucket): {"anchor_tau": anchor.tau, "walk_tau": walk.tau, "anchors": anchor.forwards}
                for bucket, (anchor, walk) in sorted(self.by_bucket.items())
            },
        }


class Validator:
    """Grades a drafter on the rows (of samples.arrow) that were held out, but for quarantined ones.

    Reads them anew each time, hashes checked.
    """

    def __init__(
        self,
        store: AnyStore,
        rows: Int64s,
        head: TargetHead,
        *,
        layers: Sequence[int],
        gamma: float | None,
        batch_tokens: int,
    ) -> None:
        self._store, self._head, self._layers, self._gamma = store, head, tuple(layers), gamma
        self._batch_tokens = batch_tokens
        self._rows = rows[np.argsort(store.samples.lengths[rows], kind="stable")]

    @torch.inference_mode()
    def run(self, model: DFlashDraftModel) -> Validation:
        """Draft every valid anchor of every held-out sample."""
        right, reached, counted = np.zeros((3, model.settings.block_size - 1), np.int64)
        found = Validation(right=right, reached=reached, counted=counted)
        for rows in self._batches():
            self._grade(model, rows, found)
        return found

    def _batches(self) -> Iterator[Int64s]:
        """Rows of like length; few enough tokens and anchors for one forward, or a single sample."""
        lengths, anchors = self._store.samples.lengths, 0
        batch: list[int] = []
        for row in self._rows[~self._store.holes(self._rows)].tolist():
            more = int(lengths[row])  # a bound of its anchors
            if batch and ((len(batch) + 1) * more > self._batch_tokens or anchors + more > _BLOCKS_A_FORWARD):
                yield np.array(batch)
                batch, anchors = [], 0
            batch.append(row)
            anchors += more
        if batch:
            yield np.array(batch)

    def _grade(self, model: DFlashDraftModel, rows: Int64s, found: Validation) -> None:
        samples, settings = self._store.samples, model.settings
        masks = [samples.mask(row) for row in rows.tolist()]
        blocks = make_blocks(
            [samples.tokens(row) for row in rows.tolist()], masks, every_anchor(masks), block_size=settings.block_size
        )
        device, on_cuda = model.device, model.device.type == "cuda"
        dtype = torch.bfloat16 if on_cuda else model.dtype
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
            noise = self._head.noise(blocks, settings.mask_token_id)
            hidden = model.draft_blocks(self._context(rows, device, dtype), noise, blocks)
        loss = decay_loss(hidden, blocks, decay_weights(settings.block_size, self._gamma), self._head)
        correct = loss.correct.cpu().numpy()
        found.numerator += float(loss.numerator)
        found.weight += float(loss.denominator)
        found.right += correct.sum(0)
        found.counted += blocks.counted.sum(0)
        accepted = accepted_lengths(correct)
        found.reached += (accepted[:, None] > np.arange(correct.shape[1])).sum(0)
        for place, row in enumerate(rows.tolist()):
            mine = blocks.sample == place
            anchor = anchor_yield(accepted[mine])
            walk = walk_yield(masks[place], blocks.position[mine], accepted[mine])
            _add(found.by_bucket, int(samples.buckets[row]), anchor, walk)
            _add(found.by_source, samples.source(row).rpartition(":")[0], anchor, walk)

    def _context(self, rows: Int64s, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Aux states `[R, S, L*H]` of these samples, zeros behind their ends."""
        manifest, lengths = self._store.manifest, self._store.samples.lengths[rows]
        shape = (len(rows), int(lengths.max()), len(self._layers), self._store.width)
        context = np.zeros(shape, NUMPY_DTYPE[manifest.store_dtype])
        for place, row in enumerate(rows.tolist()):
            for number, states in enumerate(self._store.read(row, self._layers, verify=True).values()):
                context[place, : len(states), number] = states
        tensor = torch.from_numpy(context.reshape(*shape[:2], -1))
        if manifest.store_dtype == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(device=device, dtype=dtype)


def _add(groups: dict[Any, tuple[Yield, Yield]], name: Any, anchor: Yield, walk: Yield) -> None:
    before = groups.get(name, (Yield(0, 0), Yield(0, 0)))
    groups[name] = (before[0] + anchor, before[1] + walk)


def bigram_yield(
    samples: AnySamples, train_rows: Int64s, held_out: Int64s, *, block_size: int, vocab_size: int
) -> Yield:
    """Walk tau's sums of a bigram table: the most frequent next token in the training answers drafts each block."""
    pairs = ((samples.tokens(row), samples.mask(row)) for row in train_rows.tolist())
    table = bigram_table(pairs, vocab_size)
    walks = (bigram_walk(table, samples.tokens(row), samples.mask(row), block_size) for row in held_out.tolist())
    return sum(walks, Yield(0, 0))


def bigram_table(answers: Iterable[tuple[NDArray[Any], NDArray[Any]]], vocab_size: int) -> Int64s:
    """The most frequent successor of each token `[vocab_size]`, -1 for those without; answers are (tokens, mask)."""
    pairs = [_supervised_pairs(tokens, mask) for tokens, mask in answers]
    first, then = (np.concatenate([pair[side] for pair in pairs] or [np.zeros(0, np.int64)]) for side in (0, 1))
    code, often = np.unique(first.astype(np.int64) * vocab_size + then, return_counts=True)
    table = np.full(vocab_size, -1, np.int64)
    order = np.lexsort((-code, often))  # the last one of a token is its most frequent successor, the smallest id first
    table[code[order] // vocab_size] = code[order] % vocab_size
    return table


def bigram_walk(table: Int64s, tokens: NDArray[Any], mask: NDArray[Any], block_size: int) -> Yield:
    """Walk tau's sums of one sample whose blocks the table drafts."""
    anchors = every_anchor([mask])
    blocks = make_blocks([tokens], [mask], anchors, block_size=block_size)
    drafts = np.empty_like(blocks.labels)
    last = blocks.tokens
    for slot in range(block_size - 1):
        last = np.where(last >= 0, table[last], -1)
        drafts[:, slot] = last
    return walk_yield(mask, anchors.position, accepted_lengths((drafts == blocks.labels) & blocks.counted))


def _supervised_pairs(tokens: NDArray[Any], mask: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Neighbouring tokens of a sample of which both are supervised."""
    both = (mask[:-1] != 0) & (mask[1:] != 0)
    return tokens[:-1][both], tokens[1:][both]
