"""Every decoder-only family alike: capture, truncation, padding, head, against transformers' own whole model."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from dflash_tool.errors import TargetError
from dflash_tool.schemas.config import LayerId
from dflash_tool.target import TargetModel, head_bytes, open_target
from dflash_tool.target.decoder import final_norm, find_decoder

CPU = torch.device("cpu")
LENGTHS = np.array([3, 17, 40, 40, 1])  # windows are 8, LongRoPE switches at 20
NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


def _batch(padding: int = 0) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 94, length) for length in LENGTHS]  # 94: the image token of the nested ones
    padded = np.full((len(rows), 40), padding, np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded, rows


def _load(folder: Path, layers: tuple[LayerId, ...], head: Path | None = None) -> TargetModel:
    return TargetModel.load(
        open_target(str(folder)), layers=layers, device=CPU, dtype=torch.float32, store_dtype="float32", head=head
    )


def _whole(folder: Path, **kwargs: Any) -> Any:
    nested = open_target(str(folder)).config.model_type == "llava"
    return (AutoModelForImageTextToText if nested else AutoModelForCausalLM).from_pretrained(folder, **kwargs).eval()


def _known_norm(whole: Any) -> torch.nn.Module:
    """The final norm by its name: the library finds it by what it does."""
    decoder = whole.get_decoder()
    return next(getattr(decoder, name) for name in NORMS if hasattr(decoder, name))


@torch.no_grad()
def _one_by_one(whole: Any, rows: list[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
    """hidden_states[k] of every sample in a batch of its own, one after the other; k = 0 is the embedding."""
    runs = [whole(input_ids=torch.from_numpy(row)[None], output_hidden_states=True).hidden_states for row in rows]
    return [np.concatenate([run[k][0].numpy() for run in runs]) for k in range(len(runs[0]))]


def _equal(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_equals_batch_of_one(random_target: Callable[..., Path], tmp_path: Path, any_family: str) -> None:
    folder = random_target(any_family)
    padded, rows = _batch()
    whole = _whole(folder)
    expected = _one_by_one(whole, rows)
    target = _load(folder, (0, 1, 4, "final"), tmp_path)
    captured = target.capture(padded, LENGTHS)
    assert list(captured.states) == [0, 1, 4, "final"]
    assert captured.finite.all()
    for layer in (0, 1, 4):
        _equal(captured.states[layer], expected[layer + 1])
    assert len(expected) == 7
    # The last layer's: not normed, and normed by the head's norm alone it is the model's own output.
    norm = copy.deepcopy(_known_norm(whole))
    tensors = load_file(tmp_path / "head.safetensors")
    norm.load_state_dict({name[5:]: value for name, value in tensors.items() if name.startswith("norm.")})
    with torch.no_grad():
        final = torch.from_numpy(captured.states["final"].copy())
        _equal(norm(final).numpy(), expected[6])
    assert np.abs(final.numpy() - expected[6]).max() > 0.1
    # Other padding: the same rows. Fewer layers: the same rows.
    other = target.capture(_batch(55)[0], LENGTHS)
    truncated = _load(folder, (1,))
    assert len(find_decoder_layers(truncated)) == 2
    _equal(other.states["final"], captured.states["final"])
    _equal(truncated.capture(padded, LENGTHS).states[1], captured.states[1])


def find_decoder_layers(target: TargetModel) -> torch.nn.ModuleList:
    lists = [module for module in target.decoder.children() if isinstance(module, torch.nn.ModuleList)]
    assert len(lists) == 1
    return lists[0]


@pytest.mark.parametrize("tied", [True, False])
def test_head_gives_the_model_s_embeddings_and_logits(
    random_target: Callable[..., Path], tmp_path: Path, any_family: str, tied: bool
) -> None:
    folder = random_target(any_family, tied=tied)
    _load(folder, (0,), tmp_path)
    tensors = load_file(tmp_path / "head.safetensors")
    whole = _whole(folder)
    ids = torch.arange(1, 13)
    with torch.no_grad():
        out = whole(input_ids=ids[None], output_hidden_states=True)
        embedded = whole.get_input_embeddings()(ids)
    assert ("lm_head.weight" in tensors) is not tied
    assert ("lm_head.bias" in tensors) is (any_family == "phi")
    assert ("embed_tokens.scale" in tensors) is any_family.startswith("gemma")
    torch.testing.assert_close(
        tensors["embed_tokens.weight"][ids] * tensors.get("embed_tokens.scale", torch.tensor(1.0)), embedded
    )
    weight = tensors.get("lm_head.weight", tensors["embed_tokens.weight"])
    logits = out.hidden_states[-1] @ weight.T + tensors.get("lm_head.bias", torch.zeros(97))
    torch.testing.assert_close(logits, out.logits, rtol=1e-5, atol=1e-5)
    for name, value in _known_norm(whole).named_parameters():
        assert torch.equal(tensors[f"norm.{name}"], value)
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    written += sum(file.stat().st_size for file in folder.glob("tokenizer*"))
    assert head_bytes(open_target(str(folder))) == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3_moe", "gemma3_text"])
def test_eager_attention(random_target: Callable[..., Path], family: str) -> None:
    folder = random_target(family)
    padded, rows = _batch()
    model = _whole(folder, attn_implementation="eager")
    target = TargetModel(model, layers=(1, 4), device=CPU, dtype=torch.float32, store_dtype="float32")
    captured = target.capture(padded, LENGTHS)
    expected = _one_by_one(_whole(folder, attn_implementation="eager"), rows)
    for layer in (1, 4):
        _equal(captured.states[layer], expected[layer + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_only_where_padding_would_be_seen(
    random_target: Callable[..., Path], any_family: str, dtype: torch.dtype
) -> None:
    target = TargetModel(_whole(random_target(any_family)), layers=(1,), device=CPU, dtype=dtype, store_dtype="float32")
    assert target.masked is any_family.endswith(":bidirectional")


def test_a_model_that_no_mask_helps_is_refused(random_target: Callable[..., Path]) -> None:
    """One whose rows see the mean of the padded row."""
    model = _whole(random_target("llama"))
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output + output.mean(1, keepdim=True))
    with pytest.raises(TargetError, match=r"LlamaModel: what pads a batch .* can't be run in padded batches"):
        TargetModel(model, layers=(1,), device=CPU, dtype=torch.float32, store_dtype="float32")


def test_longrope_is_chosen_by_sample(random_target: Callable[..., Path]) -> None:
    """A short row beside a long one would otherwise get the long row's frequencies."""
    folder = random_target("phi3:longrope")
    padded, rows = _batch()
    expected = _one_by_one(_whole(folder), rows)[5]
    target = _load(folder, (4,))
    _equal(target.capture(padded, LENGTHS).states[4], expected)
    target._switch = None
    wrong = target.capture(padded, LENGTHS).states[4]
    assert np.abs(wrong[:20] - expected[:20]).max() > 0.01 * np.abs(expected).max()
    _equal(wrong[20:100], expected[20:100])


def test_no_norm_and_strange_layers(random_target: Callable[..., Path]) -> None:
    model = _whole(random_target("llama"))
    decoder = find_decoder(model)
    model.model.norm = torch.nn.Identity()
    found = final_norm(decoder)
    assert not list(found.parameters() if found else [])
    model.model.layers[1].register_forward_hook(lambda _module, _inputs, output: output[None])
    with pytest.raises(TargetError, match="not one residual stream"):
        TargetModel(model, layers=(1,), device=CPU, dtype=torch.float32, store_dtype="float32")
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:3])
    with pytest.raises(TargetError, match=r"expected one list of 6 decoder layers .* found 0"):
        find_decoder(model)


@pytest.mark.parametrize("family", ["qwen3", "phi3:longrope"])
def test_replicas_share_weights_and_nothing_else(random_target: Callable[..., Path], family: str) -> None:
    """Two threads at a time, other batches: each gets its own rows."""
    first = _load(random_target(family), (1, "final"))
    padded, _ = _batch()
    before = first.capture(padded, LENGTHS)
    second = first.replica()
    for one, other in zip(first.decoder.parameters(), second.decoder.parameters(), strict=True):
        assert one is other
    reverse = padded[::-1].copy()
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            runs = [
                threads.submit(first.capture, padded, LENGTHS),
                threads.submit(second.capture, reverse, LENGTHS[::-1]),
            ]
            mine, theirs = (run.result() for run in runs)
            for layer in (1, "final"):
                _equal(mine.states[layer], before.states[layer])
                ends = np.cumsum(LENGTHS)[:-1]
                parts = np.split(theirs.states[layer], np.cumsum(LENGTHS[::-1])[:-1])
                for ours, expected in zip(parts[::-1], np.split(before.states[layer], ends), strict=True):
                    _equal(ours, expected)
