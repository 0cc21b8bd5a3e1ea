# ruff: noqa: N803, N806 - tensor names carry their shape
"""A drafter once more, written plainly from its two files: what a served folder is held against.

Nothing is shared with `model`, `layers` or `attention`, nothing taken from transformers: config.json is read here, rope
and its scalings are computed from their papers' formulas, a block is drafted from the whole context without a cache,
head by head, in fp64. Slow, and one block at a time.

Legend: B slots of the block, S context positions, A query heads, K KV heads, D head size, H hidden, F = aux layers * H.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class PlainDrafter:
    """The drafter of a servable folder. Tensors are read when they are needed, so that little memory is."""

    def __init__(self, folder: Path) -> None:
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._file = folder / "model.safetensors"

    def draft(self, states_SF: Tensor, noise_BH: Tensor) -> Tensor:
        """The block's final hidden states `[B, H]`, fp64, after a context of S positions from 0 on."""
        config = self._config
        heads, kv_heads, width = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        eps: float = config["rms_norm_eps"]
        context = len(states_SF)
        turns = rotations(config, context + len(noise_BH))
        with safe_open(self._file, "pt") as stored:

            def weight(name: str) -> Tensor:
                tensor: Tensor = stored.get_tensor(f"{name}.weight")
                return tensor.double()

            def norm(x: Tensor, name: str) -> Tensor:
                size = (x.square().mean(-1, keepdim=True) + eps).sqrt()
                return x / size * weight(name)

            feature_SH = norm(states_SF.double() @ weight("fc").T, "hidden_norm")
            x_BH = noise_BH.double()
            for number in range(config["num_hidden_layers"]):
                layer = f"layers.{number}"
                attention = f"{layer}.self_attn"
                h_BH = norm(x_BH, f"{layer}.input_layernorm")
                seen = torch.cat((feature_SH, h_BH))
                q = (h_BH @ weight(f"{attention}.q_proj").T).view(-1, heads, width)
                k = (seen @ weight(f"{attention}.k_proj").T).view(-1, kv_heads, width)
                v = (seen @ weight(f"{attention}.v_proj").T).view(-1, kv_heads, width)
                q = _turn(norm(q, f"{attention}.q_norm"), turns[context:])
                k = _turn(norm(k, f"{attention}.k_norm"), turns)
                gathered = []
                for head in range(heads):
                    shared = head // (heads // kv_heads)
                    scores = q[:, head] @ k[:, shared].T / math.sqrt(width)
                    gathered.append(scores.softmax(-1) @ v[:, shared])
                x_BH = x_BH + torch.cat(gathered, -1) @ weight(f"{attention}.o_proj").T
                h_BH = norm(x_BH, f"{layer}.post_attention_layernorm")
                gate = h_BH @ weight(f"{layer}.mlp.gate_proj").T
                up = h_BH @ weight(f"{layer}.mlp.up_proj").T
                x_BH = x_BH + (gate * gate.sigmoid() * up) @ weight(f"{layer}.mlp.down_proj").T
            return norm(x_BH, "norm")


def rotations(config: Mapping[str, Any], positions: int) -> Tensor:
    """Complex `[positions, D / 2]`: what rope multiplies a pair of features by, its length the attention factor."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    width, theta = config["head_dim"], float(rope.get("rope_theta") or config["rope_theta"])
    trained = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    turns = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)  # radians a position
    kind = rope.get("rope_type") or rope.get("type") or "default"
    length = 1.0
    if kind == "linear":
        turns = turns / rope["factor"]
    elif kind == "llama3":
        turns = _llama3(turns, rope, trained)
    elif kind == "yarn":
        turns, length = _yarn(turns, rope, trained, width=width, theta=theta)
    elif kind != "default":
        raise ValueError(f"rope_type {kind!r} has no plain implementation")
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * turns
    return torch.polar(torch.full_like(angles, length), angles)


def _llama3(turns: Tensor, rope: Mapping[str, Any], trained: int) -> Tensor:
    """Slow turns divided by the factor, fast ones kept, those between mixed (Llama 3.1's reference code)."""
    rounds = trained * turns / (2 * math.pi)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    kept = ((rounds - low) / (high - low)).clamp(0, 1)
    return turns * kept + turns / float(rope["factor"]) * (1 - kept)


def _yarn(turns: Tensor, rope: Mapping[str, Any], trained: int, *, width: int, theta: float) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.2 and 3.3), with the attention factor of its equation 22."""
    factor = float(rope["factor"])

    def pair_of(rounds: float) -> float:
        """Which pair of features makes so many rounds within the trained length."""
        return width * math.log(trained / (rounds * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    scaled = ((torch.arange(len(turns), dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)

    def length(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    both = rope.get("mscale"), rope.get("mscale_all_dim")
    told = rope.get("attention_factor")
    if told is None:
        told = length(both[0]) / length(both[1]) if both[0] and both[1] else length(1.0)
    return turns * (1 - scaled) + turns / factor * scaled, float(told)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rope on `[T, heads, D]`: feature i and i + D/2 are the two parts of one complex number."""
    left, right = x.chunk(2, -1)
    turned = torch.complex(left.contiguous(), right.contiguous()) * turns[:, None]
    return torch.cat((turned.real, turned.imag), -1)
