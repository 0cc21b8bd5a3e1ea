"""What lies in `shards/` and `index/`: a listing that touches nothing.

A shard is committed iff its folder and its index are both there under their final names. Only names that
`layout` writes are ours; everything else is foreign and never opened or deleted. Links are refused: a store
that points elsewhere could make us delete there.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dflash_tool.errors import StoreError
from dflash_tool.store.files import TEMP_PREFIX, disk_errors
from dflash_tool.store.layout import CHECKSUMS, CONFIG, HEAD, MANIFEST, SAMPLES, ShardName, index_dir, shards_dir

# Temporary names in the root that a killed run may leave; a folder may be built as `.tmp-head`.
_ROOT_FILES = "|".join(map(re.escape, (MANIFEST, SAMPLES, f"raw-{SAMPLES}", f"{SAMPLES}.d", CHECKSUMS, CONFIG, HEAD)))
_ROOT_TEMPORARY = re.compile(rf"{re.escape(TEMP_PREFIX)}({_ROOT_FILES}|lock-[0-9a-f]{{16}})")


@dataclass
class Scan:
    """Names found in a store; paths are whole."""

    shards: set[ShardName] = field(default_factory=set)
    indexes: set[ShardName] = field(default_factory=set)
    temporary_names: set[ShardName] = field(default_factory=set)
    temporary: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    @property
    def committed(self) -> list[ShardName]:
        """Committed shards, in the order of their names."""
        return sorted(self.shards & self.indexes)

    def next_number(self, bucket: int, rank: int) -> int:
        """A number that no shard, index or leftover of this bucket and rank has."""
        used = self.shards | self.indexes | self.temporary_names
        return max((s.number + 1 for s in used if (s.bucket, s.rank) == (bucket, rank)), default=0)


def scan(root: Path) -> Scan:
    """List a store. Raises `StoreError` where one of our names is a link or of the wrong kind."""
    found = Scan()
    with disk_errors(root, "list"):
        _scan_folder(shards_dir(root), ".zarr", _is_folder, found.shards, found)
        _scan_folder(index_dir(root), ".parquet", _is_file, found.indexes, found)
        paths = sorted(root.iterdir()) if root.is_dir() else []
        found.temporary += [path for path in paths if _ROOT_TEMPORARY.fullmatch(path.name)]
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


def _scan_folder(
    folder: Path,
    suffix: str,
    right_kind: Callable[[os.DirEntry[str]], bool],
    names: set[ShardName],
    found: Scan,
) -> None:
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link; a store holds no links: move the folder itself there")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder: {folder.parent} is no store of ours; choose another one")
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            stem = entry.name.removesuffix(suffix)
            temporary = stem.startswith(TEMP_PREFIX)
            name = ShardName.parse(stem.removeprefix(TEMP_PREFIX)) if stem != entry.name else None
            if name is None:
                found.foreign.append(Path(entry.path))
            elif not right_kind(entry):
                kind = "link" if entry.is_symlink() else "file of another kind"
                raise StoreError(f"{entry.path} is a {kind}, not one that dflash wrote; move it away")
            elif temporary:
                found.temporary_names.add(name)
                found.temporary.append(Path(entry.path))
            else:
                names.add(name)
