"""The servable folder (z-lab's layout): `config.json` and `model.safetensors`, as vLLM and SGLang load them.

The tensors have no prefix; embedding and LM head are the target's and not in it. Reading takes z-lab's own folders too
(block size, mask token and layer ids at the top level or inside `dflash_config`) and refuses, by name, what this
model would compute differently from how it was trained.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_tool.drafter.config import DrafterConfig, drafter_rope
from dflash_tool.drafter.layers import Rope
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import ConfigError, DflashError

# What other drafters' configs may say that this model does not do, and the value that asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_causal": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "markov_rank": 0,
}
_LARGEST, _MOST_LAYERS = 1 << 24, 1 << 10  # of any size in a config; the model is built before its file is read
_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # float8 would need its scales
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_target_layers": "num_target_layers",
}


def save_drafter(model: DFlashDraftModel, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the servable folder (made if need be) of a drafter.

    dtype: of the weights in the file; default the model's own, which a later load gives back bit for bit.
    """
    dtype = dtype or model.dtype
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.settings.as_json(str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_drafter(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> DFlashDraftModel:
    """Read a servable folder.

    Args:
        folder: with `config.json` and `model.safetensors`.
        device: where the weights go.
        dtype: of the weights; default that of the file.

    Raises:
        DflashError: a file is missing or damaged, or the drafter is of a kind that can't be served as it was trained.
    """
    folder = Path(folder)
    settings = read_drafter_config(folder)
    with torch.device("meta"):
        model = DFlashDraftModel(settings)
    tensors = _tensors(folder / "model.safetensors", model.state_dict(), settings)
    model.load_state_dict(tensors, assign=True)
    model.rope = Rope(model.config)
    return model.to(device=device, dtype=dtype).eval()


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read and check a folder's `config.json` alone. Raises DflashError as `load_drafter` does."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
        inner = dict(raw.get("dflash_config") or {})
        _refuse_other_kinds(file, raw, inner)
        return _settings(file, raw, inner)
    except FileNotFoundError as error:
        run = f" (this is a run: its drafter is {folder / 'checkpoints' / 'best'})"
        hint = run if (folder / "checkpoints").is_dir() else ""
        raise DflashError(f"no drafter in {folder}: there is no config.json{hint}") from error
    except ConfigError as error:
        raise DflashError(f"{file} describes no drafter that can be served: {str(error).removeprefix('--')}") from error
    except (OSError, ValueError, AttributeError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise DflashError(f"{file} can't be read as a drafter's config: {error}") from error


def _settings(file: Path, raw: Mapping[str, Any], inner: Mapping[str, Any]) -> DrafterConfig:
    ids = _either(file, raw, inner, "target_layer_ids")
    if missing := [name for name in _SIZES.values() if name not in raw]:
        raise DflashError(f"{file} lacks {', '.join(missing)}: not a drafter in z-lab's layout")
    block_size, mask_token = (_either(file, raw, inner, name) for name in ("block_size", "mask_token_id"))
    sizes = {name: raw[name] for name in _SIZES.values()} | {"block_size": block_size}
    odd = [
        f"{name} = {value!r}" for name, value in sizes.items() if type(value) is not int or not 1 <= value <= _LARGEST
    ]
    odd += [
        f"{name} = {value!r}" for name, value in (("mask_token_id", mask_token), *_each(ids)) if type(value) is not int
    ]
    if odd:
        raise DflashError(f"{file} says {', '.join(odd)}: expected a whole number, 1 or more (of block_size: 2)")
    if (layers := raw["num_hidden_layers"]) > _MOST_LAYERS:
        raise DflashError(f"{file} says num_hidden_layers = {layers}: a drafter has few, at most {_MOST_LAYERS:,}")
    small = {"rms_norm_eps": raw.get("rms_norm_eps"), "initializer_range": raw.get("initializer_range", 0.02)}
    if odd := [
        f"{name} = {value!r}" for name, value in small.items() if type(value) is not float or not 0 <= value < 1
    ]:
        raise DflashError(f"{file} says {', '.join(odd)}: expected a small number, such as 1e-6 or 0.02")
    rope, notes = drafter_rope(SimpleNamespace(**raw))
    if notes:
        raise DflashError(f"{file}: its rope can't be served: {'; '.join(notes)}")
    if (theta := raw.get("rope_theta")) is not None and theta != rope["rope_theta"]:
        raise DflashError(
            f"{file} says rope_theta = {theta} at its top level and {rope['rope_theta']:g} in rope_parameters; "
            "engines would differ: mend it"
        )
    return DrafterConfig(
        **{field: raw[name] for field, name in _SIZES.items()},
        **small,
        rope=rope,
        target_layer_ids=tuple(ids),
        block_size=block_size,
        mask_token_id=mask_token,
    )


def _each(ids: Any) -> list[tuple[str, Any]]:
    return [("a target_layer_id", layer) for layer in ids]


def _refuse_other_kinds(file: Path, raw: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
    """Raise DflashError for a drafter that this model would run differently from how it was trained."""
    kinds = raw.get("architectures") or []
    shifted = "slot 0 predicts the token after the anchor, one position further than DFlash's, so its drafts would all "
    if any("DSpark" in kind for kind in kinds) or "markov_rank" in raw:
        raise DflashError(
            f"{file}: {', '.join(kinds) or 'a drafter with markov_rank'} is one of DeepSpec's: its {shifted}be off by "
            "one; it can't be used here"
        )
    if raw.get("sample_from_anchor") or inner.get("sample_from_anchor"):
        raise DflashError(f"{file}: sample_from_anchor is on: its {shifted}be off by one; it can't be used here")
    if kinds and kinds != ["DFlashDraftModel"]:
        raise DflashError(f"{file}: architecture {', '.join(kinds)}, expected DFlashDraftModel; it can't be used here")
    if raw.get("model_type", "qwen3") != "qwen3":
        raise DflashError(f"{file}: model_type {raw['model_type']!r}, expected qwen3; it can't be used here")
    for name, neutral in _NEUTRAL.items():
        for where in (raw, inner):
            if where.get(name) is not None and where[name] != neutral:
                raise DflashError(f"{file}: {name} = {where[name]!r} is not supported, only {neutral!r}")
    windows = set(raw.get("layer_types") or []) - {"full_attention"}
    if windows or (raw.get("use_sliding_window") and raw.get("sliding_window")):
        what = ", ".join(sorted(windows)) or f"a sliding window of {raw['sliding_window']}"
        raise DflashError(
            f"{file}: {what}: engines disagree about windows inside a block; only full_attention layers are supported"
        )


def _either(file: Path, raw: Mapping[str, Any], inner: Mapping[str, Any], name: str) -> Any:
    """A value from the top level or `dflash_config`; DflashError if it is in neither, or differs between them."""
    found = [where[name] for where in (raw, inner) if where.get(name) is not None]
    if not found:
        raise DflashError(f"{file} lacks {name}, at its top level and in dflash_config: not a DFlash drafter's config")
    if any(value != found[0] for value in found):
        raise DflashError(
            f"{file} says {name} = {found[0]!r} at its top level and {found[1]!r} in dflash_config; mend it"
        )
    return found[0]


def _tensors(file: Path, expected: Mapping[str, Tensor], settings: DrafterConfig) -> dict[str, Tensor]:
    """The tensors of a file, which must be exactly those expected, of the same shapes and one floating dtype."""
    try:
        with safe_open(file, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise DflashError(f"{file} can't be read: {error}; write or download the drafter again") from error
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    wrong += [f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys())]
    wrong += [
        f"{name} is {list(tensors[name].shape)}, expected {list(value.shape)}"
        for name, value in expected.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    fc, named = tensors.get("fc.weight"), len(settings.target_layer_ids)
    if fc is not None and fc.ndim == 2 and fc.shape[1] not in {0, named * settings.hidden_size}:
        wrong.insert(
            0, f"target_layer_ids names {named} layers, fc.weight takes {fc.shape[1] / settings.hidden_size:g}"
        )
    if wrong:
        more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise DflashError(
            f"{file} doesn't hold the {len(expected)} tensors of its config.json: {', '.join(wrong[:4])}{more}"
        )
    if len(kinds := {value.dtype for value in tensors.values()}) > 1 or not kinds <= _DTYPES:
        raise DflashError(
            f"{file} holds {', '.join(sorted(map(str, kinds)))}: quantised or mixed weights are not supported"
        )
    return tensors
