"""Prompts through plain decoding, transformers' DFlash and our own loop, side by side; what does not add up is said.

Three numbers must agree on greedy answers: the tau that generation had, the tau of our loop, and the walk tau of the
very answers, which is computed the way training validates. A drafter that is served otherwise than it was trained
(another layer, shifted labels, another mask token) shows here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.drafter.acceptance import NOTHING, Yield
from dflash_tool.drafter.head import TargetHead
from dflash_tool.evaluate.answers import Parting, distinct_4grams, parting, walk_answer
from dflash_tool.evaluate.generation import Answer, Generation
from dflash_tool.evaluate.prompts import Prompt
from dflash_tool.trainer.validate import bigram_walk

AGREEMENT = 0.03  # of generation's tau
Progress = Callable[[int, int], None]


@dataclass
class Rate:
    """Tokens over wall seconds, prefill included."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: Answer) -> None:
        """Count an answer in."""
        self.tokens += len(answer.tokens)
        self.seconds += answer.seconds

    @property
    def value(self) -> float:
        """Tokens a second; 0 without any."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Spoken:
    """One way of decoding: the drafter's yield and rate, the rate of the target alone, the distinct 4-grams."""

    yields: Yield = NOTHING
    rate: Rate = field(default_factory=Rate)
    plain_rate: Rate = field(default_factory=Rate)
    distinct: float = 1.0

    def add(self, drafted: Answer, plain: Answer) -> None:
        """Count a pair of answers to the same prompt in."""
        self.yields += drafted.yields
        self.rate.add(drafted)
        self.plain_rate.add(plain)

    @property
    def speedup(self) -> float:
        """How many times as many tokens a second as the target alone."""
        return self.rate.value / self.plain_rate.value if self.plain_rate.value else 0.0

    def as_json(self) -> dict[str, Any]:
        """Numbers only."""
        return {
            "tau": self.yields.tau,
            "new_tokens": self.rate.tokens,
            "target_forwards": self.yields.forwards,
            "tokens_per_second": self.rate.value,
            "plain_tokens_per_second": self.plain_rate.value,
            "speedup": self.speedup,
            "distinct_4grams": self.distinct,
        }


@dataclass
class Measured:
    """Real generation over `prompts` prompts; `sampled` at `temperature` > 0, if that was asked for.

    ours: yield of our own decode; walked: of a walk over greedy DFlash's answers; bigram: of a table of next tokens on
    the same answers. accepted: by our own decode, drafts of each block, the last ones of an answer not cut: what
    serving engines count. cut: answers that stopped at the limit of new tokens.
    """

    prompts: int
    greedy: Spoken = field(default_factory=Spoken)
    ours: Yield = NOTHING
    accepted: list[int] = field(default_factory=list)
    walked: Yield = NOTHING
    bigram: Yield | None = None
    partings: list[Parting] = field(default_factory=list)
    cut: int = 0
    temperature: float = 0.0
    sampled: Spoken | None = None

    def accepted_by_slot(self, slots: int) -> list[float]:
        """Share of our own decode's blocks of which slot 1, 2, ..., `slots` was accepted."""
        blocks = max(len(self.accepted), 1)
        return [sum(each >= slot for each in self.accepted) / blocks for slot in range(1, slots + 1)]

    @property
    def failures(self) -> list[str]:
        """What does not add up, in sentences; empty if all is well."""
        found, generated = [], self.greedy.yields.tau
        for name, other in (("walk tau on its answers", self.walked.tau), ("our own decode's tau", self.ours.tau)):
            off = abs(other - generated) / generated if generated else 0.0
            if off > AGREEMENT:
                found.append(
                    f"generation's tau is {generated:.3f}, {name} {other:.3f}: {off:.1%} apart, more than the "
                    f"{AGREEMENT:.0%} that rounding may do. The drafter is not served as it was trained; `dflash "
                    "export --check` looks for the reason"
                )
        if lossy := [each for each in self.partings if not each.near_tie]:
            found.append(
                f"{len(lossy)} of {self.prompts} greedy answers are not the target's own, and no near-tie explains it"
            )
        return found

    def as_json(self, slots: int) -> dict[str, Any]:
        """One JSON document. slots: that a block drafts."""
        return {
            "prompts": self.prompts,
            "greedy": self.greedy.as_json(),
            "our_decode_tau": self.ours.tau,
            "blocks": len(self.accepted),
            "accepted_by_slot": self.accepted_by_slot(slots),
            "walk_tau": self.walked.tau,
            "bigram_tau": self.bigram.tau if self.bigram else None,
            "equal_answers": self.prompts - len(self.partings),
            "partings": [vars(each) for each in self.partings],
            "cut_at_the_limit": self.cut,
            "temperature": self.temperature,
            "sampled": self.sampled.as_json() if self.sampled else None,
        }


def measure(
    generation: Generation,
    head: TargetHead,
    prompts: Sequence[Prompt],
    *,
    temperature: float = 0.0,
    bigrams: NDArray[np.int64] | None = None,
    on_progress: Progress | None = None,
) -> Measured:
    """Answer every prompt in every way, in turn, so that a machine that slows down slows all of them down.

    Args:
        generation: the target with its drafter.
        head: the same target's.
        prompts: one or more.
        temperature: above 0, sampled answers are measured beside the greedy ones.
        bigrams: most frequent successor of each token, as a yardstick.
        on_progress: called with the prompts done and all of them.
    """
    target, drafter = generation.target, generation.drafter
    result = Measured(prompts=len(prompts), temperature=temperature, bigram=None if bigrams is None else NOTHING)
    result.sampled = Spoken() if temperature else None
    greedy_answers, sampled_answers = [], []
    generation.warm_up(torch.from_numpy(prompts[0].tokens))
    for done, prompt in enumerate(prompts):
        if on_progress is not None:
            on_progress(done, len(prompts))
        ids = torch.from_numpy(prompt.tokens)
        plain, drafted = generation.plain(ids), generation.drafted(ids)
        result.greedy.add(drafted, plain)
        ours = generation.ours(ids)
        result.ours += ours.yields
        result.accepted += ours.accepted
        result.walked += walk_answer(target, drafter, head, ids, drafted.tokens)
        result.cut += int(drafted.tokens[-1]) not in generation.end
        if (parted := parting(target, ids, plain.tokens, drafted.tokens, prompt.source)) is not None:
            result.partings.append(parted)
        if bigrams is not None and result.bigram is not None:
            tokens = torch.cat((ids, drafted.tokens)).numpy()
            mask = np.arange(len(tokens)) >= len(ids)
            result.bigram += bigram_walk(bigrams, tokens, mask, drafter.settings.block_size)
        greedy_answers.append(drafted.tokens)
        if result.sampled is not None:
            torch.manual_seed(done)  # the same draws in every run
            plain, drafted = generation.plain(ids, temperature), generation.drafted(ids, temperature)
            result.sampled.add(drafted, plain)
            sampled_answers.append(drafted.tokens)
    result.greedy.distinct = distinct_4grams(greedy_answers)
    if result.sampled is not None:
        result.sampled.distinct = distinct_4grams(sampled_answers)
    return result
