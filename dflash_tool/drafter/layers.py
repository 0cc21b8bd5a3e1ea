# ruff: noqa: N803, N806 - tensor names carry their shape
"""The drafter's parts: RMSNorm, rope over whole heads, SwiGLU, and a decoder layer whose keys come from two places.

Every layer takes the context's features as they are (no `input_layernorm`), projects them to keys and values, and
puts those before the block's own (KV injection, DFlash paper section 4). Norms and angles are computed in fp32 at
least, and in fp64 where the input is.

Legend: N blocks, B slots, R rows of context, S positions, H hidden, A query heads, K KV heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from dflash_tool.drafter.config import DrafterConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines [..., T, D]
# Queries, keys and values of the blocks, keys and values of their context -> what the queries gather.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32 at least; the result has the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., width]`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Rope(nn.Module):
    """Angles of whole heads; frequencies and scaling are transformers' own for the config's `rope_parameters`."""

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - slow to import

        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            inv_freq, self.scale = 1.0 / config.rope_parameters["rope_theta"] ** steps, 1.0
        else:
            inv_freq, self.scale = ROPE_INIT_FUNCTIONS[kind](config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines `[..., D]` of integer positions `[...]`, in `dtype` but no less than fp32."""
        dtype = torch.promote_types(dtype, torch.float32)
        angles = positions.unsqueeze(-1).to(dtype) * self.inv_freq.to(dtype)
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.scale, angles.sin() * self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rope":
        frequencies = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = frequencies.to(self.inv_freq.device)  # moves with the model, but is never rounded to bf16
        return self


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rope: x `[..., T, heads, D]`, rotation `[..., T, D]`; halves are paired (not neighbours), as in Qwen3."""
    cos, sin = (part.unsqueeze(-2) for part in rotation)
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Projections of one layer; which query sees which key, the caller's `attend` knows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x_NBH: Tensor, feature_RSH: Tensor, block_rotation: Rotation, context_rotation: Rotation, attend: Attend
    ) -> Tensor:
        """What the blocks' slots gather, `[N, B, H]`; x is normed, the features are as they came."""
        q_NBAD = rotate(self.q_norm(self._heads(self.q_proj(x_NBH))), block_rotation)
        gathered = attend(q_NBAD, *self._keys(x_NBH, block_rotation), *self._keys(feature_RSH, context_rotation))
        out: Tensor = self.o_proj(gathered.flatten(-2))
        return out

    def _keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return rotate(self.k_norm(self._heads(self.k_proj(x))), rotation), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., H]` to `[..., H]`."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm layer over the blocks; the context's features pass by unchanged."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_NBH: Tensor, feature_RSH: Tensor, block_rotation: Rotation, context_rotation: Rotation, attend: Attend
    ) -> Tensor:
        """Residual stream of the blocks after this layer."""
        normed = self.input_layernorm(x_NBH)
        x_NBH = x_NBH + self.self_attn(normed, feature_RSH, block_rotation, context_rotation, attend)
        out: Tensor = x_NBH + self.mlp(self.post_attention_layernorm(x_NBH))
        return out
