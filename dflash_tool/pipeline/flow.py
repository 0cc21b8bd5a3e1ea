"""Who waits for whom in a live run: what targets, window and drafters say of themselves, and the sentence it comes to.

Seconds are wall seconds. A target waits for a batch because dispatch waits: for bytes of the window, for a place of
its bucket, or for drafters to finish a step. A drafter waits for data because the targets have not made it yet.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_tool.pipeline.live_source import LiveSource


@dataclass(frozen=True, kw_only=True)
class TargetFlow:
    """One target so far. tokens: real ones; computing, waiting: seconds."""

    tokens: int
    padded_tokens: int
    computing: float
    waiting: float

    @property
    def idle(self) -> float:
        """Share of its time that it waited for a batch."""
        return self.waiting / max(self.waiting + self.computing, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One look at what is between targets and drafters.

    for_memory, for_places, for_steps: seconds that dispatch waited; inflight, peak, limit: bytes of the window; queued:
    finished batches that no drafter has taken, by bucket.
    """

    targets: dict[str, TargetFlow]
    for_memory: float
    for_places: float
    for_steps: float
    inflight: int
    peak: int
    limit: int
    queued: dict[int, int]

    @property
    def tokens(self) -> int:
        """Real tokens that the targets have computed."""
        return sum(target.tokens for target in self.targets.values())

    @property
    def padded_tokens(self) -> int:
        """Tokens that the targets have computed, padding included."""
        return sum(target.padded_tokens for target in self.targets.values())

    @property
    def waited(self) -> dict[str, float]:
        """Seconds by who waited for what."""
        return {
            **{f"{name} for batches": target.waiting for name, target in self.targets.items()},
            "dispatch for memory": self.for_memory,
            "dispatch for places": self.for_places,
            "dispatch for steps": self.for_steps,
        }

    @property
    def idle(self) -> float:
        """Share of the targets' time that they waited."""
        waiting = sum(target.waiting for target in self.targets.values())
        return waiting / max(waiting + sum(target.computing for target in self.targets.values()), 1e-9)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Flow":
        """From `asdict` as JSON hands it over."""
        targets = {name: TargetFlow(**target) for name, target in plain["targets"].items()}
        queued = {int(bucket): items for bucket, items in plain["queued"].items()}
        return cls(**{**plain, "targets": targets, "queued": queued})

    def as_json(self) -> dict[str, Any]:
        """Plain numbers: fields of a row of metrics.jsonl, and of the run's one JSON document."""
        return {
            "targets": {name: asdict(target) | {"idle": target.idle} for name, target in self.targets.items()},
            "dispatch_waited": {"memory": self.for_memory, "places": self.for_places, "steps": self.for_steps},
            "inflight_bytes": self.inflight,
            "peak_inflight_bytes": self.peak,
            "inflight_limit_bytes": self.limit,
            "queued": {str(bucket): items for bucket, items in sorted(self.queued.items())},
            "target_tokens": self.tokens,
        }


def look(source: LiveSource) -> Flow:
    """What a source is like now."""
    window, now = source.window, time.monotonic()
    waits, steps = window.waits(), source.gate.waits()
    return Flow(
        targets={
            name: TargetFlow(
                tokens=loop.counters.tokens,
                padded_tokens=loop.counters.padded_tokens,
                computing=loop.counters.computing,
                waiting=loop.counters.waiting + now - (loop.counters.free_since or now),
            )
            for name, loop in source.loops.items()
        },
        for_memory=waits.bytes,
        for_places=waits.places,
        for_steps=steps.bytes + steps.places,
        inflight=window.in_flight,
        peak=window.peak,
        limit=window.limit_bytes,
        queued=source.states.bucket_sizes(),
    )


def join(flows: Sequence[Flow]) -> Flow:
    """All ranks' as one: targets by rank, waits added up, bytes of the rank that has most."""
    if len(flows) == 1:
        return flows[0]
    queued: Counter[int] = Counter()
    for flow in flows:
        queued.update(flow.queued)
    return Flow(
        targets={f"rank {rank} {name}": each for rank, flow in enumerate(flows) for name, each in flow.targets.items()},
        for_memory=sum(flow.for_memory for flow in flows),
        for_places=sum(flow.for_places for flow in flows),
        for_steps=sum(flow.for_steps for flow in flows),
        inflight=max(flow.inflight for flow in flows),
        peak=max(flow.peak for flow in flows),
        limit=max(flow.limit for flow in flows),
        queued=dict(queued),
    )


def bottleneck(spent: Mapping[str, float], flow: Flow) -> str:
    """One sentence: which side waited how much, whose fault it is, what would move it; "" before any step.

    spent: seconds of a drafter's time by part (`trainer.timing`).
    """
    whole = sum(spent.values())
    if not whole:
        return ""
    drafters, targets = spent.get("data", 0.0) / whole, flow.idle
    said = f"drafters idle {100 * drafters:.0f} %, targets idle {100 * targets:.0f} %"
    starved = flow.for_memory + flow.for_places > flow.for_steps
    if min(drafters, targets) > _BOTH_WAIT and starved:
        option = "--inflight-gib" if flow.for_memory >= flow.for_places else "--hs-queue-depth"
        return f"{said}: the in-flight window is the bottleneck; raise {option}"
    rest = {part: seconds for part, seconds in spent.items() if part in _BETWEEN_STEPS}
    worst = max(rest, key=lambda part: rest[part], default="")
    if worst and rest[worst] / whole > max(_MUCH, drafters):
        return f"{said}: {_BETWEEN_STEPS[worst]}"
    if drafters >= targets:
        return f"{said}: targets are the bottleneck; add a target, or `dflash extract` once and `dflash train`"
    return f"{said}: drafters are the bottleneck; add a drafter, or use fewer targets"


_BOTH_WAIT = 0.15
_MUCH = 0.3
_BETWEEN_STEPS = {
    "validation": "validating is the bottleneck; a larger --val-every or a smaller --val-samples would help",
    "saving": "saving checkpoints is the bottleneck; a larger --save-every or a faster disk would help",
}
