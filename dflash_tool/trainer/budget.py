"""How large a microbatch may be: context tokens and block tokens that fit the drafter's device."""

import torch

from dflash_tool.drafter.config import DrafterConfig
from dflash_tool.schemas.train import TrainConfig

_CPU_CONTEXT_TOKENS = 4096
_SHARE_OF_FREE_MEMORY = 0.5
_KEPT_A_LAYER = (12, 4)  # what autograd keeps of a slot in a layer, in units of hidden and intermediate size


def microbatch_budgets(config: TrainConfig, settings: DrafterConfig, device: torch.device) -> tuple[int, int]:
    """(context tokens, block tokens) of one forward, padding included; a sample above them is one of its own.

    `--microbatch-tokens` decides where it is given: so many context tokens, twice as many block tokens. Otherwise the
    CPU gets what its caches like, and a CUDA device what half of its free memory holds by an estimate from the sizes (a
    microbatch that doesn't fit after all is halved).
    """
    a_sample = config.anchors * config.block_size
    if config.microbatch_tokens is not None:
        return config.microbatch_tokens, max(2 * config.microbatch_tokens, config.block_size)
    if device.type != "cuda":
        return _CPU_CONTEXT_TOKENS, max(2 * _CPU_CONTEXT_TOKENS, config.block_size)
    free, _ = torch.cuda.mem_get_info(device)
    hidden, intermediate = _KEPT_A_LAYER
    layer = 2 * (hidden * settings.hidden_size + intermediate * settings.intermediate_size)
    slot = (
        layer + 2 * settings.hidden_size * settings.num_layers
        if config.grad_checkpointing
        else layer * settings.num_layers
    )
    keys = 4 * settings.num_kv_heads * settings.head_dim * settings.num_layers
    context = 2 * (len(settings.target_layer_ids) + 4) * settings.hidden_size + 2 * keys
    room = free * _SHARE_OF_FREE_MEMORY
    blocks = max(a_sample, min(1 << 18, int(0.7 * room / slot)))
    return max(4096, min(1 << 17, int(0.3 * room / context))), blocks
