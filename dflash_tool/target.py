"""The target LLM: load it, keep the layers up to the deepest wanted one, capture hidden states.

Nothing here knows a model family. The decoder is what `get_decoder()` returns, its layers are its
`ModuleList` of `num_hidden_layers` modules, and forward hooks read what each chosen layer puts out: the
residual stream after layer k, never normed (transformers' `hidden_states[k + 1]`). Layers beyond the
deepest chosen one are dropped after loading and the head is never run.

Rows are padded on the right and no attention mask is passed: under causal attention a real row can't see
the padding after it. Shapes: B samples a batch, S padded length, T real tokens of a batch, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_tool.errors import ConfigError, TargetError
from dflash_tool.schemas.config import ComputeDtype, LayerId, StoreDtype

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
_FINGERPRINT_BLOCKS = 16
_FINGERPRINT_BLOCK_BYTES = 65_536


@dataclass(frozen=True, kw_only=True)
class TargetFolder:
    """What a target's folder says of it, before any weight is loaded."""

    path: Path
    config: Any
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int | None


def open_target(path: str, *, trust_remote_code: bool = False) -> TargetFolder:
    """Read a target's config. Raises TargetError when the folder is none, or not one of a causal LLM."""
    folder = Path(path)
    if not folder.is_dir():
        raise TargetError(
            f"no target at {path}: expected a folder with config.json, *.safetensors and a tokenizer, as "
            "`save_pretrained` writes it; check --target"
        )
    if not (folder / "config.json").is_file():
        raise TargetError(f"{path} holds no config.json: not the folder of a transformers model; check --target")
    if not any(folder.glob("*.safetensors")):
        raise TargetError(
            f"{path} holds no *.safetensors: pickled weights are not loaded; convert them with `save_pretrained`"
        )
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and many calls fail before it

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        text = config.get_text_config(decoder=True)
        return TargetFolder(
            path=folder,
            config=config,
            num_layers=int(text.num_hidden_layers),
            hidden_size=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            max_position=getattr(text, "max_position_embeddings", None),
        )
    except (ValueError, OSError, AttributeError, KeyError) as error:
        hint = "" if trust_remote_code else " (a model with code of its own needs --trust-remote-code)"
        raise TargetError(f"{path}: config.json is not one that transformers can load{hint}: {error}") from error


def default_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Ids of the aux layers for a target of `num_layers` (FACTS 1): round(1 + i (L - 4) / (K - 1)).

    Where that repeats ids (very small targets), `count` falls to what fits and the ids are spread evenly over
    0..L-2. Raises TargetError for a target of one layer, whose only output is the normed one.
    """
    if num_layers < 2:
        raise TargetError("this target has a single layer: there is no hidden state before its final norm to use")
    if count == 1:
        return (min(num_layers // 2, num_layers - 2),)
    ids = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    if ids != sorted(set(ids)) or ids[-1] > num_layers - 2:
        count = min(count, num_layers - 1)
        ids = [round(i * (num_layers - 2) / max(count - 1, 1)) for i in range(count)]
    return tuple(ids)


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Sorted layer ids, or ConfigError when one is out of range, repeated, or the last layer's."""
    last = num_layers - 1
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"--layers: {layer} is out of range: this target's decoder layers are 0..{last}, and a drafter "
                f"may use 0..{last - 1}"
            )
        if layer == last:
            raise ConfigError(
                f"--layers: {layer} is the last layer, which generation hands over after the final norm: a drafter "
                f"can't use it; allowed are 0..{last - 1}"
            )
    repeated = sorted({layer for layer in layers if list(layers).count(layer) > 1})
    if repeated:
        raise ConfigError(f"--layers: {', '.join(map(str, repeated))} named more than once; name each layer once")
    return tuple(sorted(layers))


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, otherwise the CPU. ConfigError for what torch doesn't have here."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--target-device: {name!r} is not a device here: {error}") from error
    return device


def compute_dtype(dtype: ComputeDtype, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA, float32 on the CPU (where bfloat16 is slower)."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[dtype]


def config_fingerprint(target: TargetFolder) -> str:
    """XXH3-128 (hex) of config.json's bytes."""
    return xxhash.xxh3_128((target.path / "config.json").read_bytes()).hexdigest()


def weights_fingerprint(target: TargetFolder) -> str:
    """XXH3-128 (hex) of every weight file's name, size, head and 16 blocks spread over it.

    Fast at any size (a 16 GB target reads 1 MiB a file); sees another checkpoint, not a flipped bit.
    """
    digest = xxhash.xxh3_128()
    for file in sorted(target.path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            for block in range(_FINGERPRINT_BLOCKS):
                stream.seek(block * max(size - _FINGERPRINT_BLOCK_BYTES, 0) // (_FINGERPRINT_BLOCKS - 1))
                digest.update(stream.read(_FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()


def head_bytes(target: TargetFolder) -> int:
    """About what `write_head` and the tokenizer's files will take on disk, from the config alone."""
    stored = getattr(target.config, "dtype", None) or torch.float32
    matrices = 1 if target.config.tie_word_embeddings else 2
    weights = (matrices * target.vocab_size + 1) * target.hidden_size * stored.itemsize
    names = ("tokenizer*", "*token*.json", "chat_template*", "vocab*", "merges.txt", "*.model", "config.json")
    files = {file for name in names for file in target.path.glob(name)}
    return weights + sum(file.stat().st_size for file in files)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Hidden states of one batch's kept samples.

    states: layer id -> [T, H] in the store's dtype (bfloat16 as uint16), the real rows one sample after the
    other; finite: bool [kept samples], False where a row of any layer holds NaN or Inf.
    """

    states: dict[LayerId, NDArray[Any]]
    finite: NDArray[np.bool_]


class TargetModel:
    """A loaded, truncated target on one device. Not thread-safe: one forward at a time."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        store_dtype: StoreDtype,
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self._store_dtype = _DTYPES[store_dtype]
        self._decoder = _truncate(model, max(layers))
        _cast(self._decoder, dtype)
        self._decoder.to(device).eval().requires_grad_(False)
        self._captured: dict[int, Tensor] = {}
        for layer in self.layers:
            _layer_list(self._decoder, max(layers) + 1)[layer].register_forward_hook(self._hook(layer))

    @classmethod
    def load(
        cls,
        target: TargetFolder,
        *,
        layers: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        store_dtype: StoreDtype,
        head: Path | None = None,
        trust_remote_code: bool = False,
    ) -> "TargetModel":
        """Load the weights in their own dtype, write `head` if it is asked for, then truncate and cast."""
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()  # the panel shows that the target is loading
        try:
            model = AutoModelForCausalLM.from_pretrained(
                target.path, dtype="auto", use_safetensors=True, trust_remote_code=trust_remote_code
            )
        except (ValueError, OSError, RuntimeError, KeyError) as error:
            raise TargetError(f"{target.path}: transformers can't load these weights: {error}") from error
        if head is not None:
            write_head(model, target, head)
        return cls(model, layers=layers, device=device, dtype=dtype, store_dtype=store_dtype)

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.inference_mode()
    def capture(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int64], keep: NDArray[np.bool_] | None = None
    ) -> Captured:
        """Run one batch and return the chosen layers' real rows.

        input_ids [B, S] int64, padded on the right with any valid id; lengths [B]; keep bool [B], samples whose
        rows are wanted (all by default): the others only keep the batch's shape, and so the numbers, the same.
        """
        batch, width = input_ids.shape
        keep = np.ones(batch, np.bool_) if keep is None else keep
        self._captured.clear()
        self._decoder(input_ids=torch.from_numpy(input_ids).to(self.device), use_cache=False)
        kept = np.flatnonzero(keep)
        rows = np.concatenate([np.arange(b * width, b * width + lengths[b]) for b in kept] or [np.empty(0, np.int64)])
        whole = len(rows) == batch * width
        index = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        sample_of_row = np.repeat(np.arange(len(kept)), lengths[kept])
        states: dict[LayerId, NDArray[Any]] = {}
        finite = np.ones(len(kept), np.bool_)
        for layer in self.layers:
            flat = self._captured.pop(layer).reshape(batch * width, -1).to(self._store_dtype)
            real = flat if whole else flat.index_select(0, index)
            if not bool(torch.isfinite(real).all()):
                bad = (~torch.isfinite(real).all(dim=1)).cpu().numpy()
                finite[sample_of_row[bad]] = False
            states[layer] = _to_numpy(real.cpu())
        return Captured(states=states, finite=finite)


def write_head(model: Any, target: TargetFolder, folder: Path) -> None:
    """Write the target's embedding, LM head and final norm, in their own dtype, and its full config.json.

    `head.safetensors` holds `embed_tokens.weight`, `norm.weight` (and `.bias`), and `lm_head.weight` (and `.bias`)
    unless the head *is* the embedding: whether they are tied is read from the tensors, not from the config.
    """
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if output is None:
        raise TargetError(f"{target.path} has no language-model head: not a causal LLM")
    tensors = {"embed_tokens.weight": embedding.weight}
    if output.weight.data_ptr() != embedding.weight.data_ptr():
        tensors["lm_head.weight"] = output.weight
    if getattr(output, "bias", None) is not None:
        tensors["lm_head.bias"] = output.bias
    tensors |= {f"norm.{name}": value for name, value in _final_norm(model).named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.detach().contiguous().cpu() for name, value in tensors.items()},
        folder / "head.safetensors",
    )
    (folder / "config.json").write_bytes((target.path / "config.json").read_bytes())


def _layer_list(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's list of `count` layers: its one direct child that is a ModuleList of that length."""
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(found) != 1:
        raise TargetError(
            f"{type(decoder).__name__}: expected one ModuleList of {count} decoder layers, found {len(found)}; this "
            "architecture is not supported"
        )
    return found[0]


def _decoder_and_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    decoder = model.get_decoder()
    return decoder, _layer_list(decoder, model.config.get_text_config(decoder=True).num_hidden_layers)


def _truncate(model: Any, deepest: int) -> nn.Module:
    """The decoder with the layers 0..deepest alone (config and list shortened alike)."""
    decoder, layers = _decoder_and_layers(model)
    del layers[deepest + 1 :]
    model.config.get_text_config(decoder=True).num_hidden_layers = deepest + 1
    return decoder


def _final_norm(model: Any) -> nn.Module:
    decoder, _ = _decoder_and_layers(model)
    for name in _NORM_NAMES:
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    raise TargetError(f"{type(decoder).__name__}: no final norm found (looked for {', '.join(_NORM_NAMES)})")


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers; computed buffers (rope's inverse frequencies) stay in float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    saved: Mapping[str, Tensor] = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    """[T, H] on the CPU -> numpy; bfloat16 as uint16, bit for bit."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
