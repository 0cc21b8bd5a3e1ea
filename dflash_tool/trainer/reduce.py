"""Gradients over ranks: one all-reduce of one flat tensor a step, by gloo on the CPU and NCCL on CUDA."""

from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from dflash_tool.errors import DflashError
from dflash_tool.ranks import Ranks

_CPU_SECONDS = 60  # all ranks are there when it begins: whoever hasn't come through by then is gone


class GradientSum:
    """Adds a tensor up over all ranks, in place. The first call, which all ranks make together, connects them."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._connected = False

    def __call__(self, tensor: Tensor) -> None:
        """Add up. DflashError if a rank is lost meanwhile."""
        if self._ranks.store is None:
            return
        doing = "another rank was lost while gradients were added up"
        try:
            if not self._connected:
                doing = "the ranks can't connect to add up gradients"
                self._connect()
            torch.distributed.all_reduce(tensor)
        except (RuntimeError, ValueError) as error:
            first_line = str(error).partition("\n")[0]
            raise DflashError(f"{doing} ({first_line}); run the same command to go on") from error

    def _connect(self) -> None:
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - a single process never needs it

        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(self._device)
        torch.distributed.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=PrefixStore("gradients", self._ranks.store),  # type: ignore[arg-type]
            rank=self._ranks.rank,
            world_size=self._ranks.world,
            timeout=None if on_cuda else timedelta(seconds=_CPU_SECONDS),
            device_id=self._device if on_cuda else None,
        )
        self._connected = True

    def close(self) -> None:
        """Take the connections down."""
        if self._connected:
            self._connected = False
            with suppress(RuntimeError):  # of a rank that is gone
                torch.distributed.destroy_process_group()
