"""Prompts: data files of conversations or ready tokens -> prepared samples (token ids and loss masks).

1. `paths`      names and patterns -> files
2. `files`      file -> JSON values (`json_files`: lines or an array, perhaps gzipped; `parquet_files`)
3. `rows`       values -> `ChatRow`, `TextRow`, `TokenRow` (`messages`: turns) or `Skipped` (`reasons`: why)
4. `render`     conversation -> texts as a server sends them, spans of characters to learn; `raw` for other texts
5. `tokenise`   texts and spans -> token ids and loss masks
6. `samples`    ids and masks -> samples: length limits, checks, sample ids; record batches
7. `preparation`  the stream from 2 to 6, statistics
Beside them `tokenizer` (loading, template arguments, mask token) and `fingerprints`.
"""

from dflash_tool.prompts.fingerprints import fingerprint_file, template_fingerprint, tokenizer_fingerprint
from dflash_tool.prompts.paths import check_files, find_files
from dflash_tool.prompts.preparation import Preparation, PrepareStats
from dflash_tool.prompts.reasons import Reason, Skipped
from dflash_tool.prompts.render import ChatTemplate
from dflash_tool.prompts.rows import ChatRow, TextRow, TokenRow, read_rows
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
    "TextRow",
    "TokenRow",
    "check_files",
    "choose_mask_token",
    "find_files",
    "fingerprint_file",
    "load_tokenizer",
    "parse_template_args",
    "read_rows",
    "template_fingerprint",
    "tokenizer_fingerprint",
]
