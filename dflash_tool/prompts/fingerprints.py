"""Fingerprints (XXH3-128 in hex) of what prepared samples depend on: data files, tokenizer, template."""

import json
from pathlib import Path
from typing import Any

import xxhash

from dflash_tool.errors import DataError
from dflash_tool.prompts.tokenise import leading_ids, private_backend
from dflash_tool.schemas.manifest import DataFile

_BLOCK_BYTES = 1 << 20


def fingerprint_file(path: Path) -> DataFile:
    """Path as given, size and hash of a data file. Raises `DataError`."""
    digest, size = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise DataError(f"{path}: can't read this data file: {error.strerror or error}") from error
    return DataFile(path=str(path), bytes=size, xxh3=digest.hexdigest())


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of all that decides which tokens a text becomes, BOS included, and of the names of the special tokens.

    Padding, truncation and all other post-processing are left out: they play no part in prepared samples.
    """
    digest = xxhash.xxh3_128(private_backend(tokenizer).to_str().encode())
    digest.update(json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str).encode())
    digest.update(json.dumps(leading_ids(tokenizer)).encode())
    return digest.hexdigest()


def template_fingerprint(template: str | dict[str, str] | None) -> str:
    """Of a chat template as a tokenizer holds it: its text, several by name, or none."""
    return xxhash.xxh3_128(json.dumps(template, sort_keys=True).encode()).hexdigest()
