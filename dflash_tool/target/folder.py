"""What a target's folder says before any weight is loaded: sizes, layer ids, fingerprints, the head's bytes.

A target is a folder, or the name of a model on the Hugging Face hub, whose files are then downloaded (or, offline,
taken from the hub's local cache) and used as a folder. Sizes are read from the text part of the config under
transformers' common names, which `attribute_map` translates (`n_layer`, `n_embd`, `n_positions`, ...).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from dflash_tool.errors import ConfigError, TargetError

_FINGERPRINT_BLOCKS = 16
_FINGERPRINT_BLOCK_BYTES = 65_536
_TOKENIZER_FILES = ("tokenizer*", "*token*.json", "chat_template*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", *_TOKENIZER_FILES)
# Folders hold the same weights in other formats; `consolidated` is Mistral's second copy of them.
_NOT_FROM_HUB = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.gguf")
_ITEMSIZE = {"F64": 8, "F32": 4}  # of safetensors' floating types; all others that a head comes in have 2


@dataclass(frozen=True, kw_only=True)
class TargetFolder:
    """What a target's folder says of it, before any weight is loaded."""

    path: Path
    config: Any
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int | None


def open_target(name: str, *, trust_remote_code: bool = False) -> TargetFolder:
    """Read a target's config; `name` is a folder or a model on the hub, which is downloaded if need be.

    Raises TargetError when it is neither, or not the folder of a causal LLM.
    """
    folder = Path(name)
    try:
        there = folder.exists()
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise TargetError(f"no target at {name}: {error.strerror or error}; check --target") from error
    if not there:
        folder = _from_hub(name, trust_remote_code=trust_remote_code)
    if not folder.is_dir():
        raise TargetError(f"no target at {name}: this is a file; --target takes the folder of a model")
    if not (folder / "config.json").is_file():
        raise TargetError(f"{name} holds no config.json: not the folder of a transformers model; check --target")
    if not any(folder.glob("*.safetensors")):
        raise TargetError(
            f"{name} holds no *.safetensors: pickled weights are not loaded; convert them with `save_pretrained`"
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
    except Exception as error:  # whatever the file or the config's own code raise
        hint = "" if trust_remote_code else " (a model with code of its own needs --trust-remote-code)"
        raise TargetError(f"{name}: config.json is not one that transformers can load{hint}: {error}") from error


def _from_hub(name: str, *, trust_remote_code: bool) -> Path:
    """The local folder of a model on the hub: config, tokenizer and safetensors; code only if it may run."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    missing = f"no target at {name}: there is no such folder"
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=[*_HUB_FILES, *(["*.py"] if trust_remote_code else [])],
                ignore_patterns=list(_NOT_FROM_HUB),
            )
        )
    except HFValidationError as error:
        raise TargetError(
            f"{missing}, and it can't be a model's name on the Hugging Face hub; expected a folder with config.json, "
            "*.safetensors and a tokenizer, as `save_pretrained` writes it; check --target"
        ) from error
    except GatedRepoError as error:
        raise TargetError(
            f"{missing}, and on the Hugging Face hub this model is gated: accept its terms there, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise TargetError(
            f"{missing}, and no such model on the Hugging Face hub (a private one needs `hf auth "
            "login`); check --target"
        ) from error
    except LocalEntryNotFoundError as error:
        raise TargetError(
            f"{missing}, and the Hugging Face hub is offline or out of reach, and its local cache does not hold all of "
            "this model; check --target, or download it where there is a network and pass the folder"
        ) from error
    except Exception as error:  # network, disk, proxy: whatever the client and its libraries raise
        raise TargetError(f"{missing}, and it can't be downloaded from the Hugging Face hub: {error}") from error


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
    """About what `write_head` and the tokenizer's files will take on disk, from the headers of the weight files.

    Embedding and head are the tensors of shape [vocab, hidden] (one if they are tied), a head's bias that of [vocab].
    Raises TargetError for a file that is no safetensors file.
    """
    rows, width = target.vocab_size, target.hidden_size
    matrices, biases, itemsize = 0, 0, 2
    for file in target.path.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - no mapping
                    tensor = stored.get_slice(name)
                    shape = tensor.get_shape()
                    matrices += shape == [rows, width]
                    biases += shape == [rows]
                    if shape == [rows, width]:
                        itemsize = _ITEMSIZE.get(tensor.get_dtype(), 2)
        except SafetensorError as error:
            raise TargetError(f"{file}: not a readable safetensors file: {error}; download or save it again") from error
    text = target.config.get_text_config(decoder=True)
    dtype = getattr(text, "dtype", None) or getattr(target.config, "dtype", None)
    if isinstance(dtype, torch.dtype):  # that of the loaded weights
        itemsize = dtype.itemsize
    weights = itemsize * (min(max(matrices, 1), 2) * rows * width + min(biases, 1) * rows + 2 * width)
    files = {file for name in (*_TOKENIZER_FILES, "config.json") for file in target.path.glob(name)}
    return weights + sum(file.stat().st_size for file in files)
