"""One target that answers in three ways, each counted and timed: plain, with transformers' DFlash, with our decode."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_tool.drafter.acceptance import Yield
from dflash_tool.drafter.decode import decode
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import TargetError


@dataclass(frozen=True)
class Answer:
    """tokens: the new ones, int64 `[n]` on the CPU. forwards: of the target, prefill included. seconds: wall.

    accepted: drafts of each block that the target agreed with, where the loop tells (`Generation.ours`).
    """

    tokens: Tensor
    forwards: int
    seconds: float
    accepted: tuple[int, ...] = ()

    @property
    def yields(self) -> Yield:
        """Tokens out of forwards, without the prefill and its token."""
        return Yield(len(self.tokens) - 1, self.forwards - 1)


class Generation:
    """A target and its drafter on one device. The target's own generation defaults (top-p, penalties) are put aside.

    end: the tokens that end an answer.
    """

    def __init__(self, target: Any, drafter: DFlashDraftModel, *, max_new_tokens: int) -> None:
        from transformers import GenerationConfig  # noqa: PLC0415 - slow to import

        self.target, self.drafter = target, drafter
        self.device: torch.device = target.device
        own = target.generation_config
        ends = own.eos_token_id if own.eos_token_id is not None else []
        self.end = frozenset([ends] if isinstance(ends, int) else ends)
        self._max_new_tokens = max_new_tokens
        self._common = {
            "max_new_tokens": max_new_tokens,
            "eos_token_id": sorted(self.end) or None,
            "pad_token_id": own.pad_token_id if own.pad_token_id is not None else min(self.end, default=0),
        }
        target.generation_config = GenerationConfig(**self._common)
        self._forwards = 0
        target.register_forward_hook(self._count)

    def warm_up(self, prompt: Tensor) -> None:
        """Load and compile what is loaded and compiled on first use, so that it counts for neither way.

        Raises TargetError for a target that transformers' DFlash generation can't run (one without position ids).
        """
        self.plain(prompt)
        try:
            self.drafted(prompt)
        except Exception as error:  # whatever generation meets inside a model that it wasn't made for
            raise TargetError(
                f"transformers' DFlash generation can't run {type(self.target).__name__} ({type(error).__name__}: "
                f"{error}): measure this drafter on a store, with --store alone"
            ) from error

    def plain(self, prompt: Tensor, temperature: float = 0.0) -> Answer:
        """The target alone. prompt: int64 `[S]`."""
        return self._timed(prompt, lambda ids: self._generate(ids, temperature))

    def drafted(self, prompt: Tensor, temperature: float = 0.0) -> Answer:
        """Through transformers' own DFlash generation."""
        return self._timed(prompt, lambda ids: self._generate(ids, temperature, speculation_type="dflash"))

    def ours(self, prompt: Tensor) -> Answer:
        """Through `drafter.decode`, greedily."""
        accepted: list[int] = []

        def run(ids: Tensor) -> Tensor:
            made = decode(self.target, self.drafter, ids, max_new_tokens=self._max_new_tokens, end=self.end)
            accepted.extend(made.accepted)
            return torch.tensor(made.tokens)

        return replace(self._timed(prompt, run), accepted=tuple(accepted))

    def _generate(self, ids: Tensor, temperature: float, **speculation: Any) -> Tensor:
        from transformers import GenerationConfig  # noqa: PLC0415

        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        config = GenerationConfig(**self._common, **({"do_sample": False} | sampling), **speculation)
        helper = {"assistant_model": self.drafter} if speculation else {}
        mask = torch.ones_like(ids[None])
        out: Tensor = self.target.generate(ids[None], attention_mask=mask, generation_config=config, **helper)
        return out[0, len(ids) :]

    def _timed(self, prompt: Tensor, run: Callable[[Tensor], Tensor]) -> Answer:
        ids = prompt.to(self.device)
        self._forwards = 0
        self._wait()
        since = time.perf_counter()
        tokens = run(ids)
        self._wait()
        return Answer(tokens.cpu(), self._forwards, time.perf_counter() - since)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _count(self, *_: Any) -> None:
        self._forwards += 1
