"""Where a run's time went, by part of the step; which of it holds the run up; and memory.

A drafter's step is, one after the other: `data` (waiting for batches), `forward` (with the loss), `backward`,
`drafters` (waiting for the others of its rank), `ranks` (waiting for other ranks), `reduce` (gradients over ranks),
`optimizer`. Between steps rank 0 spends time on `validation` and `saving`.
On CUDA the host runs ahead of the device: what it then waits for the device is `device`, and counts as computing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

COMPUTE = ("forward", "backward", "device")
_HELD_UP_BY = {
    "data": ("reading hidden states", "more --loader-threads, a larger --inflight-gib or a faster disk would help"),
    "compute": ("the drafters' own forward and backward", "more drafters would help"),
    "drafters": ("uneven shares of the local drafters", "fewer of them, or a larger --batch-samples, would waste less"),
    "ranks": ("the slowest rank", "look at the drafters' seconds in metrics.jsonl"),
    "reduce": ("adding gradients up over ranks", "a larger --batch-samples makes that rarer"),
    "optimizer": ("the optimizer", "a larger --batch-samples makes its steps rarer"),
    "validation": ("validating", "a larger --val-every or a smaller --val-samples would help"),
    "saving": ("saving checkpoints", "a larger --save-every or a faster disk would help"),
}


@dataclass
class Clock:
    """Wall seconds by part; `spent` charges what went by since the last call."""

    seconds: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)

    def spent(self, part: str) -> None:
        """Charge the time since the last call to a part."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.since
        self.since = now


def bottleneck(spent: Mapping[str, float]) -> str:
    """What a run was held up by the longest, with its share of the seconds and a remedy; "" before any step."""
    whole = sum(spent.values())
    if not whole:
        return ""
    causes = {part: seconds for part, seconds in spent.items() if part not in COMPUTE}
    causes["compute"] = sum(spent.get(part, 0.0) for part in COMPUTE)
    worst = max(causes, key=lambda cause: causes[cause])
    what, remedy = _HELD_UP_BY[worst]
    return f"{what} ({100 * causes[worst] / whole:.0f} % of the time): {remedy}"


def peak_memory(devices: tuple[torch.device, ...]) -> int:
    """Bytes: the most allocated on any of these CUDA devices, or this process's peak of resident memory."""
    if devices[0].type == "cuda":
        return max(int(torch.cuda.max_memory_allocated(device)) for device in devices)
    import resource  # noqa: PLC0415 - not everywhere

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
