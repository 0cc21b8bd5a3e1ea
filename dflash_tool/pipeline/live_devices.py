"""Which devices a live run's targets and drafters have, and how much may be in flight where they hand states over.

Without a word from the user the last device of a machine drafts and the others run targets; a single one does both.
Under torchrun every process is a cell with its own part of the machine: lists that are given are dealt evenly over the
machine's processes, the rest likewise.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_tool.errors import ConfigError
from dflash_tool.resolving import Resolved
from dflash_tool.schemas.live import LiveConfig
from dflash_tool.target import resolve_device
from dflash_tool.target.transfer import is_direct
from dflash_tool.wording import counted

_AUTO = ("auto",)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The devices of one process, by name."""

    targets: tuple[str, ...]
    drafters: tuple[str, ...]


def devices_of(config: LiveConfig) -> str:
    """In words."""
    parts = (
        f"{counted(len(names) * replicas, what)} on {', '.join(names)}"
        for what, names, replicas in (
            ("target", config.target_device, config.targets),
            ("drafter", config.drafter_device, config.drafters),
        )
    )
    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return rank + ", ".join(parts)


def own_devices(config: LiveConfig) -> LiveConfig:
    """The config with this process's devices. ConfigError for devices that aren't there or can't be dealt."""
    check_devices(config)
    cell = deal(
        config.target_device,
        config.drafter_device,
        count=torch.cuda.device_count(),
        rank=int(os.environ.get("LOCAL_RANK", "0")),
        world=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    return config.model_copy(update={"target_device": cell.targets, "drafter_device": cell.drafters})


def check_devices(config: LiveConfig) -> None:
    """ConfigError for a device that isn't here, or is named twice."""
    for option, names, replicas in (
        ("--target-device", config.target_device, "--targets"),
        ("--drafter-device", config.drafter_device, "--drafters"),
    ):
        devices = [resolve_device(name, option) for name in names]
        if twice := {str(device) for device in devices if devices.count(device) > 1}:
            raise ConfigError(
                f"{option}: got {', '.join(sorted(twice))} twice; name each device once (and give {replicas} 2 for two "
                "on each)"
            )


def deal(targets: Sequence[str], drafters: Sequence[str], *, count: int, rank: int = 0, world: int = 1) -> Cell:
    """Process `rank` of `world` on a machine with `count` CUDA devices; ("auto",) leaves the choice to us.

    A side that is left out has what the other one doesn't name, or, where nothing is left, its devices as well.
    Raises ConfigError for lists that can't be dealt evenly, and for fewer devices than processes.
    """
    mine_t = _own("--target-device", targets, rank, world)
    mine_d = _own("--drafter-device", drafters, rank, world)
    if mine_t and mine_d:
        return Cell(targets=mine_t, drafters=mine_d)
    named = {str(torch.device(name)) for name in (*targets, *drafters) if name != "auto"}
    named |= {"cuda:0"} if "cuda" in named else set()
    left = [name for name in (f"cuda:{number}" for number in range(count)) if name not in named]
    share = tuple(left[len(left) * rank // world : len(left) * (rank + 1) // world])
    if 0 < count < world and not mine_d and mine_t in ((), ("cpu",)):  # some would draft on CUDA, others on the CPU
        raise ConfigError(
            f"{world} processes on a machine with {counted(count, 'CUDA device')}: start at most {count} "
            "(--nproc-per-node), or give --target-device cpu --drafter-device cpu"
        )
    if mine_t:
        return Cell(targets=mine_t, drafters=share[-1:] or mine_t[-1:])
    if mine_d:
        return Cell(targets=share or mine_d, drafters=mine_d)
    share = share or ("cpu",)
    return Cell(targets=share[:-1] or share, drafters=share[-1:])


def _own(option: str, names: Sequence[str], rank: int, world: int) -> tuple[str, ...]:
    """A process's part of a list; the CPU is everybody's. Nothing where the choice is ours."""
    if tuple(names) == _AUTO:
        return ()
    if all(name == "cpu" for name in names):
        return tuple(names)
    if len(names) % world:
        raise ConfigError(
            f"{option}: {len(names)} devices can't be dealt evenly over the {world} processes on this machine; name "
            "all that they may use, as many for each, or leave the option out"
        )
    each = len(names) // world
    return tuple(names[rank * each : (rank + 1) * each])


def window_limit(resolved: Resolved, config: LiveConfig) -> int:
    """Bytes of the window: as asked for, else a quarter of what is free where the states lie, where that is least."""
    if config.inflight_gib:
        return resolved.inflight_limit
    drafters = {resolve_device(name, "--drafter-device") for name in config.drafter_device}
    limits = []
    for device in drafters:
        ways = [is_direct(target, device) for target in resolved.devices]
        if any(ways):
            limits.append(torch.cuda.mem_get_info(device)[0] // 4)
        if not all(ways):
            limits.append(resolved.inflight_limit)
    return min(limits)
