"""A training run's drafters: on which devices, of what shape, from which weights."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from dflash_tool.drafter.anchors import Blocks, decay_weights
from dflash_tool.drafter.config import DrafterConfig
from dflash_tool.drafter.files import load_drafter
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.layers import MLP, RMSNorm
from dflash_tool.drafter.loss import DraftLoss, Loss, decay_loss, dpace_loss
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import ConfigError
from dflash_tool.ranks import Ranks
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.target import resolve_device
from dflash_tool.trainer import DrafterGroup, Replica
from dflash_tool.trainer.budget import microbatch_budgets


def drafter_devices(config: TrainConfig) -> tuple[torch.device, ...]:
    """One for each local drafter. Those on the CPU share its threads. ConfigError for what isn't there."""
    devices = tuple(
        resolve_device(name, "--drafter-device") for name in config.drafter_device for _ in range(config.drafters)
    )
    if len({device.type for device in devices}) > 1:
        raise ConfigError("--drafter-device: got the CPU and CUDA devices; drafters of one run are all of one kind")
    on_cuda = devices[0].type == "cuda"
    if config.compile and not on_cuda:
        raise ConfigError("--compile is for CUDA devices, and the drafter is on the CPU: leave it out")
    if len(devices) > 1 and not on_cuda:
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    return devices


def agree(
    config: TrainConfig, settings: DrafterConfig, devices: Sequence[torch.device], ranks: Ranks
) -> tuple[int, int]:
    """Microbatch budgets (context tokens, block tokens) that fit every drafter of every rank, so that all plan alike.

    Raises ConfigError where ranks have other numbers of drafters.
    """
    mine = [min(each) for each in zip(*(microbatch_budgets(config, settings, d) for d in set(devices)), strict=True)]
    context, blocks, drafters = zip(*ranks.everyone("open", [*mine, len(devices)]), strict=True)
    if len(set(drafters)) > 1:
        raise ConfigError(
            f"--drafter-device, --drafters: the ranks have {', '.join(map(str, drafters))} drafters; give each as many"
        )
    return min(context), min(blocks)


def adopt(config: TrainConfig, start: DrafterConfig) -> TrainConfig:
    """The config with the shape of the drafter it starts from. ConfigError where it asks for another one."""
    theirs = {
        "block_size": start.block_size,
        "draft_layers": start.num_layers,
        "aux_layers": start.target_layer_ids,
        "mask_token_id": start.mask_token_id,
    }
    for name, value in theirs.items():
        asked = getattr(config, name)
        if name in config.model_fields_set and asked not in {value, None}:
            raise ConfigError(
                f"--{name.replace('_', '-')} {_text(asked)}: the drafter {config.init_from} has {_text(value)}; leave "
                "the option out, or train without --init-from"
            )
    return config.model_copy(update=theirs)


def check_fits(config: TrainConfig, start: DrafterConfig, wanted: DrafterConfig) -> None:
    """Refuse a drafter that was made for another target than the store's (ConfigError)."""
    for name in ("hidden_size", "vocab_size", "num_target_layers"):
        theirs, ours = getattr(start, name), getattr(wanted, name)
        if theirs != ours:
            raise ConfigError(
                f"--init-from: the drafter {config.init_from} was made for a target with {name} {theirs}, that of the "
                f"store has {ours}"
            )


def make_group(
    config: TrainConfig,
    settings: DrafterConfig,
    devices: Sequence[torch.device],
    heads: Sequence[TargetHead],
    begun_from: Path | None = None,
) -> DrafterGroup:
    """A drafter for each device; those on the same one share its weights. heads: by device, as the devices are.

    begun_from: the folder of a drafter to start from.
    """
    if begun_from is None:
        model = DFlashDraftModel(settings, seed=config.seed)
    else:
        model = load_drafter(begun_from, dtype=torch.float32).train()
    model.gradient_checkpointing = config.grad_checkpointing
    models = {device: copy.deepcopy(model).to(device) for device in dict.fromkeys(devices)}
    if config.compile:
        for each in models.values():
            compile_parts(each)
    loss = draft_loss(config)
    return DrafterGroup(
        [
            Replica(models[device], head, loss=loss, anchors=config.anchors, seed=config.seed)
            for device, head in zip(devices, heads, strict=True)
        ]
    )


def compile_parts(model: DFlashDraftModel) -> None:
    """Compile norms and MLPs, whose shapes alone vary: attention is compiled anyway, under another mask each time."""
    for module in model.modules():
        if isinstance(module, MLP | RMSNorm):
            module.compile(dynamic=True)


def draft_loss(config: TrainConfig) -> DraftLoss:
    """The loss that `--loss` and `--gamma` name."""
    if config.loss == "dpace":
        return dpace_loss
    weights = decay_weights(config.block_size, config.gamma)

    def loss(hidden: torch.Tensor, blocks: Blocks, head: TargetHead) -> Loss:
        return decay_loss(hidden, blocks, weights, head)

    return loss


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
