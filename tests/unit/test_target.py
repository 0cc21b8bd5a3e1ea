"""Capture against a batch-of-one run of the whole model with transformers' own `output_hidden_states`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_tool.errors import ConfigError, TargetError
from dflash_tool.target import (
    TargetModel,
    check_layers,
    default_layers,
    head_bytes,
    open_target,
    resolve_device,
    weights_fingerprint,
    write_head,
)
from dflash_tool.target.loading import cast

CPU = torch.device("cpu")
LENGTHS = np.array([3, 40, 17, 40, 1])


def _load(folder: Path, layers: tuple[int, ...], **kwargs: object) -> TargetModel:
    return TargetModel.load(
        open_target(str(folder)), layers=layers, device=CPU, dtype=torch.float32,
        **{"store_dtype": "float32", **kwargs},
    )  # fmt: skip


def _batch() -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 97, length) for length in LENGTHS]
    padded = np.zeros((len(rows), 40), np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded, rows


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("layers", [(0,), (1, 2, 4), (0, 3)])
def test_equals_batch_of_one(random_target: Callable[..., Path], family: str, layers: tuple[int, ...]) -> None:
    folder = random_target(family)
    padded, rows = _batch()
    captured = _load(folder, layers).capture(padded, LENGTHS)
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    start = 0
    for row in rows:
        with torch.no_grad():
            expected = whole(torch.from_numpy(row)[None], output_hidden_states=True).hidden_states
        for layer in layers:
            ours = captured.states[layer][start : start + len(row)]
            np.testing.assert_allclose(ours, expected[layer + 1][0].numpy(), rtol=1e-5, atol=1e-5)
        start += len(row)
    assert captured.finite.all()
    assert all(states.shape == (LENGTHS.sum(), 32) for states in captured.states.values())


def test_bfloat16_store_is_one_rounding(random_target: Callable[..., Path]) -> None:
    folder = random_target("qwen3")
    padded, _ = _batch()
    exact = _load(folder, (2,)).capture(padded, LENGTHS).states[2]
    stored = _load(folder, (2,), store_dtype="bfloat16").capture(padded, LENGTHS).states[2]
    assert stored.dtype == np.uint16
    expected = torch.from_numpy(exact.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(stored, expected)


def test_padding_and_neighbours_leave_real_rows_alone(random_target: Callable[..., Path]) -> None:
    """Other padding ids, other neighbours of the same lengths: the same bits."""
    target = _load(random_target("llama"), (1, 3))
    padded, _ = _batch()
    before = target.capture(padded, LENGTHS)
    other = padded.copy()
    for place, length in enumerate(LENGTHS):
        other[place, length:] = 55
    after = target.capture(other, LENGTHS)
    other[1:] = np.roll(other[1:], 1, axis=1)
    neighbour = target.capture(other, LENGTHS)
    for layer in (1, 3):
        np.testing.assert_array_equal(after.states[layer], before.states[layer])
        np.testing.assert_array_equal(neighbour.states[layer][: LENGTHS[0]], before.states[layer][: LENGTHS[0]])


def test_keep_drops_rows_not_numbers(random_target: Callable[..., Path]) -> None:
    target = _load(random_target("qwen3"), (1,))
    padded, _ = _batch()
    everything = target.capture(padded, LENGTHS).states[1]
    keep = np.array([True, False, False, True, True])
    some = target.capture(padded, LENGTHS, keep).states[1]
    rows = np.repeat(keep, LENGTHS)
    np.testing.assert_array_equal(some, everything[rows])
    nothing = target.capture(padded, LENGTHS, np.zeros(5, np.bool_))
    assert nothing.states[1].shape == (0, 32)
    assert nothing.finite.shape == (0,)


def test_runs_no_layer_and_no_head_beyond_the_deepest(random_target: Callable[..., Path]) -> None:
    target = _load(random_target("qwen3"), (0, 2))
    modules = dict(target.decoder.named_modules())
    assert [name for name in modules if name.startswith("layers.") and name.count(".") == 1] == [
        "layers.0", "layers.1", "layers.2",
    ]  # fmt: skip
    assert not any("lm_head" in name for name in modules)


def test_a_causal_target_gets_no_attention_mask(random_target: Callable[..., Path]) -> None:
    """It would change no number, and cost the fast paths of attention."""
    target, masks = _load(random_target("qwen3"), (1,)), []

    def look(_module: object, _args: object, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs["attention_mask"])

    target.decoder.register_forward_pre_hook(look, with_kwargs=True)
    target.capture(_batch()[0], LENGTHS)
    assert masks == [None]


def test_non_finite_samples_are_named(random_target: Callable[..., Path]) -> None:
    """A token whose embedding is NaN spoils the samples that hold it, and those alone."""
    target = _load(random_target("qwen3", tied=False), (1, 2))
    padded, _ = _batch()
    padded[padded == 96] = 95
    padded[2, 5] = 96
    embedding = target.decoder.get_input_embeddings()
    embedding.weight[96] = float("nan")
    captured = target.capture(padded, LENGTHS)
    assert captured.finite.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_the_target_s(random_target: Callable[..., Path], tmp_path: Path, tied: bool) -> None:
    folder = random_target("llama", tied=tied)
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    write_head(whole, open_target(str(folder)), tmp_path)
    head = load_file(tmp_path / "head.safetensors")
    assert ("lm_head.weight" in head) is not tied
    ids = torch.arange(12)[None]
    with torch.no_grad():
        out = whole(ids, output_hidden_states=True)
        last = whole.model.norm.__class__(32)
        last.weight.copy_(head["norm.weight"])
        normed = out.hidden_states[-1]
        logits = normed @ head.get("lm_head.weight", head["embed_tokens.weight"]).T
    torch.testing.assert_close(logits, out.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last.weight, whole.model.norm.weight)
    assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()


class _Small:
    """A decoder's forward that runs out of memory above `limit` padded tokens, as `error` says it."""

    def __init__(self, target: TargetModel, limit: int, error: Exception) -> None:
        self.forward, self.limit, self.error = target.decoder.forward, limit, error
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, **kwargs: Any) -> Any:
        if kwargs["input_ids"].numel() > self.limit:
            self.forward(**kwargs)  # hooks run: what they kept must go
            raise self.error
        self.shapes.append(tuple(kwargs["input_ids"].shape))
        return self.forward(**kwargs)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu"])
def test_a_batch_that_does_not_fit_is_halved(
    random_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    target = _load(random_target("qwen3"), (1, 3))
    padded, _ = _batch()
    keep = np.array([True, True, False, True, True])
    whole = target.capture(padded, LENGTHS, keep)
    small = _Small(target, 90, error)
    monkeypatch.setattr(target.decoder, "forward", small)
    parts = target.capture(padded, LENGTHS, keep)
    assert small.shapes == [(2, 40), (1, 17), (2, 40)]
    assert target.halvings == 2
    assert parts.finite.tolist() == [True] * 4
    for layer in (1, 3):
        np.testing.assert_allclose(parts.states[layer], whole.states[layer], rtol=1e-5, atol=1e-5)
    small.limit = 30
    with pytest.raises(TargetError, match=r"a sample of 40 tokens does not fit .* even alone.*--max-length"):
        target.capture(padded, LENGTHS)


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    random_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _load(random_target("qwen3"), (1,))
    monkeypatch.setattr(target.decoder, "forward", _Small(target, 0, RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        target.capture(_batch()[0], LENGTHS)
    assert target.halvings == 0


def test_weights_that_are_not_all_there(random_target: Callable[..., Path], tmp_path: Path) -> None:
    """transformers would fill what is missing with random numbers."""
    folder = shutil.copytree(random_target("qwen3"), tmp_path / "target")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TargetError, match=r"1 tensor of Qwen3ForCausalLM is not in .*layers\.2\.mlp\.up_proj"):
        _load(folder, (1,))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TargetError, match="can't load these weights"):
        _load(folder, (1,))
    with pytest.raises(TargetError, match="not a readable safetensors file"):
        head_bytes(open_target(str(folder)))


def test_quantised_weights_are_refused(random_target: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_target("llama"))
    weight = torch.zeros(48, 32, dtype=torch.int8)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(TargetError, match=r"quantised .*int8"):
        TargetModel(model, layers=(1,), device=CPU, dtype=torch.float32, store_dtype="float32")


def test_what_transformers_keeps_in_float32_stays_so(random_target: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_target("qwen3"), dtype=torch.bfloat16)
    kept = model.model.layers[0].input_layernorm.weight
    kept.data = kept.data.float()
    cast(model, torch.float16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes.pop("model.layers.0.input_layernorm.weight") == torch.float32
    assert set(dtypes.values()) == {torch.float16}
    cast(model, torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_default_layers_are_the_published_ones() -> None:
    assert default_layers(36) == (1, 9, 17, 25, 33)
    assert default_layers(28) == (1, 7, 13, 19, 25)
    assert default_layers(8) == (1, 2, 3, 4, 5)
    assert default_layers(36, 1) == (18,)
    for layers in range(2, 40):
        for wanted in range(1, 7):
            ids = default_layers(layers, wanted)
            assert check_layers(ids, layers) == ids
            assert len(ids) == min(wanted, layers - 1)
    with pytest.raises(TargetError, match="single layer"):
        default_layers(1)


@pytest.mark.parametrize(
    ("layers", "says"),
    [((1, 6), "out of range"), ((-1,), "out of range"), ((2, 5), "last layer"), ((2, 2), "more than once")],
)
def test_wrong_layers_are_refused(layers: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_layers(layers, 6)


def test_folders_that_are_no_target(tmp_path: Path, random_target: Callable[..., Path]) -> None:
    with pytest.raises(TargetError, match="no target at"):
        open_target(str(tmp_path / "absent"))
    with pytest.raises(TargetError, match=r"config\.json"):
        open_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="safetensors"):
        open_target(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(TargetError, match="transformers can load"):
        open_target(str(tmp_path))
    with pytest.raises(ConfigError, match="not a device"):
        resolve_device("tpu7")
    first, second = random_target("qwen3"), random_target("llama")
    assert weights_fingerprint(open_target(str(first))) != weights_fingerprint(open_target(str(second)))
