"""A config with its defaults filled in: target and tokenizer opened, data hashed, window sized. Writes nothing.

Everything that can be refused without reading the data is refused here, before a byte is written.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dflash_tool.buckets import check_edges
from dflash_tool.errors import ConfigError
from dflash_tool.prompts import (
    choose_mask_token,
    find_files,
    fingerprint_file,
    load_tokenizer,
    template_fingerprint,
    tokenizer_fingerprint,
)
from dflash_tool.schemas.config import ExtractConfig, LayerId
from dflash_tool.schemas.manifest import TargetInfo
from dflash_tool.target import (
    TargetFolder,
    check_layers,
    compute_dtype,
    config_fingerprint,
    default_layers,
    open_target,
    resolve_device,
    weights_fingerprint,
)
from dflash_tool.telemetry import ExtractTelemetry
from dflash_tool.window import default_limit

DEFAULT_MAX_LENGTH = 3072  # the DFlash paper's
DEFAULT_BATCH_TOKENS = {"cpu": 2048, "cuda": 32_768}
CONSUMERS = 1  # the shard writer


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config with its defaults filled in and its inputs opened.

    devices: one for each target of this process, replicas repeated; settings: fields of the manifest; inflight_limit:
    bytes.
    """

    config: ExtractConfig
    target: TargetFolder
    tokenizer: Any
    devices: tuple[torch.device, ...]
    dtype: torch.dtype
    settings: dict[str, Any]
    inflight_limit: int

    @property
    def parties(self) -> int:
        """Targets and consumers that want a batch each, and two more to hand over: what keeps everybody busy."""
        return len(self.devices) + CONSUMERS + 2

    @property
    def layers(self) -> tuple[LayerId, ...]:
        """What is captured, in the order of the store."""
        ids: tuple[int, ...] = self.settings["layer_ids"]
        return (*ids, "final") if self.config.final_hidden else ids

    @property
    def places(self) -> int:
        """Batches of one bucket in flight, at most."""
        return self.config.hs_queue_depth or self.parties


def resolve(config: ExtractConfig, telemetry: ExtractTelemetry) -> Resolved:
    """Open the inputs and fill in the defaults. Writes nothing; refuses what can be refused this early."""
    telemetry.stage("opening the target")
    target = open_target(config.target, trust_remote_code=config.trust_remote_code)
    layers = check_layers(config.layers or default_layers(target.num_layers), target.num_layers)
    devices = tuple(resolve_device(name) for name in config.target_device for _ in range(config.targets))
    dtype = compute_dtype(config.dtype, devices[0])
    tokenizer = load_tokenizer(target.path, config.trust_remote_code, config.chat_template)
    mask_token_id = choose_mask_token(tokenizer, target.vocab_size, config.mask_token_id)
    if not isinstance(config.buckets, int):
        check_edges(config.buckets)
    config = config.model_copy(update={"data": find_files(config.data)})
    telemetry.stage("hashing the data")
    settings = {
        "target": TargetInfo(
            name=config.target,
            model_type=target.config.model_type,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            config_fingerprint=config_fingerprint(target),
            weights_fingerprint=weights_fingerprint(target),
            dtype=str(dtype).removeprefix("torch."),
        ),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer.chat_template),
        "template_args": config.template_args,
        "turns": config.turns,
        "data": tuple(fingerprint_file(path) for path in config.data),
        "layer_ids": layers,
        "final_hidden": config.final_hidden,
        "store_dtype": config.store_dtype,
        "max_length": _max_length(config, target),
        "overlength": config.overlength,
        "seed": config.seed,
        "batch_tokens": config.batch_tokens or DEFAULT_BATCH_TOKENS["cpu" if devices[0].type == "cpu" else "cuda"],
        "mask_token_id": mask_token_id,
    }
    limit = int(config.inflight_gib * 2**30) if config.inflight_gib else default_limit()
    return Resolved(
        config=config,
        target=target,
        tokenizer=tokenizer,
        devices=devices,
        dtype=dtype,
        settings=settings,
        inflight_limit=limit,
    )


def _max_length(config: ExtractConfig, target: TargetFolder) -> int:
    allowed = target.max_position
    if config.max_length is None:
        return min(DEFAULT_MAX_LENGTH, allowed or DEFAULT_MAX_LENGTH)
    if allowed is not None and config.max_length > allowed:
        raise ConfigError(
            f"--max-length: got {config.max_length}, but this target has positions for {allowed} tokens; "
            f"allowed are 2..{allowed}"
        )
    return config.max_length
