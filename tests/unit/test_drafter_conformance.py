"""A servable folder held against a plain implementation: right ones pass, wrong ones are named."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_tool.drafter import conformance
from dflash_tool.drafter.conformance import TRAINING, check_folder
from dflash_tool.drafter.files import load_drafter, save_drafter
from dflash_tool.drafter.layers import Rope
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.drafter.plain import PlainDrafter, rotations

from .drafter_kit import ROPES, normal, small_drafter, target_config

Change = Callable[[Path], None]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "ids"), [(5, (0, 2, 4)), (2, (3,))])
def test_what_we_write_conforms(
    rope: str, dtype: torch.dtype, block_size: int, ids: tuple[int, ...], tmp_path: Path
) -> None:
    target = target_config(rope_parameters=dict(ROPES[rope]))
    save_drafter(small_drafter(target, block_size=block_size, ids=ids), tmp_path, dtype=dtype)
    assert check_folder(tmp_path, target) == []


@pytest.mark.parametrize("rope", ROPES)
def test_plain_rope_is_transformers_rope(rope: str) -> None:
    """Formulas of the papers against transformers' code: two that know nothing of each other."""
    model = small_drafter(target_config(rope_parameters=dict(ROPES[rope]), max_position_embeddings=4096))
    turns = rotations(model.settings.as_json(), 1000)
    cos, sin = Rope(model.config)(torch.arange(1000), torch.float64)
    torch.testing.assert_close(turns.real, cos[:, :4], rtol=0, atol=1e-4)
    torch.testing.assert_close(turns.imag, sin[:, :4], rtol=0, atol=1e-4)


def test_plain_and_model_agree_to_rounding(tmp_path: Path) -> None:
    model = small_drafter()
    save_drafter(model, tmp_path)
    states, noise = normal(11, 72), normal(5, 24, seed=1)
    expected = PlainDrafter(tmp_path).draft(states, noise)
    with torch.no_grad():
        torch.testing.assert_close(model(noise[None], states[None]).last_hidden_state[0], expected, rtol=0, atol=1e-5)


def spoil_model(what: str) -> Callable[[DFlashDraftModel], None]:
    def spoil(model: DFlashDraftModel) -> None:
        layer = model.layers[0]
        if what == "rope":
            model.rope.inv_freq = model.rope.inv_freq * 1.05
        elif what == "norm":
            layer.self_attn.k_norm.weight.data.fill_(1.0)
        else:
            model.hidden_norm.eps = 0.5

    return spoil


@pytest.mark.parametrize("what", ["rope", "norm", "eps"])
def test_a_computation_that_is_off_is_seen(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were our model's code wrong, the plain one would tell."""
    save_drafter(small_drafter(), tmp_path)

    def loaded(folder: Path, **options: Any) -> DFlashDraftModel:
        model = load_drafter(folder, **options)
        spoil_model(what)(model)
        return model

    monkeypatch.setattr(conformance, "load_drafter", loaded)
    found = check_folder(tmp_path)
    assert ["in generation" in found[0], "in training" in found[1]] == [True, True]


def config_change(**changes: Any) -> Change:
    """Keys of config.json, and those of the same name in dflash_config and rope_parameters."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            for where in (raw, raw["dflash_config"], raw["rope_parameters"]):
                if name in where:
                    where[name] = value
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def renamed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.self_attn.q_norms.weight"] = tensors.pop("layers.0.self_attn.q_norm.weight")
    save_file(tensors, folder / "model.safetensors")


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def key_change(**changes: Any) -> Change:
    """Keys of config.json at its top level; None takes one away."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text()) | changes
        kept = {name: value for name, value in raw.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def tensor_change(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def each(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({name: change(value) for name, value in tensors.items()}, folder / "model.safetensors")

    return each


def rope_change(**rope: Any) -> Change:
    return key_change(rope_theta=None, rope_parameters={"rope_theta": 1e4, **rope})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (key_change(architectures=None), "architectures is None, engines look for ['DFlashDraftModel']"),
        (key_change(model_type=None), "model_type is None, engines look for 'qwen3'"),
        (key_change(tie_word_embeddings=True), "tie_word_embeddings is true"),
        (key_change(rope_theta=None), "rope_theta is missing at its top level, where some engines look: say 10000"),
        (key_change(dtype="float33"), "dtype is 'float33', expected one of"),
        (key_change(quantization_config={"bits": 4}), "quantization_config is set, but the weights aren't"),
        (key_change(layer_types=["full_attention"] * 5), "layer_types names 5 layers, num_hidden_layers says 2"),
        (key_change(num_hidden_layers=1 << 20), "num_hidden_layers = 1048576: a drafter has few"),
        (key_change(block_size="4"), "block_size = '4' at its top level and"),
        (rope_change(rope_type="yarn"), "rope_type 'yarn' lacks factor"),
        (rope_change(rope_type="llama3", factor=8.0), "lacks low_freq_factor, high_freq_factor"),
        (rope_change(rope_type="linear", factor="x"), "factor = 'x': expected numbers"),
        (rope_change(rope_theta=-4.0), "rope_theta -4: expected a number above 0"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "can't be read as a drafter's config"),
        (tensor_change(torch.zeros_like), "it drafts nothing, all its outputs are 0"),
        (tensor_change(lambda value: value.to(torch.float8_e4m3fn)), "float8_e4m3fn: quantised or mixed"),
    ],
)
def test_damage_of_every_kind_is_named(spoil: Change, says: str, tmp_path: Path) -> None:
    """Also where nothing was recorded at training, and no target is at hand; nothing is raised."""
    save_drafter(small_drafter().float(), tmp_path)
    assert check_folder(tmp_path) == []
    spoil(tmp_path)
    (found,) = check_folder(tmp_path)
    assert says in found


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (renamed, ["layers.0.self_attn.q_norm.weight is missing", "layers.0.self_attn.q_norms.weight is unknown"]),
        (config_change(rope_theta=5000.0), ["config.json: rope_theta is 5000.0, its target's 10000.0"]),
        (config_change(target_layer_ids=[0, 4]), ["target_layer_ids names 2 layers, fc.weight takes 3"]),
        (config_change(block_size=0), ["block_size = 0: expected a whole number"]),
        (config_change(layer_types=["full_attention", "sliding_attention"]), ["sliding_attention", "windows"]),
        (config_change(use_sliding_window=True, sliding_window=64), ["a sliding window of 64"]),
        (config_change(num_target_layers=9), ["number of target layers: the drafter says 9, the target 6"]),
        (config_change(vocab_size=99), ["vocabulary: the drafter says 99, the target 61"]),
        (not_finite, ["norm.weight holds NaN or Inf"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors can't be read"]),
        (lambda folder: (folder / "config.json").unlink(), ["there is no config.json"]),
    ],
)
def test_a_wrong_folder_is_named(spoil: Change, says: list[str], tmp_path: Path) -> None:
    save_drafter(small_drafter().float(), tmp_path)
    assert check_folder(tmp_path, target_config()) == []
    spoil(tmp_path)
    (found,) = check_folder(tmp_path, target_config())
    assert all(words in found for words in says)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (config_change(mask_token_id=7), "config.json: mask_token_id is 7, but 60 was trained"),
        (config_change(target_layer_ids=[0, 1, 4]), "target_layer_ids is [0, 1, 4], but [0, 2, 4] was"),
        (config_change(rope_theta=5000.0), "rope_theta is 5000.0, but 10000.0 was trained"),
        (config_change(block_size=4), "block_size is 4, but 5 was trained"),
        (lambda folder: (folder / TRAINING).write_text("{}"), "training.json is damaged"),
    ],
)
def test_what_was_trained_is_on_record(spoil: Change, says: str, tmp_path: Path) -> None:
    model = small_drafter()
    save_drafter(model, tmp_path)
    (tmp_path / TRAINING).write_text(json.dumps({"drafter": asdict(model.settings)}))
    assert check_folder(tmp_path) == []
    spoil(tmp_path)
    assert [says in found for found in check_folder(tmp_path)] == [True]
