"""Small drafters and targets for the drafter's tests, and a few steps of training."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_tool.drafter.anchors import decay_weights, every_anchor, make_blocks
from dflash_tool.drafter.config import drafter_config
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import Loss, decay_loss
from dflash_tool.drafter.model import DFlashDraftModel

LAYERS = (0, 1, 2)
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


def random_target(kind: str, *, tied: bool, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = target_config(kind, tie_word_embeddings=tied, num_hidden_layers=4, **changes)
    return AutoModelForCausalLM.from_config(config).double().eval()


def drafter_for(target: Any, block_size: int, **options: Any) -> DFlashDraftModel:
    settings, _ = drafter_config(
        target.config, target_layer_ids=LAYERS, mask_token_id=60, block_size=block_size, num_layers=1, **options
    )
    return DFlashDraftModel(settings, seed=0).to(target.dtype)


def head_of(target: Any) -> TargetHead:
    return TargetHead(*(x.weight.detach() for x in (target.get_input_embeddings(), target.get_output_embeddings())))


def generate(target: Any, prompt: Tensor, *, tokens: int, **options: Any) -> Tensor:
    out: Tensor = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out


def grade(drafter: DFlashDraftModel, head: TargetHead, states: Tensor, tokens: list[Any], masks: list[Any]) -> Loss:
    blocks = make_blocks(tokens, masks, every_anchor(masks), block_size=drafter.settings.block_size)
    hidden = drafter.draft_blocks(states, head.noise(blocks, 60), blocks)
    return decay_loss(hidden, blocks, decay_weights(blocks.size), head)


def train(drafter: DFlashDraftModel, head: TargetHead, steps: int, data: Any, lr: float = 3e-3) -> None:
    """`data(step)` gives the aux states, tokens and masks of a step."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        loss = grade(drafter, head, *data(step))
        (loss.numerator / loss.denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
