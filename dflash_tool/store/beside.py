"""`verify` beside a run that may be at work: only what is committed is judged.

What such a run changes is known:

- shards that aren't committed yet, or not any more (`extract --verify` drops damaged ones and makes them again);
- the files of the root, but only until the first shard is committed: from then on they stay as they are, except
  for extract.yaml, which every run writes when it begins.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from dflash_tool.errors import StoreError
from dflash_tool.store.files import TEMP_PREFIX
from dflash_tool.store.layout import CONFIG
from dflash_tool.store.lock import run_at_work
from dflash_tool.store.scan import scan
from dflash_tool.store.verify import Damage, verify


def verify_committed(root: Path, *, progress: Callable[[int], None] | None = None) -> Iterator[Damage]:
    """Yield all damage in a store, as `verify` does, without what a living run is making or mending."""
    before = run_at_work(root)
    begun = False
    with suppress(StoreError):  # verify says it
        begun = bool(scan(root).committed)
    for found in verify(root, progress=progress):
        at_work = before or run_at_work(root)  # it may have begun, or ended, meanwhile
        if not (at_work and _in_progress(root, found, begun=begun)):
            yield found


def _in_progress(root: Path, found: Damage, *, begun: bool) -> bool:
    match found.kind:
        case "missing" | "absent":
            return True
        case "extra":
            return found.path.name.startswith(TEMP_PREFIX)
        case "checksum" | "samples" | "manifest":
            return not begun or found.path == root / CONFIG
    return found.shard is not None and found.shard not in scan(root).committed
