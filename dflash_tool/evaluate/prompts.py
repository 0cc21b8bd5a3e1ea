"""Prompts from data files of every kind that `extract` takes: what stands before each answer, as it was prepared.

Preparing the rows as the store was prepared makes prompts to the token what training saw, and tells by the content's
hash which conversations the drafter was trained on: they are left out.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import DataError
from dflash_tool.prompts import Preparation, PrepareOptions

DEFAULT_PROMPTS = 50
_MORE_ANSWERS = 2000  # samples behind the last prompt, for the bigram table


@dataclass(frozen=True)
class Prompt:
    """tokens int64 `[S]`, S >= 1; source: `file:line` of its conversation."""

    tokens: NDArray[np.int64]
    source: str


@dataclass
class Prompts:
    """prompts: to generate from. trained, long, repeated: how many were left out, and why.

    others: (tokens, mask) of samples that no prompt is from.
    """

    prompts: list[Prompt] = field(default_factory=list)
    trained: int = 0
    long: int = 0
    repeated: int = 0
    others: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list)


def read_prompts(
    files: Sequence[Path],
    tokenizer: Any,
    options: PrepareOptions,
    *,
    limit: int,
    longest: int | None,
    trained: Collection[bytes] = (),
) -> Prompts:
    """Up to `limit` prompts in the order of the files.

    Args:
        files: of the kinds that `extract` takes.
        tokenizer: the target's, with its chat template.
        options: as the store was prepared.
        limit: of prompts.
        longest: tokens that leave room for an answer; None: any number.
        trained: contents (the first 12 bytes of their sample ids) to leave out.

    Raises:
        DataError: a file is no data, holds no rows, or gives no prompt; says why.
    """
    found, seen = Prompts(), set[bytes]()
    for sample_id, tokens, mask, source in _samples(Preparation(files, tokenizer, options)):
        if len(found.prompts) >= limit:
            found.others.append((tokens, mask))
            if len(found.others) == _MORE_ANSWERS:
                break
            continue
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        for start in starts[starts > 0].tolist():
            prompt = tokens[:start].astype(np.int64)
            if sample_id[:12] in trained:
                found.trained += 1
            elif longest is not None and start > longest:
                found.long += 1
            elif prompt.tobytes() in seen:
                found.repeated += 1
            elif len(found.prompts) < limit:
                seen.add(prompt.tobytes())
                found.prompts.append(Prompt(prompt, source))
    if not found.prompts:
        names = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        why = f"{found.trained:,} were trained on, {found.long:,} leave no room for an answer"
        raise DataError(f"{names}: no prompt to generate from ({why}): give --data that the drafter has not seen")
    return found


def _samples(data: Preparation) -> Iterator[tuple[bytes, NDArray[np.int32], NDArray[np.int8], str]]:
    for batch in data:
        columns = (batch.column(name) for name in ("sample_id", "input_ids", "loss_mask", "source"))
        for sample_id, tokens, mask, source in zip(*columns, strict=True):
            yield (
                sample_id.as_py(), tokens.values.to_numpy(), mask.values.to_numpy().astype(np.int8), source.as_py()
            )  # fmt: skip
