"""Loading a target: its device, its dtypes, its weights as transformers reads them, all of them and none made up."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dflash_tool.errors import ConfigError, TargetError
from dflash_tool.schemas.config import ComputeDtype
from dflash_tool.target.folder import TargetFolder
from dflash_tool.wording import counted, verb

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, option: str = "--target-device") -> torch.device:
    """`auto` is this rank's CUDA device, otherwise the CPU. ConfigError for what torch doesn't have here."""
    if name == "auto":
        own = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", own) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{option}: {name!r} is not a device here: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{option}: {name!r} is not supported; allowed are cpu and cuda")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def compute_dtype(dtype: ComputeDtype, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA, float32 on the CPU (where bfloat16 is slower)."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[dtype]


def load_weights(target: TargetFolder, trust_remote_code: bool) -> Any:
    """The whole model on the CPU, in its weights' own dtype. TargetError if it can't be loaded or is not all there."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415 - slow to import
    from transformers.utils import logging  # noqa: PLC0415

    # Some models are known under a multimodal class alone; what is captured is their text decoder.
    kind = type(target.config)
    multimodal = kind not in AutoModelForCausalLM._model_mapping and kind in AutoModelForImageTextToText._model_mapping
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    logging.disable_progress_bar()  # the panel shows that the target is loading
    logging.set_verbosity_error()  # no advice on masks, which `probe` decides about; missing weights are an error below
    try:
        model, info = loader.from_pretrained(
            target.path,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # files, missing packages, a model's own code
        raise TargetError(f"{target.path}: transformers can't load these weights: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise TargetError(
            f"{target.path}: {counted(len(missing), 'tensor')} of {type(model).__name__} "
            f"{verb(len(missing), 'is', 'are')} not in its safetensors files "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}): {verb(len(missing), 'it', 'they')} "
            "would be random; is the download complete, and this the model's own config.json?"
        )
    return model.eval()


def load_whole(target: TargetFolder, device: torch.device, dtype: torch.dtype) -> Any:
    """The whole model, head and all, on a device: to generate with. TargetError if it can't be loaded there."""
    model = load_weights(target, trust_remote_code=False)
    cast(model, dtype)
    try:
        return model.to(device).requires_grad_(False)
    except torch.OutOfMemoryError as error:
        size = sum(parameter.nbytes for parameter in model.parameters()) / 2**30
        raise TargetError(f"{target.path}: this target takes {size:.1f} GiB, more than is free on {device}") from error


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers; computed buffers (rope's inverse frequencies) stay in float32.

    So do parameters that transformers kept in float32 inside a model of lower precision (a router's bias).
    """
    own = next(module.parameters()).dtype
    for name, parameter in module.named_parameters():
        if parameter.dtype not in DTYPES.values():
            raise TargetError(
                f"this target's weights are quantised ({name} is {parameter.dtype}): not supported; convert them to "
                "bfloat16 and save them with `save_pretrained`"
            )
        if parameter.dtype == own or dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
    saved: Mapping[str, Tensor] = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
