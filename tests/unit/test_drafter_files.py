"""The servable folder: bit-equal after a round trip, read in every layout, refused by name where it can't be served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_tool.drafter.config import other_target
from dflash_tool.drafter.files import load_drafter, read_drafter_config, save_drafter
from dflash_tool.errors import DflashError

from .drafter_kit import ROPES, normal, small_drafter, target_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(small_drafter(), tmp_path)
    return tmp_path


def change(folder: Path, **changes: Any) -> None:
    """Set (or with ... delete) keys of the config; `inner_*` are those of dflash_config."""
    raw = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        where, key = (raw["dflash_config"], name[6:]) if name.startswith("inner_") else (raw, name)
        if value is ...:
            del where[key]
        else:
            where[key] = value
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_round_trip_is_bit_equal(rope: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = small_drafter(target_config(rope_parameters=dict(ROPES[rope])))
    save_drafter(model, tmp_path / "new", dtype=dtype)
    again = load_drafter(tmp_path / "new")
    assert again.settings == model.settings
    assert again.dtype == (dtype or torch.float64)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(again.dtype))
    assert torch.equal(again.rope.inv_freq, model.rope.inv_freq)
    model = model.to(again.dtype)
    states, noise = normal(1, 7, 72).to(again.dtype), normal(1, 5, 24).to(again.dtype)
    with torch.no_grad():
        assert torch.equal(again(noise, states).last_hidden_state, model(noise, states).last_hidden_state)
    assert json.loads((tmp_path / "new/config.json").read_text())["dtype"] == str(again.dtype).removeprefix("torch.")


def test_the_file_holds_no_prefix_no_embedding_no_head(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        assert stored.metadata() == {"format": "pt"}
    assert names == set(small_drafter().state_dict())
    assert all(name.startswith(("fc.", "hidden_norm.", "norm.", "layers.")) for name in names)


def test_another_dtype_on_loading(folder: Path) -> None:
    assert load_drafter(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert not load_drafter(folder).training
    assert all(parameter.requires_grad for parameter in load_drafter(folder).parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": ..., "mask_token_id": ..., "target_layer_ids": ...},
        {"inner_block_size": ..., "mask_token_id": ..., "target_layer_ids": ...},  # z-lab's own folders
        {"dflash_config": ...},
        {"rope_parameters": ..., "rope_scaling": None},  # before transformers 5
        {"rope_theta": ...},
        {"architectures": ...},
        {"sliding_window": 4096},  # not used: use_sliding_window is false
        {"layer_types": ...},
        {"inner_final_logit_softcapping": None, "is_causal": False},
    ],
)
def test_every_usual_layout_is_read(folder: Path, changes: dict[str, Any]) -> None:
    change(folder, **changes)
    assert read_drafter_config(folder) == small_drafter().settings
    load_drafter(folder)


def test_old_scaling_is_read(folder: Path) -> None:
    change(folder, rope_parameters=..., rope_theta=500000.0, rope_scaling={**ROPES["llama3"], "rope_theta": None})
    assert read_drafter_config(folder).rope == ROPES["llama3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7, "inner_block_size": 7}, "Qwen3DSparkModel is one of"),
        ({"markov_rank": 0}, "off by one"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel, expected DFlashDraftModel"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention: engines disagree"),
        ({"use_sliding_window": True, "sliding_window": 99}, "a sliding window of 99"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"inner_final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ({"inner_input_embedding_scale": 2.0}, "input_embedding_scale"),
        ({"block_size": 8}, "block_size = 8 at its top level and 5"),
        ({"block_size": ..., "inner_block_size": ...}, "lacks block_size"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"block_size": 0, "inner_block_size": 0}, "block_size = 0: expected a whole number"),
        ({"block_size": 1, "inner_block_size": 1}, "block-size 1: a block is the anchor and at least one draft"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"hidden_size": 10**12}, "hidden_size = 1000000000000: expected a whole number"),
        ({"rope_theta": 5000.0}, "rope_theta = 5000.0 at its top level and 10000 in rope_parameters"),
        ({"target_layer_ids": [0, 2], "inner_target_layer_ids": [0, 2]}, "names 2 layers, fc.weight takes 3"),
        ({"target_layer_ids": ..., "inner_target_layer_ids": ...}, "lacks target_layer_ids"),
        ({"inner_mask_token_id": 3}, "mask_token_id = 60 at its top level and 3"),
        ({"inner_sample_from_anchor": True}, "sample_from_anchor is on"),
        ({"target_layer_ids": [0, 2, 5], "inner_target_layer_ids": [0, 2, 5]}, "5 is the last layer"),
        ({"mask_token_id": "x", "inner_mask_token_id": "x"}, "mask_token_id = 'x'"),
        ({"mask_token_id": 61, "inner_mask_token_id": 61}, "describes no drafter that can be served: mask-token-id 61"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x': expected a small number"),
        ({"initializer_range": float("nan")}, "initializer_range = nan"),
        ({"rope_parameters": 3}, "can't be read as a drafter's config"),
        ({"layer_types": 7}, "can't be read as a drafter's config"),
        ({"attention_bias": []}, r"attention_bias = \[\]"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope can't be served"),
        ({"intermediate_size": 48}, r"gate_proj.weight is \[40, 24\], expected \[48, 24\]"),
        ({"num_hidden_layers": 3}, "layers.2.* is missing"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    change(folder, **changes)
    with pytest.raises(DflashError, match=message) as refused:
        load_drafter(folder)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "fc.weight is missing"),
        (
            lambda tensors: tensors.update({"fc2.weight": tensors.pop("fc.weight")}),
            "fc.weight is missing, fc2.weight is unknown",
        ),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2)}), "lm_head.weight is unknown"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(24, dtype=torch.int8)}), "quantised or mixed"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, spoil: Callable[[dict[str, Any]], object], message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DflashError, match=message):
        load_drafter(folder)


def test_load_drafter_is_at_the_top_and_costs_nothing_until_it_is_asked_for(folder: Path) -> None:
    import subprocess
    import sys

    import dflash_tool

    assert dflash_tool.load_drafter is load_drafter
    assert dflash_tool.load_drafter(folder).settings == small_drafter().settings
    code = "import dflash_tool, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'load_draft'"):
        dflash_tool.load_draft  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"hidden_size": 32}, ["hidden size: the drafter says 24, the target 32"]),
        ({"vocab_size": 62}, ["vocabulary: the drafter says 61, the target 62"]),
        (
            {"num_hidden_layers": 4},
            ["number of target layers: the drafter says 6, the target 4", "4 out of range, the target allows 0..2"],
        ),
    ],
)
def test_another_target_is_told_apart(changes: dict[str, Any], says: list[str]) -> None:
    found = other_target(small_drafter().settings, target_config(**changes))
    assert len(found) == len(says)
    assert all(part in text for part, text in zip(says, found, strict=True))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"there is no config\.json"):
        load_drafter(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(DflashError, match="can't be read as a drafter's config"):
        load_drafter(tmp_path)
    save_drafter(small_drafter(), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DflashError, match=r"model\.safetensors can't be read"):
        load_drafter(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DflashError, match=r"model\.safetensors can't be read"):
        load_drafter(tmp_path)
