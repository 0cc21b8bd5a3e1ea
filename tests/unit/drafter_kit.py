"""Small drafters for the drafter's tests."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from dflash_tool.drafter.config import drafter_config
from dflash_tool.drafter.model import DFlashDraftModel

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def target_config(kind: str = "qwen3", **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "initializer_range": 0.2, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **(sizes | changes))


def small_drafter(
    target: Any = None, *, block_size: int = 5, layers: int = 2, ids: tuple[int, ...] = (0, 2, 4), mask: int = 60
) -> DFlashDraftModel:
    """A random fp64 drafter whose norms are not one, so that a forgotten norm shows."""
    settings, _ = drafter_config(
        target or target_config(), target_layer_ids=ids, mask_token_id=mask, block_size=block_size, num_layers=layers
    )
    model = DFlashDraftModel(settings, seed=0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5, generator=generator)
    return model


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
