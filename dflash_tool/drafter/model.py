# ruff: noqa: N803 - tensor names carry their shape
"""`DFlashDraftModel`: the drafter, as transformers' DFlash generation calls it and as training needs it.

    feature = hidden_norm(fc(aux hidden states, concatenated))         once a position, shared by all layers
    x = noise embeddings [anchor, mask, mask, ...];  x = layer(x, feature) for each layer;  norm(x)

Generation runs one block after a cache of earlier keys and values (`forward`); training runs all blocks of a
microbatch beside each other, over context keys that are computed once a layer (`draft_blocks`). Embedding and LM head
are the target's and no part of this model: its state dict is what the served file holds.

Legend: N blocks, B slots a block, R samples (rows), S context positions, L aux layers, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint

from dflash_tool.drafter.anchors import Anchors
from dflash_tool.drafter.attention import Backend, block_attention, plan_attention
from dflash_tool.drafter.config import DrafterConfig
from dflash_tool.drafter.layers import Attend, DecoderLayer, RMSNorm, Rope


class DFlashDraftModel(nn.Module):
    """A DFlash drafter: `fc`, `hidden_norm`, `layers`, `norm`; 11 tensors a layer and 3.

    settings: what it is. config: the same as a transformers config, which DFlash generation reads.
    gradient_checkpointing: recompute each layer in the backward of `draft_blocks`.
    """

    def __init__(self, settings: DrafterConfig, *, seed: int | None = None) -> None:
        """Make a drafter; with a seed its weights do not depend on torch's global generator."""
        super().__init__()
        self.settings = settings
        self.config: Any = settings.qwen3()
        self.gradient_checkpointing = False
        self.fc = nn.Linear(len(settings.target_layer_ids) * settings.hidden_size, settings.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(settings) for _ in range(settings.num_layers))
        self.norm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.rope = Rope(self.config)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Draw every matrix from normal(0, the target's initializer_range); norms are one."""
        generator = None if seed is None else torch.Generator(device=self.device).manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, self.settings.initializer_range, generator=generator)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Any:
        """Draft one block a row in generation: transformers' `DFlashTokenCandidateGenerator` calls this.

        Args:
            noise_embeds: `[R, B, H]`, embeddings of the anchor and of B - 1 mask tokens.
            context_hidden_states: `[R, n, L*H]`, the aux states of the n positions accepted since the last call.
            position_ids: `[R, n + B]`, of those positions and of the block; without them they follow the cache,
                from 0.
            attention_mask: `[R, cached + n + B]`, non-zero for the keys that count; None: all do.
            cache: a transformers cache; every layer appends its keys and values of the n positions **and** of the
                block, which the caller crops. None: there is nothing before the n positions.

        Returns:
            An object whose `last_hidden_state` is `[R, B, H]`, of `noise_embeds`' dtype; slot 0 is the anchor's.
        """
        from transformers.modeling_outputs import BaseModelOutput  # noqa: PLC0415 - slow to import

        new = context_hidden_states.shape[1]
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + new + noise_embeds.shape[1], device=noise_embeds.device)[None]
        cos, sin = self.rope(position_ids, self.dtype)
        feature = self.feature(context_hidden_states)
        x = noise_embeds.to(self.dtype)
        for number, layer in enumerate(self.layers):
            attend = _cached_attention(cache, number, attention_mask)
            x = layer(x, feature, (cos[:, new:], sin[:, new:]), (cos[:, :new], sin[:, :new]), attend)
        return BaseModelOutput(last_hidden_state=self.norm(x).to(noise_embeds.dtype))

    def feature(self, context_hidden_states: Tensor) -> Tensor:
        """Context feature `[R, S, H]` of concatenated aux states `[R, S, L*H]`."""
        if not torch.is_autocast_enabled(context_hidden_states.device.type):  # which casts the states itself
            context_hidden_states = context_hidden_states.to(self.dtype)
        feature: Tensor = self.hidden_norm(self.fc(context_hidden_states))
        return feature

    def draft_blocks(
        self, context_RSF: Tensor, noise_NBH: Tensor, anchors: Anchors, *, backend: Backend | None = None
    ) -> Tensor:
        """Draft all blocks of a microbatch in one forward, as generation would draft each of them alone.

        Args:
            context_RSF: `[R, S, L*H]`, the samples' aux states in the order of `target_layer_ids`, position 0 first.
                What lies behind a sample's end is never seen, but must be finite.
            noise_NBH: embeddings of each block's anchor token and of its mask tokens.
            anchors: where the N blocks begin (`Blocks` will do).
            backend: of the attention; by default the device's.

        Returns:
            The blocks' final hidden states `[N, B, H]`, of the weights' dtype; slot k predicts position + k.
        """
        rows, context = context_RSF.shape[:2]
        slots = noise_NBH.shape[1]
        plan = plan_attention(
            anchors,
            samples=rows,
            context=context,
            block_size=slots,
            heads=self.settings.num_heads,
            device=context_RSF.device,
            backend=backend,
        )
        places = torch.arange(context + slots, device=context_RSF.device)
        cos, sin = self.rope(places, self.dtype)
        at = plan.position[:, None] + places[:slots]
        block_rotation, context_rotation = (cos[at], sin[at]), (cos[:context], sin[:context])

        def attend(q: Tensor, k: Tensor, v: Tensor, k_seen: Tensor, v_seen: Tensor) -> Tensor:
            return block_attention(q, k, v, k_seen, v_seen, plan)

        feature = self.feature(context_RSF)
        x = noise_NBH.to(self.dtype)
        for layer in self.layers:
            inputs = (x, feature, block_rotation, context_rotation, attend)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*inputs)
        out: Tensor = self.norm(x)
        return out


def _cached_attention(cache: Any, layer: int, mask: Tensor | None) -> Attend:
    """Attention of one block a row to everything in the cache, to the new context, and to itself."""

    def attend(q: Tensor, k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in ((k_new, k), (v_new, v)))
        if cache is not None:
            keys, values = cache.update(keys, values, layer)
        visible = None if mask is None else (mask != 0)[:, None, None, :]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.to(q.dtype), values.to(q.dtype), attn_mask=visible, enable_gqa=True
        )
        return out.transpose(1, 2)

    return attend
