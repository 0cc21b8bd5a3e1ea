"""Raw text (`text`, or `prompt` and `completion`): no chat template, but the tokenizer's own tokens around it.

Prompt and completion are one text, tokenised once, as a server that goes on writing would have it: where the
tokens of both merge at the seam, the merged token isn't wholly of the completion and doesn't count.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import TargetError
from dflash_tool.prompts.reasons import Reason, Skipped
from dflash_tool.prompts.render import RenderedText
from dflash_tool.prompts.rows import TextRow
from dflash_tool.prompts.tokenise import half_character, leading_ids


class RawText:
    """What a tokenizer puts before a text (BOS), and its end token (EOS)."""

    def __init__(self, tokenizer: Any) -> None:
        self._before = np.array(leading_ids(tokenizer), np.int32)
        self._end: int | None = tokenizer.eos_token_id

    def render(self, row: TextRow) -> RenderedText | Skipped:
        """Supervised is all from `row.start` on. Raises `TargetError` if the row must end and no token says so."""
        if row.ended and self._end is None:
            raise TargetError(
                f"{row.source}: a completion, after which the end-of-text token must be learned, but the target's "
                "tokenizer has none: set eos_token in its tokenizer_config.json"
            )
        if (half := half_character(row.text)) is not None:
            return Skipped(row.source, Reason.NOT_UNICODE, f"the text has {half!r}, half a character")
        return RenderedText(row.source, row.text, ((row.start, len(row.text)),), raw=row)

    def frame(
        self, row: TextRow, ids: NDArray[np.int32], mask: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Put BOS, unsupervised, before the tokens [T] and, if the row is ended, EOS, supervised, after them.

        Neither twice where the text itself has it; a BOS of the text's own isn't supervised either.
        """
        own = len(self._before)
        if not np.array_equal(ids[:own], self._before):
            ids, mask = np.concatenate([self._before, ids]), np.concatenate([np.zeros(own, np.uint8), mask])
        else:
            mask[:own] = 0
        if row.ended and self._end is not None and (not len(ids) or ids[-1] != self._end):
            ids, mask = np.append(ids, np.int32(self._end)), np.append(mask, np.uint8(1))
        return ids, mask
