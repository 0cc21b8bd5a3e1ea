"""Whether a servable folder is what engines expect, and whether this project computes what its files say.

1. the files: config.json's keys, tensor names, shapes and dtypes, nothing missing or extra (`files.load_drafter`);
2. `training.json`, where an export wrote one: block size, mask token, ids, rope and sizes as they were trained;
3. the target, if its config is at hand: sizes, ids, rope;
4. the numbers: random inputs through `plain.PlainDrafter`, through generation's cached call and through training's
   attention, all three compared.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_tool.drafter.anchors import Anchors
from dflash_tool.drafter.config import DrafterConfig, drafter_rope, other_target
from dflash_tool.drafter.files import load_drafter
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.drafter.plain import PlainDrafter
from dflash_tool.errors import DflashError

TRAINING = "training.json"
TOLERANCE = 1e-3  # of the largest value; fp32 against fp64 gives about 1e-5, a forgotten norm or a wrong angle 1e-1
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_CONTEXT, _NEWER = 9, 4  # positions that the first and the second call bring


def check_folder(folder: Path, target: Any = None) -> list[str]:
    """All that is off with a drafter's folder, in sentences; empty if nothing is.

    target: a transformers config, to check sizes, layer ids and rope against. Raises nothing for a wrong folder.
    """
    try:
        model = load_drafter(folder, dtype=torch.float32)
    except DflashError as error:
        return [str(error)]
    values = model.state_dict().items()
    found = [f"model.safetensors: {name} holds NaN or Inf" for name, value in values if not value.isfinite().all()]
    found += _keys(folder, model.settings)
    found += _as_trained(folder, model.settings)
    if target is not None:
        found += other_target(model.settings, target)
        found += _other_rope(model.settings, target)
    return found or _numbers(folder, model)


def _keys(folder: Path, settings: DrafterConfig) -> list[str]:
    """What our own loader makes no use of, but engines choose their code by."""
    raw = json.loads((folder / "config.json").read_text())
    found = [
        f"config.json: {name} is {raw.get(name)!r}, engines look for {wanted!r}"
        for name, wanted in (("architectures", ["DFlashDraftModel"]), ("model_type", "qwen3"))
        if raw.get(name) != wanted
    ]
    if raw.get("tie_word_embeddings"):
        found.append("config.json: tie_word_embeddings is true, but there is no embedding to tie: say false")
    if raw.get("rope_theta") is None:
        theta = settings.rope["rope_theta"]
        found.append(f"config.json: rope_theta is missing at its top level, where some engines look: say {theta:g}")
    if (kind := raw.get("dtype", raw.get("torch_dtype"))) not in _DTYPES:
        found.append(f"config.json: dtype is {kind!r}, expected one of {', '.join(_DTYPES)}")
    if raw.get("quantization_config"):
        found.append("config.json: quantization_config is set, but the weights aren't quantised: take it out")
    kinds = raw.get("layer_types")
    if kinds is not None and len(kinds) != settings.num_layers:
        found.append(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers says {settings.num_layers}"
        )
    return found


def _as_trained(folder: Path, settings: DrafterConfig) -> list[str]:
    """In what config.json differs from the record that an export wrote beside it."""
    file = folder / TRAINING
    if not file.exists():
        return []
    try:
        then = _flat(json.loads(file.read_text())["drafter"])
        now = _flat(json.loads(json.dumps(asdict(settings))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{TRAINING} is damaged ({error!r}): export the drafter again"]
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    return [f"config.json: {name} is {now.get(name)}, but {then.get(name)} was trained ({TRAINING})" for name in names]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """With the entries of `rope` beside the others."""
    return {**settings, **settings["rope"], "rope": None}


def _other_rope(settings: DrafterConfig, target: Any) -> list[str]:
    wanted, _ = drafter_rope(target.get_text_config(decoder=True))
    ours = dict(settings.rope)
    names = sorted(name for name in {*wanted, *ours} if wanted.get(name) != ours.get(name))
    return [f"config.json: {name} is {ours.get(name)}, its target's {wanted.get(name)}" for name in names]


@torch.inference_mode()
def _numbers(folder: Path, model: DFlashDraftModel) -> list[str]:
    """Three implementations on the same random inputs: in two calls with a cache, in one of all blocks, and plainly."""
    from transformers import DynamicCache  # noqa: PLC0415 - slow to import

    settings = model.settings
    block, hidden = settings.block_size, settings.hidden_size
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_CONTEXT + _NEWER, len(settings.target_layer_ids) * hidden, generator=generator)
    noise = torch.randn(2, block, hidden, generator=generator)
    ends = (_CONTEXT, _CONTEXT + _NEWER)
    plain = PlainDrafter(folder)
    expected = torch.stack([plain.draft(states[:end], noise[number]) for number, end in enumerate(ends)])

    cache, cached, start = DynamicCache(), [], 0
    for number, end in enumerate(ends):
        positions = torch.arange(start, end + block)[None]
        cached.append(model(noise[number, None], states[None, start:end], positions, None, cache).last_hidden_state[0])
        cache.crop(-block)
        start = end
    anchors = Anchors(np.zeros(2, np.int64), np.array(ends))
    beside = model.draft_blocks(states[None], noise, anchors)

    largest = float(expected.abs().max())
    if not largest:
        return ["model.safetensors: it drafts nothing, all its outputs are 0"]
    found = []
    for what, got in (("in generation", torch.stack(cached)), ("in training", beside)):
        off = float((got.double() - expected).abs().max()) / largest
        if not off <= TOLERANCE:  # NaN too
            found.append(f"drafts {what} differ from a plain computation by {off:.2g} of the largest value")
    return found
