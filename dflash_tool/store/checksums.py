"""`checksums.json`: size and XXH3-128 of the root's files that have no hash of their own.

These are `samples.arrow`, `extract.yaml` and everything under `head/`. The document is canonical JSON, so that no byte
of it can change unseen either.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from dflash_tool.errors import StoreError
from dflash_tool.store.files import disk_errors, read_regular, replace_file
from dflash_tool.store.layout import CHECKSUMS, CONFIG, HEAD, SAMPLES

_LIMIT_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 22


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """{"bytes", "xxh3_128"} of a file, read in blocks; `progress` is given the bytes of each block."""
    digest = xxhash.xxh3_128()
    size = 0
    buffer = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
            if progress:
                progress(count)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def listed_files(root: Path) -> list[Path]:
    """The files that `checksums.json` covers, as they lie there now; links are refused."""
    paths = [root / name for name in (SAMPLES, CONFIG) if (root / name).is_file()]
    for path in sorted((root / HEAD).rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise StoreError(f"{path} is no regular file; a store holds no links: copy the file there")
        if path.is_file():
            paths.append(path)
    return paths


def write_checksums(root: Path, *written: Path) -> None:
    """Hash what was just written: files, or folders with all that is in them.

    What was listed before and isn't named keeps its entry, so that damage is never taken for the truth.
    """
    with disk_errors(root / CHECKSUMS, "write"):
        before = _listed(root)
        sums = {}
        for path in listed_files(root):
            name = path.relative_to(root).as_posix()
            new = name not in before or path in written or any(parent in written for parent in path.parents)
            sums[name] = hash_file(path) if new else before[name]
        replace_file(root / CHECKSUMS, _canonical(sums))


def _listed(root: Path) -> dict[str, Any]:
    """The entries of `checksums.json`; none where it is missing or damaged."""
    try:
        sums = json.loads(read_regular(root / CHECKSUMS, _LIMIT_BYTES))
    except (OSError, StoreError, ValueError):
        return {}
    return sums if isinstance(sums, dict) else {}


def check_checksums(
    root: Path, progress: Callable[[int], None] | None = None, *, rehash: bool = True
) -> Iterator[tuple[Path, str]]:
    """Yield (path, what is wrong) for each file that isn't what `checksums.json` says.

    Without `rehash` only names and sizes are compared.
    """
    path = root / CHECKSUMS
    try:
        data = read_regular(path, _LIMIT_BYTES)
        sums = json.loads(data)
        entries_whole = all(set(entry) == {"bytes", "xxh3_128"} for entry in sums.values())
        if data != _canonical(sums) or not entries_whole:
            yield path, "its content isn't as it was written"
            return
    except FileNotFoundError:
        yield path, "missing"
        return
    except (OSError, StoreError, ValueError, AttributeError, TypeError, RecursionError) as error:
        yield path, f"can't be read: {error}"
        return
    try:
        present = {file.relative_to(root).as_posix(): file for file in listed_files(root)}
    except StoreError as error:
        yield root / HEAD, str(error)
        return
    for name in sorted({*sums, *present}):
        if name not in present:
            yield root / name, f"missing, but listed in {path}"
        elif name not in sums:
            yield root / name, f"not listed in {path}"
        elif what := _differs(root / name, sums[name], progress, rehash):
            yield root / name, f"{what} in {path}"


def _differs(path: Path, entry: dict[str, Any], progress: Callable[[int], None] | None, rehash: bool) -> str:
    try:
        size = path.stat().st_size
        got = hash_file(path, progress) if rehash else {**entry, "bytes": size}
    except OSError as error:
        return f"can't be read: {error.strerror or error}; it is listed"
    for key, what in (("bytes", "size"), ("xxh3_128", "hash")):
        if got[key] != entry[key]:
            return f"its {what} is {got[key]}, but {entry[key]}"
    return ""


def _canonical(sums: Any) -> bytes:
    return json.dumps(sums, indent=2, sort_keys=True).encode() + b"\n"
