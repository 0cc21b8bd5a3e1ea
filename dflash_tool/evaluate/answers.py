"""What an answer tells: its walk tau under a drafter, how much of it repeats, where and how two answers part."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_tool.drafter.acceptance import Yield, accepted_lengths, walk_yield
from dflash_tool.drafter.anchors import decay_weights, every_anchor, make_blocks
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import decay_loss
from dflash_tool.drafter.model import DFlashDraftModel

# A gap between two logits below this share of the largest is a tie that rounding may decide: a block is verified in
# another matrix shape than a token alone.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@torch.inference_mode()
def walk_answer(target: Any, drafter: DFlashDraftModel, head: TargetHead, prompt: Tensor, answer: Tensor) -> Yield:
    """Walk tau's sums of one answer: every block of it drafted under training's attention, from one plain forward.

    prompt `[S]`, answer `[n]`: int64. What generation did takes no part in it, so that agreement means something.
    """
    tokens = torch.cat((prompt, answer))
    mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8)
    anchors = every_anchor([mask])
    if not len(anchors):
        return Yield(0, 0)
    settings = drafter.settings
    states = _hidden_states(target, tokens, settings.target_layer_ids).to(drafter.dtype)
    blocks = make_blocks([tokens.numpy()], [mask], anchors, block_size=settings.block_size)
    hidden = drafter.draft_blocks(states, head.noise(blocks, settings.mask_token_id), blocks)
    correct = decay_loss(hidden, blocks, decay_weights(settings.block_size), head).correct.cpu().numpy()
    return walk_yield(mask, anchors.position, accepted_lengths(correct))


def _hidden_states(target: Any, tokens: Tensor, layers: Iterable[int]) -> Tensor:
    """Aux states `[1, T, F]` of one forward over all tokens."""
    fewer = {"logits_to_keep": 1} if target._supports_logits_to_keep() else {}
    out = target(tokens[None].to(target.device), use_cache=False, output_hidden_states=True, **fewer)
    return torch.cat([out.hidden_states[layer + 1] for layer in layers], -1)


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where an answer first differs from plain greedy decoding's.

    position: in the answer, from 0. plain, drafted: the tokens there. gap: between their logits, in a forward of its
    own. largest: logit there, by size. near_tie: the gap is within rounding (`NEAR_TIE`).
    """

    source: str
    position: int
    plain: int
    drafted: int
    gap: float
    largest: float
    near_tie: bool


@torch.inference_mode()
def parting(target: Any, prompt: Tensor, plain: Tensor, drafted: Tensor, source: str) -> Parting | None:
    """Where two answers `[n]`, `[m]` to the same prompt part; None where they are equal."""
    shared = min(len(plain), len(drafted))
    differs = (plain[:shared] != drafted[:shared]).nonzero()
    if not len(differs):
        if len(plain) == len(drafted):
            return None
        raise AssertionError(f"{source}: one answer is the beginning of the other: an end token was passed over")
    at = int(differs[0])
    before = torch.cat((prompt, plain[:at]))[None].to(target.device)
    logits = target(before, use_cache=False).logits[0, -1].float()
    one, other = int(plain[at]), int(drafted[at])
    gap, largest = abs(float(logits[one] - logits[other])), float(logits.abs().max())
    return Parting(
        source=source,
        position=at,
        plain=one,
        drafted=other,
        gap=gap,
        largest=largest,
        near_tie=gap <= NEAR_TIE[target.dtype] * largest,
    )


def distinct_4grams(answers: Iterable[Tensor]) -> float:
    """Share of the answers' 4-grams that are new in their answer: 1 for no repetition, near 0 for a loop."""
    distinct = every = 0
    for answer in answers:
        grams = answer.unfold(0, 4, 1) if len(answer) >= 4 else answer.new_zeros(0, 4)
        distinct += len(torch.unique(grams, dim=0)) if len(grams) else 0
        every += len(grams)
    return distinct / every if every else 1.0
