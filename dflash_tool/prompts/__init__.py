"""Prompts: data files of conversations or ready tokens -> prepared samples (token ids and loss masks).

1. `rows`       JSONL lines -> `ChatRow`, `TokenRow` or `Skipped` (`reasons`: why)
2. `render`     conversation -> texts as a server sends them, spans of characters to learn
3. `tokenise`   texts and spans -> token ids and loss masks
4. `samples`    ids and masks -> samples: length limits, checks, sample ids; record batches
5. `preparation`  the stream from 1 to 4, statistics
Beside them `tokenizer` (loading, template arguments, mask token) and `fingerprints`.
"""

from dflash_tool.prompts.fingerprints import fingerprint_file, template_fingerprint, tokenizer_fingerprint
from dflash_tool.prompts.preparation import Preparation, PrepareStats
from dflash_tool.prompts.reasons import Reason, Skipped
from dflash_tool.prompts.render import ChatTemplate
from dflash_tool.prompts.rows import ChatRow, TokenRow, check_files, read_rows
from dflash_tool.prompts.samples import PREPARED_SCHEMA, PrepareOptions
from dflash_tool.prompts.tokenizer import choose_mask_token, load_tokenizer, parse_template_args

__all__ = [
    "PREPARED_SCHEMA",
    "ChatRow",
    "ChatTemplate",
    "Preparation",
    "PrepareOptions",
    "PrepareStats",
    "Reason",
    "Skipped",
    "TokenRow",
    "check_files",
    "choose_mask_token",
    "fingerprint_file",
    "load_tokenizer",
    "parse_template_args",
    "read_rows",
    "template_fingerprint",
    "tokenizer_fingerprint",
]
