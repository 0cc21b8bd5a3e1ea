# ruff: noqa: N803 - tensor names carry their shape
"""Speculative decoding with a DFlash drafter in one loop: a second opinion beside transformers' own.

    block     [x_0, mask, ..., mask]; x_0 is the newest token, which the target has not seen yet
    draft     q_1 .. q_{B-1} in one forward of the drafter, x_k ~ q_k
    verify    p_1 .. p_B in one forward of the target over [x_0, x_1, ..., x_{B-1}]
    accept    x_k while r_k < p_k(x_k) / q_k(x_k), r_k ~ U(0, 1)
    go on     with a token ~ norm(max(0, p_k - q_k)) for the first x_k refused, ~ p_B if there is none

That keeps the target's distribution (Leviathan et al., arXiv 2211.17192, algorithm 1). At temperature 0 all mass of p
and q is on their likeliest token, and the same rule accepts what equals greedy decoding. The accepted positions' aux
states are the next block's new context.

Legend: B slots of a block, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_tool.drafter.model import DFlashDraftModel


@dataclass
class Decoded:
    """tokens: the new ones. forwards: of the target, prefill included.

    drafts: [x_1 .. x_{B-1}] of every block; accepted: how many of them the target agreed with, also where the answer's
    end cut some of those off.
    """

    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@torch.inference_mode()
def decode(
    target: Any,
    drafter: DFlashDraftModel,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    end: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Decoded:
    """Go on from a prompt until an end token or `max_new_tokens`; what the last block has beyond that is cut.

    Args:
        target: a transformers causal LM, whose cache can be cropped.
        drafter: for this target, on the same device.
        prompt: int64 `[S]`, one token or more.
        max_new_tokens: at least 1.
        temperature: of both models; 0 is greedy.
        end: tokens that end an answer; the answer has them.
        generator: on the target's device, of all draws; torch's own without it.
    """
    from transformers import DynamicCache  # noqa: PLC0415 - slow to import

    settings, device = drafter.settings, prompt.device
    block = settings.block_size
    masks = [settings.mask_token_id] * (block - 1)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    cache, drafter_cache = DynamicCache(config=target.config), DynamicCache()
    cache.activate_past_recording()
    result = Decoded()

    def verify(tokens: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Run the target: p `[keep, V]` after the last of the tokens, aux states `[1, tokens, F]` of all of them."""
        result.forwards += 1
        fewer = {"logits_to_keep": keep} if target._supports_logits_to_keep() else {}
        out = target(input_ids=tokens[None], cache=cache, use_cache=True, output_hidden_states=True, **fewer)
        states = torch.cat([out.hidden_states[layer + 1] for layer in settings.target_layer_ids], -1)
        return distribution(out.logits[0, -keep:], temperature), states

    def draft(newest: int, states: Tensor) -> Tensor:
        """Run the drafter: q `[B - 1, V]`. Its cache keeps the states' keys and values, not the block's."""
        noise = embed(torch.tensor([[newest, *masks]], device=device))
        past = drafter_cache.get_seq_length()
        positions = torch.arange(past, past + states.shape[1] + block, device=device)[None]
        hidden = drafter(noise, states, positions, None, drafter_cache).last_hidden_state
        drafter_cache.crop(-block)
        return distribution(head(hidden[0, 1:]), temperature)

    p, states = verify(prompt, 1)
    result.tokens = _draw(p, generator).tolist()
    while len(result.tokens) < max_new_tokens and result.tokens[-1] not in end:
        newest = result.tokens[-1]
        q = draft(newest, states)
        x = _draw(q, generator)
        p, states = verify(torch.cat((x.new_tensor([newest]), x)), block)
        accepted, following = speculate(p, q, x, generator)
        cache.crop(accepted + 1 - block)
        states = states[:, : accepted + 1]
        result.drafts.append(x.tolist())
        result.accepted.append(accepted)
        result.tokens += _cut([*x[:accepted].tolist(), following], max_new_tokens - len(result.tokens), end)
    return result


def speculate(p_BV: Tensor, q_BV: Tensor, x: Tensor, generator: torch.Generator | None = None) -> tuple[int, int]:
    """How many of the drafts x `[B - 1]` are accepted, and the token that follows them.

    p `[B, V]`, q `[B - 1, V]`: what target and drafter give for each place.
    """
    places = torch.arange(len(x), device=x.device)
    r = torch.rand(len(x), generator=generator, device=x.device, dtype=p_BV.dtype)
    accepted = int((r * q_BV[places, x] < p_BV[places, x]).long().cumprod(0).sum())
    after = p_BV[-1] if accepted == len(x) else residual(p_BV[accepted], q_BV[accepted])
    return accepted, int(_draw(after[None], generator))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) `[V]`: what is left of p where q was drawn from and refused."""
    left = (p - q).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p  # p = q to rounding: nothing could be refused


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension, in fp32 at least; all on the likeliest token for 0."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature > 0:
        return (wide / temperature).softmax(-1)
    return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)


def _draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """A token `[n]` from each of the distributions `[n, V]`."""
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def _cut(tokens: list[int], room: int, end: Collection[int]) -> list[int]:
    """At most `room` of the tokens, up to and including the first end token."""
    tokens = tokens[:room]
    ends = [place for place, token in enumerate(tokens) if token in end]
    return tokens[: ends[0] + 1] if ends else tokens
