"""A run's targets: loaded onto their devices, each looping in a thread of its own."""

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch

from dflash_tool.extractor import TargetForwardLoop
from dflash_tool.queue import BucketedHSQueue
from dflash_tool.resolving import Resolved
from dflash_tool.store.checksums import write_checksums
from dflash_tool.store.files import disk_errors, fsync_path
from dflash_tool.store.layout import HEAD
from dflash_tool.target import TargetModel
from dflash_tool.telemetry import ExtractTelemetry
from dflash_tool.wording import counted

T = TypeVar("T")


def load_targets(resolved: Resolved, telemetry: ExtractTelemetry, *, write_head: bool) -> dict[str, TargetModel]:
    """A target for each device, replicas sharing their weights; by name. Writes `head/` where it is missing.

    Targets on the CPU share the cores. Loading takes one: OpenMP keeps workers for each thread that ever computed with
    several, and with more of them than cores all go to sleep between operations: a target's small ones take longer.
    """
    telemetry.stage("loading the target")
    on_cpu = sum(device.type == "cpu" for device in resolved.devices)
    threads = max(1, torch.get_num_threads() // max(1, on_cpu))
    torch.set_num_threads(1)
    try:
        return _load(resolved, write_head=write_head)
    finally:
        torch.set_num_threads(threads)


def _load(resolved: Resolved, *, write_head: bool) -> dict[str, TargetModel]:
    root = resolved.config.out
    temporary = root / f".tmp-{HEAD}" if write_head and not (root / HEAD / "head.safetensors").is_file() else None
    targets: dict[str, TargetModel] = {}
    loaded: dict[str, TargetModel] = {}
    for number, device in enumerate(resolved.devices):
        targets[f"target {number} on {device}"] = loaded[str(device)] = (
            loaded[str(device)].replica()
            if str(device) in loaded
            else TargetModel.load(
                resolved.target,
                layers=resolved.layers,
                device=device,
                dtype=resolved.dtype,
                store_dtype=resolved.config.store_dtype,
                head=temporary if not targets else None,
                trust_remote_code=resolved.config.trust_remote_code,
            )
        )
    if write_head:
        with disk_errors(root / HEAD, "write"):
            if temporary is not None:
                try:
                    resolved.tokenizer.save_pretrained(temporary)
                except Exception as error:  # its backend raises nothing more special where the disk refuses
                    raise OSError(f"{error} (the tokenizer)") from error
                for file in (*temporary.iterdir(), temporary):
                    fsync_path(file)
                shutil.rmtree(root / HEAD, ignore_errors=True)
                temporary.rename(root / HEAD)
                fsync_path(root)
        write_checksums(root, *([root / HEAD] if temporary else []))
    return targets


def target_notes(targets: dict[str, TargetModel]) -> Iterator[str]:
    """What the user should know of how they ran."""
    for name, target in targets.items():
        if target.halvings:
            times = counted(target.halvings, "time")
            yield f"{name} ran out of memory and cut a batch in two {times}: lower --batch-tokens"
    if any(target.masked for target in targets.values()):
        yield "this target's attention looks ahead: a drafter trained on its states would see what it is to predict"


def start_targets(
    loops: dict[str, TargetForwardLoop[T]], states: BucketedHSQueue[T], abort: Callable[[BaseException], None]
) -> list[threading.Thread]:
    """A thread for each target loop; the last one to end closes the queue."""
    left, lock = len(loops), threading.Lock()

    def run(loop: TargetForwardLoop[T]) -> None:
        nonlocal left
        loop.run()
        with lock:
            left -= 1
            last = left == 0
        if last:
            states.close()

    return [start_thread(name, partial(run, loop), abort) for name, loop in loops.items()]


def start_thread(name: str, run: Callable[[], object], abort: Callable[[BaseException], None]) -> threading.Thread:
    """A thread whose failure stops everybody with the first error."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            abort(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
