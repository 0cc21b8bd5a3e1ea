"""The drafter against an independent implementation, against itself in generation, and against leaks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DFlashCache

from dflash_tool.drafter.anchors import Anchors, decay_weights, every_anchor, make_blocks
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import decay_loss
from dflash_tool.drafter.model import DFlashDraftModel

from .drafter_kit import ROPES, normal, small_drafter, target_config

WHERE = Anchors(np.array([0, 0, 0, 0, 1, 1]), np.array([0, 3, 3, 19, 2, 11]))
LENGTHS = (20, 12)


def frequencies(rope: dict[str, Any], width: int) -> tuple[list[float], float]:
    """Inverse frequencies and the scale of cosines, from the papers' formulas, one by one."""
    base, kind = rope["rope_theta"], rope["rope_type"]
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    before = rope["original_max_position_embeddings"]
    if kind == "llama3":
        out = []
        for f in plain:
            turns = before * f / (2 * math.pi)  # rotations within the original length
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            keep = min(1.0, max(0.0, (turns - low) / (high - low)))
            out.append(keep * f + (1 - keep) * f / factor)
        return out, 1.0
    low, high = (
        width * math.log(before / (beta * 2 * math.pi)) / (2 * math.log(base))
        for beta in (rope["beta_fast"], rope["beta_slow"])
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(width // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)], 0.1 * math.log(factor) + 1


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(head: Tensor, position: int, inv_freq: list[float], scale: float) -> Tensor:
    """Rope of one head at one position: the pair (i, i + D/2) is turned by position * inv_freq[i]."""
    out, half = head.clone(), len(inv_freq)
    for i, f in enumerate(inv_freq):
        cos, sin = scale * math.cos(position * f), scale * math.sin(position * f)
        out[i] = head[i] * cos - head[i + half] * sin
        out[i + half] = head[i + half] * cos + head[i] * sin
    return out


def one_block(
    w: dict[str, Tensor], sizes: tuple[int, int, int], before: Tensor, noise: Tensor, rope: tuple[list[float], float]
) -> Tensor:
    """A single block, after the aux states [a, L*H] of all positions before its anchor; plain math."""
    heads, kv, width = sizes
    anchor, size = len(before), len(noise)
    feature = rms(before @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, layer = noise, 0
    while f"layers.{layer}.input_layernorm.weight" in w:
        p = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items()}
        normed = rms(x, p["input_layernorm.weight"])
        source = torch.cat((feature, normed))
        q = (normed @ p["self_attn.q_proj.weight"].T).view(size, heads, width)
        k = (source @ p["self_attn.k_proj.weight"].T).view(-1, kv, width)
        v = (source @ p["self_attn.v_proj.weight"].T).view(-1, kv, width)
        q, k = rms(q, p["self_attn.q_norm.weight"]), rms(k, p["self_attn.k_norm.weight"])
        gathered = torch.zeros(size, heads, width, dtype=x.dtype)
        for head in range(heads):
            keys = torch.stack([turned(k[t, head // (heads // kv)], t, *rope) for t in range(anchor + size)])
            for slot in range(size):
                scores = keys @ turned(q[slot, head], anchor + slot, *rope) / math.sqrt(width)
                gathered[slot, head] = torch.softmax(scores, 0) @ v[:, head // (heads // kv)]
        x = x + gathered.view(size, -1) @ p["self_attn.o_proj.weight"].T
        normed = rms(x, p["post_attention_layernorm.weight"])
        gate = normed @ p["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (normed @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        layer += 1
    return rms(x, w["norm.weight"])


@pytest.mark.parametrize(
    ("kind", "rope", "kv"), [("qwen3", r, 2) for r in ROPES] + [("llama", "llama3", 1), ("llama", "default", 4)]
)
@torch.no_grad()
def test_against_an_independent_implementation(kind: str, rope: str, kv: int) -> None:
    model = small_drafter(target_config(kind, rope_parameters=dict(ROPES[rope]), num_key_value_heads=kv))
    expected, scale = frequencies(ROPES[rope], 8)
    assert model.rope.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)  # transformers computes them in fp32
    assert model.rope.scale == pytest.approx(scale)
    context, noise = normal(2, 20, 3 * 24), normal(len(WHERE), 5, 24, seed=1)
    got = model.draft_blocks(context, noise, WHERE)
    for n, (sample, anchor) in enumerate(zip(WHERE.sample, WHERE.position, strict=True)):
        alone = one_block(
            model.state_dict(),
            (4, kv, 8),
            context[sample, :anchor],
            noise[n],
            (model.rope.inv_freq.double().tolist(), model.rope.scale),
        )
        torch.testing.assert_close(got[n], alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_training_equals_generation_with_its_cache() -> None:
    """Anchors 3, 4, 9 of one sequence, as generation meets them: prefill, then 1 and 5 newly accepted positions."""
    model = small_drafter()
    context, noise = normal(1, 14, 3 * 24), normal(3, 5, 24, seed=1)
    anchors = Anchors(np.zeros(3, np.int64), np.array([3, 4, 9]))
    trained = model.draft_blocks(context, noise, anchors)
    cache, done = DFlashCache(config=model.config), 0
    cache.activate_past_recording()
    for n, anchor in enumerate(anchors.position.tolist()):
        if n:
            cache.crop(-5)
        out = model(
            noise_embeds=noise[n : n + 1],
            context_hidden_states=context[:, done:anchor],
            position_ids=torch.arange(done, anchor + 5)[None],
            attention_mask=torch.ones(1, anchor + 5, dtype=torch.long) if n == 1 else None,
            cache=cache,
        ).last_hidden_state
        assert cache.get_seq_length() == anchor + 5  # context and block; the caller crops the block
        torch.testing.assert_close(out[0], trained[n], rtol=1e-11, atol=1e-11)
        done = anchor
        without = model(noise[n : n + 1], context[:, :anchor]).last_hidden_state  # positions from 0 by themselves
        torch.testing.assert_close(without[0], trained[n], rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_positions_follow_the_cache_and_a_mask_hides_keys() -> None:
    model = small_drafter()
    context, noise = normal(1, 9, 3 * 24), normal(1, 5, 24, seed=1)
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    model(noise, context[:, :4], cache=cache)
    cache.crop(-5)
    whole = model(noise, context).last_hidden_state
    torch.testing.assert_close(model(noise, context[:, 4:], cache=cache).last_hidden_state, whole)
    # Two rows of padding on the left, hidden by the mask, with the positions that a padded prompt has.
    padded = torch.cat((normal(1, 2, 3 * 24, seed=5), context), 1)
    mask = torch.tensor([[0, 0] + [1] * 14])
    places = torch.cat((torch.ones(2), torch.arange(14))).long()[None]
    torch.testing.assert_close(model(noise, padded, places, mask).last_hidden_state, whole)


@torch.no_grad()
def test_nothing_at_or_after_an_anchor_leaks_in() -> None:
    model = small_drafter()
    context, noise = normal(2, 20, 3 * 24), normal(len(WHERE), 5, 24, seed=1)
    before = model.draft_blocks(context, noise, WHERE)
    for n, (sample, anchor) in enumerate(zip(WHERE.sample, WHERE.position, strict=True)):
        changed = torch.full_like(context, 1e6)  # the other sample, and everything from the anchor on
        changed[sample, :anchor] = context[sample, :anchor]
        others = noise + 100.0
        others[n] = noise[n]
        assert torch.equal(model.draft_blocks(changed, others, WHERE)[n], before[n])
        if anchor:  # while what lies just before it is seen
            changed[sample, anchor - 1] += 1
            assert not torch.equal(model.draft_blocks(changed, noise, WHERE)[n], before[n])


@torch.no_grad()
def test_all_slots_of_a_block_see_each_other() -> None:
    model = small_drafter()
    context, noise = normal(1, 6, 3 * 24), normal(1, 5, 24, seed=1)
    where = Anchors(np.array([0]), np.array([4]))
    before = model.draft_blocks(context, noise, where)
    for slot in range(5):
        changed = noise.clone()
        changed[0, slot] += 1
        assert (model.draft_blocks(context, changed, where) != before).all(-1).all()


def gradient(
    model: DFlashDraftModel, head: TargetHead, parts: list[list[int]], samples: dict[str, Any]
) -> list[Tensor]:
    """One step's gradient over these microbatches (rows of the samples), as the trainer sums it."""
    weights = decay_weights(5)
    total, sums = 0.0, [torch.zeros_like(p) for p in model.parameters()]
    for rows in parts:
        masks, tokens = ([samples[what][row] for row in rows] for what in ("masks", "tokens"))
        blocks = make_blocks(tokens, masks, every_anchor(masks), block_size=5)
        context = torch.zeros(len(rows), max(map(len, masks)), 3 * 24, dtype=torch.float64)
        for at, row in enumerate(rows):
            context[at, : len(masks[at])] = samples["context"][row]
        hidden = model.draft_blocks(context, head.noise(blocks, 60), blocks)
        loss = decay_loss(hidden, blocks, weights, head)
        total += loss.denominator
        torch._foreach_add_(sums, torch.autograd.grad(loss.numerator, list(model.parameters())))
    return [part / total for part in sums]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_a_step_does_not_depend_on_its_microbatches(checkpointing: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 40, 7, 25, 4, 12, 9]  # uneven, as are the supervised counts
    samples = {
        "tokens": [rng.integers(0, 60, n) for n in lengths],
        "masks": [np.r_[0, rng.random(n - 3) < rng.choice([0.5, 1.0]), 1, 1] for n in lengths],
        "context": [normal(n, 3 * 24, seed=n) for n in lengths],
    }
    model, head = small_drafter(), TargetHead(normal(61, 24, seed=3))
    one = gradient(model, head, [list(range(7))], samples)
    model.gradient_checkpointing = checkpointing
    for parts in ([[row] for row in range(7)], [[6, 0], [3, 1, 4], [5, 2]]):
        for expected, got in zip(one, gradient(model, head, parts, samples), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert all(value.abs().max() > 0 for value in one)  # every tensor is trained


def test_weights_are_drawn_from_the_targets_range_and_norms_are_one() -> None:
    settings = small_drafter(target_config(initializer_range=0.05, hidden_size=64)).settings
    model, again = DFlashDraftModel(settings, seed=3), DFlashDraftModel(settings, seed=3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        if "norm" in name:
            assert (value == 1).all()
        else:
            assert value.std().item() == pytest.approx(0.05, rel=0.1)
            assert abs(value.mean().item()) < 0.005
    assert not torch.equal(model.fc.weight, DFlashDraftModel(settings, seed=4).fc.weight)


def test_58_tensors_for_5_layers() -> None:
    names = set(small_drafter(layers=5).state_dict())
    layer = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    layer |= {"self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"}
    expected = {f"layers.{i}.{name}.weight" for i in range(5) for name in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 58


def test_rope_stays_exact_in_bf16() -> None:
    model = small_drafter()
    assert model.bfloat16().rope.inv_freq.dtype == torch.float32
    assert model.dtype == torch.bfloat16
    assert model.rope(torch.arange(3), torch.bfloat16)[0].dtype == torch.float32


def test_a_microbatch_without_anchors() -> None:
    model, head, masks = small_drafter(), TargetHead(normal(61, 24)), [np.array([0, 1, 0])]
    blocks = make_blocks([np.arange(3)], masks, every_anchor(masks), block_size=5)
    hidden = model.draft_blocks(normal(1, 3, 72), head.noise(blocks, 60), blocks)
    loss = decay_loss(hidden, blocks, decay_weights(5), head)
    assert hidden.shape == (0, 5, 24)
    assert loss.correct.shape == (0, 4)
    assert loss.numerator.item() == loss.denominator == 0
    gradients = torch.autograd.grad(loss.numerator, list(model.parameters()), materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)
