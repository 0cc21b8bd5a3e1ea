"""The target's embedding and LM head, frozen, from a store's `head/` folder: training needs no target."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflash_tool.drafter.anchors import Blocks
from dflash_tool.errors import StoreError


class TargetHead(nn.Module):
    """What turns tokens into noise embeddings and the drafter's hidden states into logits. Nothing here is trained.

    embedding [V, H]: what the target's embedding *module* returns for each token: its scale, if it has one (Gemma), is
    inside; multipliers outside that module (Granite) are not applied, as in generation. weight [V, H], bias [V] or
    None: of the LM head.
    """

    embedding: Tensor
    weight: Tensor
    bias: Tensor | None

    def __init__(self, embedding: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Wrap tensors; without a `weight` the head is tied to the embedding."""
        super().__init__()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("weight", embedding if weight is None else weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.embedding.shape[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """What the target's embedding module returns for these ids `[...]`: `[..., H]`."""
        return nn.functional.embedding(tokens, self.embedding)

    def noise(self, blocks: Blocks, mask_token_id: int) -> Tensor:
        """Embeddings `[N, B, H]` of the blocks [anchor, mask, mask, ...]."""
        ids = np.full((len(blocks), blocks.size), mask_token_id, np.int64)
        ids[:, 0] = blocks.tokens
        return self.embed(torch.from_numpy(ids).to(self.embedding.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., H]`: the LM head alone, no cap and no scale."""
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def load_head(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> TargetHead:
    """Load a store's `head/`.

    Args:
        folder: holds `head.safetensors`.
        device: where the tensors go.
        dtype: of the LM head and the embeddings (scaled in their stored dtype first); default the stored one.

    Raises:
        StoreError: the file is missing, no safetensors file, or lacks a tensor.
    """
    file = folder / "head.safetensors"
    if not file.is_file():
        raise StoreError(f"{file} is missing: the store is damaged; run the same extract again")
    try:
        with safe_open(file, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{file} can't be read: {error}; run the same extract again") from error
    embedding, weight = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    if embedding is None or (weight is not None and weight.shape != embedding.shape):
        raise StoreError(f"{file} is no target's head: it holds {', '.join(sorted(tensors)) or 'nothing'}")
    return make_head(tensors, device=device, dtype=dtype)


def make_head(
    tensors: Mapping[str, Tensor], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> TargetHead:
    """A head of the tensors that a store's `head/` holds, or that `target.head_tensors` finds in a loaded target."""
    embedding, weight = tensors["embed_tokens.weight"], tensors.get("lm_head.weight")
    scale = tensors.get("embed_tokens.scale")
    if scale is not None:  # a tied head is the embedding without its scale
        weight = embedding if weight is None else weight
        embedding = embedding * scale.to(embedding.dtype)

    def place(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(device=device, dtype=dtype)

    placed = place(embedding)
    assert placed is not None
    return TargetHead(placed, place(weight), place(tensors.get("lm_head.bias")))
