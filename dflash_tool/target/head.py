"""What training needs of a target: its embedding, LM head and final norm, found in the loaded model."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash_tool.errors import TargetError
from dflash_tool.target.decoder import final_norm, find_decoder
from dflash_tool.target.folder import TargetFolder


def write_head(model: Any, target: TargetFolder, folder: Path) -> None:
    """Write `head.safetensors`, the tensors of `head_tensors` in their own dtype, and the target's full config.json.

    Raises TargetError also where the disk refuses.
    """
    tensors = {name: value.detach().contiguous().cpu() for name, value in head_tensors(model, target).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "head.safetensors")
        (folder / "head.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
        (folder / "config.json").write_bytes((target.path / "config.json").read_bytes())
    except (OSError, SafetensorError) as error:
        raise TargetError(
            f"can't write the target's head to {folder}: {error}; check the disk (is it full?) and run the same "
            "command again: committed shards are kept"
        ) from error


def head_tensors(model: Any, target: TargetFolder) -> dict[str, Tensor]:
    """The target's embedding, LM head and final norm, by name, as they are in the model.

    `embed_tokens.weight` [vocab, H]; `embed_tokens.scale` [] float32 where the embedding
    *module* multiplies its rows (Gemma: cast the scale to the weight's dtype, then multiply); `lm_head.weight` (and
    `.bias`) unless the head *is* the embedding: whether they are tied is read from the tensors, not from the config;
    `norm.weight` (and `.bias`), or neither where the decoder ends without a norm or with one that has no weights.
    What kind of norm it is, config.json says.

    Raises TargetError for a model without a head, or whose embedding a drafter of the same width can't use.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None:
        raise TargetError(f"{target.path} has no language-model head: not a causal LLM")
    for name, weight in (("embedding", embedding.weight), ("head", output.weight)):
        if tuple(weight.shape) != (target.vocab_size, target.hidden_size):
            raise TargetError(
                f"{target.path}: the {name} is {tuple(weight.shape)}, expected [vocab, hidden] = "
                f"{(target.vocab_size, target.hidden_size)} as config.json has it: a drafter can't use it"
            )
    tensors = {"embed_tokens.weight": embedding.weight}
    if (scale := _embedding_scale(embedding)) is not None:
        tensors["embed_tokens.scale"] = scale
    if output.weight.data_ptr() != embedding.weight.data_ptr():
        tensors["lm_head.weight"] = output.weight
    if getattr(output, "bias", None) is not None:
        tensors["lm_head.bias"] = output.bias
    norm = final_norm(find_decoder(model))
    if norm is not None:
        tensors |= {f"norm.{name}": value for name, value in norm.named_parameters()}
    return tensors


@torch.inference_mode()
def _embedding_scale(embedding: Any) -> Tensor | None:
    """What the embedding module multiplies its rows by; None for 1. TargetError if it does anything else."""
    weight: Tensor = embedding.weight
    ids = torch.arange(min(8, len(weight)), device=weight.device)
    rows = embedding(ids)
    if torch.equal(rows, weight[ids]):
        return None
    scale = torch.as_tensor(getattr(embedding, "embed_scale", 1.0)).float()
    if scale.ndim or not torch.equal(rows, weight[ids] * scale.to(weight.dtype)):
        raise TargetError(
            f"{type(embedding).__name__} does more than look rows up and scale them: a drafter can't use this embedding"
        )
    return scale
