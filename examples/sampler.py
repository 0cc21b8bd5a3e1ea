"""Batched decoding for a small model on a CPU: many prompts of different lengths, greedy and sampled mixed.

Requests are sorted by their limit and prompt length and cut into batches, so that rows of a batch start and
stop together. A batch is padded on the left, prefilled once, and then advanced one token a step on the
key-value cache. Rows that are done are dropped from the cache once a quarter of the batch is done: the cost
of a step follows the rows that are left.

A row is done at its end-of-turn token, at its limit, or when it loops: once ``LOOP_RUN`` tokens on end have only
repeated 4-grams of the same answer, and it is cut before them. Numbers depend on (model, requests, seed, batch
size) alone; arithmetic is the model's.
"""

# Shapes: B rows, T positions, V vocabulary, K choices.
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

LOOP_RUN = 32
GRAM = 4
MOST_CHOICES = 200  # a nucleus holds no more tokens than this


@dataclass(frozen=True, kw_only=True)
class Request:
    """``temperature`` 0 is greedy. ``limit`` counts generated tokens, the end-of-turn token not included."""

    prompt: list[int]
    limit: int
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``ids`` without the end-of-turn token; ``ended``: the model itself ended it; ``looped``: cut before a loop."""

    ids: list[int]
    ended: bool
    looped: bool


def distinct_share(ids: Sequence[int], n: int = GRAM) -> float:
    """Divide distinct n-grams by all n-grams; 1 for a text shorter than ``n``."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


@dataclass(kw_only=True)
class _Row:
    """A request in work; ``answer`` is there once it is done."""

    request: Request
    ids: list[int] = field(default_factory=list)
    answer: Answer | None = None
    grams: set[tuple[int, ...]] = field(default_factory=set)
    stale: int = 0  # tokens on end that ended a 4-gram seen before

    def hear(self, token: int, end: int) -> None:
        """Take the model's next token."""
        if self.answer is not None:
            return
        if token == end or len(self.ids) == self.request.limit:
            self.answer = Answer(ids=self.ids, ended=token == end, looped=False)
            return
        self.ids.append(token)
        gram = tuple(self.ids[-GRAM:])
        self.stale = self.stale + 1 if gram in self.grams else 0
        self.grams.add(gram)
        if self.stale == LOOP_RUN:
            self.answer = Answer(ids=self.ids[:-LOOP_RUN], ended=False, looped=True)


def pad_left(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both int64 ``[B, T]``."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


class Sampler:
    """Answers requests with one model; ``banned`` tokens are never generated."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad: int,
        end: int,
        banned: list[int],
        top_p: float,
        batch_size: int,
        seed: int,
    ) -> None:
        self._model = model
        self._pad, self._end, self._banned = pad, end, banned
        self._top_p = top_p
        self._batch_size = batch_size
        self._noise = torch.Generator().manual_seed(seed)

    def answer(self, requests: Sequence[Request], progress: Callable[[int], None]) -> list[Answer]:
        """Answer every request, in their order; ``progress`` hears the number done after each batch."""
        order = sorted(range(len(requests)), key=lambda i: (requests[i].limit, len(requests[i].prompt), i))
        answers: dict[int, Answer] = {}
        for at in range(0, len(order), self._batch_size):
            rows = order[at : at + self._batch_size]
            with torch.inference_mode():
                answers.update(zip(rows, self._batch([requests[i] for i in rows]), strict=True))
            progress(len(answers))
        return [answers[i] for i in range(len(requests))]

    def _batch(self, requests: list[Request]) -> list[Answer]:
        rows = [_Row(request=request) for request in requests]
        live = list(rows)  # the rows that the tensors hold
        ids_BT, mask_BT = pad_left([request.prompt for request in requests], self._pad)
        position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        temperature_B = torch.tensor([request.temperature for request in requests])
        cache = DynamicCache(config=self._model.config)
        while any(row.answer is None for row in rows):
            logits_BTV = self._model(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                position_ids=position_BT,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            next_B = self._draw(logits_BTV[:, -1], temperature_B)
            for row, token in zip(live, next_B.tolist(), strict=True):
                row.hear(token, self._end)
            ids_BT, position_BT = next_B[:, None], position_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(live), 1)], dim=1)
            keep = [at for at, row in enumerate(live) if row.answer is None]
            if keep and len(keep) < 0.75 * len(live):
                kept_B = torch.tensor(keep)
                cache.batch_select_indices(kept_B)
                ids_BT, mask_BT, position_BT = ids_BT[kept_B], mask_BT[kept_B], position_BT[kept_B]
                temperature_B = temperature_B[kept_B]
                live = [live[at] for at in keep]
        return [row.answer for row in rows if row.answer is not None]

    def _draw(self, logits_BV: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
        """Choose the next token of every row: the best, or one of the nucleus of mass ``top_p``."""
        logits_BV = logits_BV.float()
        logits_BV[:, self._banned] = -torch.inf
        best_B = logits_BV.argmax(-1)
        share_BV = (logits_BV / temperature_B.clamp(min=1e-3)[:, None]).softmax(-1)
        share_BK, token_BK = share_BV.topk(MOST_CHOICES)
        share_BK[share_BK.cumsum(-1) - share_BK > self._top_p] = 0
        drawn_B1 = torch.multinomial(share_BK, 1, generator=self._noise)
        return torch.where(temperature_B > 0, token_BK.gather(1, drawn_B1)[:, 0], best_B)
