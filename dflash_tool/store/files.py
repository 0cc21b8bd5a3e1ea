"""Durable files: atomic replacement, fsync of files and folders, disk errors in the user's words.

A file is replaced by writing a temporary one beside it, fsync, rename, fsync of the folder: after a power
loss there is either the old or the new one, whole.
"""

import errno
import os
import resource
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_tool.errors import StoreError

TEMP_PREFIX = ".tmp-"
_FSYNC_THREADS = 32
_REMEDY = {
    errno.ENOSPC: "free some space there and run the same command again: committed shards are kept",
    errno.EDQUOT: "your quota is used up: free some space and run the same command again: committed shards are kept",
    errno.EROFS: "the file system is read-only: remount it or choose another folder",
    errno.EACCES: "give yourself permission to write there or choose another folder",
    errno.EPERM: "give yourself permission to write there or choose another folder",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run the same command again",
}


def free_bytes(path: Path) -> int:
    """Bytes free for this user on the file system of `path` (or of its nearest existing parent)."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def bytes_of(paths: Iterable[Path]) -> int:
    """Total size of files; what a run at work has just removed or renamed counts nothing."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    return total


@contextmanager
def disk_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` into a `StoreError` that says what, where, how much room there is and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        text = f"can't {doing} {where}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                text += f" ({free_bytes(path):,} bytes free)"
        remedy = _REMEDY.get(error.errno or 0, "check the disk and run the same command again")
        raise StoreError(f"{text}; {remedy}") from error


def write_all(fd: int, data: memoryview) -> None:
    """Write every byte; a single `write` stops at 2 GiB or at a nearly full disk."""
    while data.nbytes:
        data = data[os.write(fd, data) :]


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_all(paths: Sequence[Path]) -> None:
    """Fsync many files and folders at once: the file system's journal then commits them together."""
    with ThreadPoolExecutor(min(_FSYNC_THREADS, len(paths))) as pool:
        for _ in pool.map(fsync_path, paths):
            pass


def write_file(path: Path, data: bytes) -> None:
    """Create (or replace, not atomically) a file; nothing is synced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        write_all(fd, memoryview(data))
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically and durably, in place of an older one if there is one."""
    temporary = path.with_name(TEMP_PREFIX + path.name)
    try:
        write_file(temporary, data)
        fsync_path(temporary)
        temporary.rename(path)
        fsync_path(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """Content of a regular file of at most `limit` bytes; a link, a pipe or a huge file is refused.

    Raises `FileNotFoundError` if there is none and `StoreError` for the rest.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is no regular file; a store holds no links: copy the file itself there")
    if found.st_size > limit:
        raise StoreError(f"{path} has {found.st_size:,} bytes, at most {limit:,} were expected: the file is damaged")
    return path.read_bytes()


def want_open_files(count: int) -> int:
    """Raise the soft limit of open files to `count` if the hard limit lets us; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count if soft == resource.RLIM_INFINITY else soft
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def make_folder(path: Path) -> bool:
    """Whether the folder was not there and is now. Who made it may remove it again, holding its lock."""
    with disk_errors(path, "make the folder"):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            return False
    return True
