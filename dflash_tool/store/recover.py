"""What a killed run left: leftovers are deleted, committed samples are found.

Only names of ours are touched (see `scan`). In this order, so that a kill in here does no harm either:
temporary files; indexes without a shard; shards without an index (their hashes are lost, so their rows can't
be trusted); shards whose index is damaged.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_tool.schemas.config import LayerId
from dflash_tool.store.files import disk_errors, fsync_path
from dflash_tool.store.index import (
    CommittedIndex,
    DamagedIndexError,
    ShardIndex,
    join_indexes,
    read_shard_index,
)
from dflash_tool.store.layout import ShardName, index_dir, index_path, shard_path, shards_dir
from dflash_tool.store.scan import scan


@dataclass(frozen=True)
class Recovered:
    """The committed samples, and in words what was removed to get there."""

    index: CommittedIndex
    removed: tuple[str, ...]


def recover(root: Path, layers: Sequence[LayerId]) -> Recovered:
    """Clean up after a killed run; to be called by the one run that holds the store's lock (rank 0).

    Raises `StoreError` if a link or a foreign thing bears one of our names, if something can't be deleted, if
    shards are of other layers, or if a sample is committed twice.
    """
    found = scan(root)
    removed = []
    with disk_errors(root, "remove leftovers in"):
        for path in found.temporary:
            _remove(path)
            removed.append(f"{path.relative_to(root)}: unfinished when the last run ended")
        for name in sorted(found.indexes - found.shards):
            index_path(root, name).unlink()
            removed.append(f"index/{name}.parquet: its shard was never committed, or is lost")
        for name in sorted(found.shards - found.indexes):
            shutil.rmtree(shard_path(root, name))
            removed.append(f"shards/{name}.zarr: its index is missing, so its rows can't be checked")
        if removed:
            _fsync_folders(root)
    parts, unreadable = _read_indexes(root, found.committed, layers)
    drop_shards(root, unreadable)
    removed += [f"shard {name}: {why}" for name, why in unreadable.items()]
    return Recovered(join_indexes(layers, parts), tuple(removed))


def read_index(root: Path, layers: Sequence[LayerId]) -> CommittedIndex:
    """The committed samples, touching nothing: for readers, also while a run is writing.

    Raises `StoreError` if an index can't be read or a sample is committed twice.
    """
    return join_indexes(layers, [read_shard_index(root, name, layers) for name in scan(root).committed])


def drop_shards(root: Path, names: Iterable[ShardName]) -> None:
    """Delete committed (damaged) shards, so that the next extraction makes their samples again."""
    names = list(names)
    if not names:
        return
    with disk_errors(root, "remove damaged shards in"):
        for name in names:  # first the indexes: from here on the shards don't count as committed
            index_path(root, name).unlink(missing_ok=True)
        fsync_path(index_dir(root))
        for name in names:
            if shard_path(root, name).exists():
                shutil.rmtree(shard_path(root, name))
        fsync_path(shards_dir(root))


def _read_indexes(
    root: Path, names: Iterable[ShardName], layers: Sequence[LayerId]
) -> tuple[list[ShardIndex], dict[ShardName, str]]:
    parts, unreadable = [], {}
    for name in names:
        try:
            parts.append(read_shard_index(root, name, layers))
        except DamagedIndexError as error:
            unreadable[name] = str(error)
    return parts, unreadable


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fsync_folders(root: Path) -> None:
    for folder in (shards_dir(root), index_dir(root), root):
        if folder.is_dir():
            fsync_path(folder)
