"""A drafter's shape for every family of targets, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config

from dflash_tool.drafter.config import drafter_config
from dflash_tool.drafter.head import load_head
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import ConfigError, StoreError
from dflash_tool.target import open_target, write_head

from .drafter_kit import ROPES, small_drafter, target_config

OPTIONS: dict[str, Any] = {"target_layer_ids": (0, 2, 4), "mask_token_id": 60}


def test_sizes_eps_and_rope_are_the_targets() -> None:
    config, notes = drafter_config(target_config(rope_parameters=dict(ROPES["yarn"])), **OPTIONS)
    assert (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads) == (24, 40, 4, 2)
    assert (config.head_dim, config.rms_norm_eps, config.vocab_size, config.num_target_layers) == (8, 1e-5, 61, 6)
    assert (config.block_size, config.num_layers, config.initializer_range) == (16, 5, 0.2)
    assert config.rope == ROPES["yarn"]
    assert notes == ()


def test_the_json_is_flat_and_complete() -> None:
    config, _ = drafter_config(target_config(), **OPTIONS)
    raw = config.as_json("bfloat16")
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["model_type"] == "qwen3"
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0
    assert raw["layer_types"] == ["full_attention"] * 5
    assert raw["sliding_window"] is None
    assert raw["tie_word_embeddings"] is raw["attention_bias"] is False
    assert raw["dtype"] == "bfloat16"
    own = {"block_size": 16, "mask_token_id": 60, "target_layer_ids": [0, 2, 4]}
    assert raw["dflash_config"] == own
    assert {name: raw[name] for name in own} == own
    named = {
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "attention_dropout",
        "initializer_range", "num_target_layers",
    }  # fmt: skip
    assert named <= raw.keys()
    qwen = config.qwen3()
    assert isinstance(qwen, Qwen3Config)
    assert (qwen.block_size, qwen.mask_token_id, qwen.target_layer_ids) == (16, 60, [0, 2, 4])
    assert (qwen.num_hidden_layers, qwen.sliding_window, qwen.head_dim) == (5, None, 8)


def test_what_a_target_lacks() -> None:
    config, notes = drafter_config(AutoConfig.for_model("gpt2", n_embd=96, n_head=6, n_layer=6), **OPTIONS)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (6, 6, 16, 384)
    assert config.rope == {"rope_type": "default", "rope_theta": 1e6}
    assert notes == ()
    odd, _ = drafter_config(AutoConfig.for_model("gpt2", n_embd=96, n_head=32, n_layer=6), **OPTIONS)
    assert odd.head_dim == 64  # rope needs an even head


def test_partial_rotary_and_moving_scalings_are_left_out_and_said() -> None:
    phi = target_config(
        "phi", rope_parameters={"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}
    )
    config, notes = drafter_config(phi, **OPTIONS)
    assert config.rope == {"rope_type": "default", "rope_theta": 7.0}
    assert "0.5 of each head" in notes[0]
    dynamic = target_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 9.0, "factor": 2.0})
    config, notes = drafter_config(dynamic, **OPTIONS)
    assert config.rope == {"rope_type": "default", "rope_theta": 9.0}
    assert "'dynamic'" in notes[0]


def test_layers_of_different_rope() -> None:
    gemma = target_config("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 3)
    assert drafter_config(gemma, **OPTIONS)[0].rope["rope_theta"] == 1_000_000.0  # not the local layers' 10,000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": (0, 5)}, "5 is the last layer"),
        ({"target_layer_ids": (0, 6)}, "6 is out of range"),
        ({"target_layer_ids": (-1, 2)}, "-1 is out of range"),
        ({"target_layer_ids": (2, 2)}, "once, in ascending order"),
        ({"target_layer_ids": (3, 2)}, "once, in ascending order"),
        ({"target_layer_ids": ()}, "at least one"),
        ({"block_size": 1}, "--block-size 1"),
        ({"num_layers": 0}, "--draft-layers 0"),
        ({"mask_token_id": 61}, r"rows 0\.\.60"),
        ({"mask_token_id": -1}, r"--mask-token-id -1"),
    ],
)
def test_bad_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_config(target_config(), **(OPTIONS | change))


def test_the_vocabulary_is_the_rows_of_the_embedding() -> None:
    config, _ = drafter_config(target_config(), **(OPTIONS | {"mask_token_id": 70}), vocab_size=80)
    assert config.vocab_size == 80


@torch.no_grad()
def test_every_family_has_a_drafter_and_a_head(
    any_family: str, random_target: Callable[..., Path], tmp_path: Path
) -> None:
    folder = open_target(str(random_target(any_family)))
    auto = AutoModelForImageTextToText if any_family in {"gemma3", "llava"} else AutoModelForCausalLM
    target = auto.from_pretrained(folder.path).eval()
    write_head(target, folder, tmp_path)
    head = load_head(tmp_path)
    tokens = torch.arange(97)
    noise = target.get_input_embeddings()(tokens)
    assert torch.equal(head.embed(tokens), noise)  # the module, so Gemma's scale is inside
    states = torch.randn(3, 32)
    assert torch.equal(head.logits(states), target.get_output_embeddings()(states))
    half = load_head(tmp_path, dtype=torch.bfloat16)
    assert half.weight.dtype == half.embedding.dtype == torch.bfloat16
    config, _ = drafter_config(
        folder.config, target_layer_ids=(1, 3), mask_token_id=96, block_size=4, num_layers=1, vocab_size=head.vocab_size
    )
    out = DFlashDraftModel(config, seed=0)(noise[None, :4], torch.randn(1, 6, 64)).last_hidden_state
    assert out.shape == (1, 4, 32)
    assert out.isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_one_tensor(tied: bool, random_target: Callable[..., Path], tmp_path: Path) -> None:
    folder = open_target(str(random_target(tied=tied)))
    write_head(AutoModelForCausalLM.from_pretrained(folder.path), folder, tmp_path)
    for dtype in (None, torch.float64):
        head = load_head(tmp_path, dtype=dtype)
        assert (head.weight.data_ptr() == head.embedding.data_ptr()) == tied
        assert not any(True for _ in head.parameters())  # nothing to train


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is missing"):
        load_head(tmp_path)
    (tmp_path / "head.safetensors").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match="can't be read"):
        load_head(tmp_path)


def test_no_warning_of_transformers_about_the_config(caplog: pytest.LogCaptureFixture) -> None:
    for rope in ROPES.values():
        small_drafter(target_config(rope_parameters=dict(rope)))
    assert not caplog.records
