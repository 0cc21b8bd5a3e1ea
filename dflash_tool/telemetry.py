"""What a running extraction says of itself: counters that any thread may add to, and one snapshot to draw.

The pipeline writes here and never draws; the command draws and never counts. Seconds are wall seconds.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExtractSnapshot:
    """One look at an extraction. Tokens, bytes and samples count what this run did, `held_*` what it found.

    queued: items by bucket; targets: real tokens by target; waited: seconds by who waited for what.
    """

    stage: str
    stage_done: int
    stage_total: int
    seconds: float
    samples: int
    samples_total: int
    held_samples: int
    real_tokens: int
    padded_tokens: int
    held_tokens: int
    tokens_total: int
    bytes_written: int
    shards: int
    inflight_bytes: int
    inflight_limit: int
    peak_inflight: int
    queued: dict[int, int]
    targets: dict[str, int]
    waited: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a second since the targets started."""
        return self.real_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def padding(self) -> float:
        """Share of the target's computed tokens that were padding, so far."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to go at the rate so far, or None before there is one."""
        rate = self.tokens_per_second
        return (self.tokens_total - self.held_tokens - self.real_tokens) / rate if rate > 0 else None


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """Numbers that the window and the queue already keep; read when somebody looks."""

    inflight: Callable[[], int]
    peak: Callable[[], int]
    queued: Callable[[], dict[int, int]]
    targets: Callable[[], dict[str, int]]
    waited: Callable[[], dict[str, float]]
    limit: int


@dataclass
class ExtractTelemetry:
    """Counters of one extraction. `stage` names the phase before the targets run ("reading", "hashing", ...)."""

    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stage: tuple[str, int, int] = ("starting", 0, 0)
    _started: float | None = None
    _stopped: float | None = None
    _totals: dict[str, int] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _gauges: Gauges | None = None

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Enter a phase, or move on in it: `done` of `total` (bytes, tokens or files: whatever it counts)."""
        with self._lock:
            self._stage = (name, done, total)

    def start(self, *, samples: int, tokens: int, held_samples: int, held_tokens: int, gauges: Gauges) -> None:
        """The targets start: from here on rates count."""
        with self._lock:
            self._stage = ("extracting", 0, 0)
            self._totals = {
                "samples_total": samples,
                "tokens_total": tokens,
                "held_samples": held_samples,
                "held_tokens": held_tokens,
            }
            self._gauges = gauges
            self._started = self.clock()

    def stop(self) -> None:
        """The last row is written: rates stand still."""
        with self._lock:
            self._stage = ("done", 0, 0)
            self._stopped = self.clock()

    def add(self, **counts: int) -> None:
        """Add to samples, real_tokens or padded_tokens."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def set(self, **counts: int) -> None:
        """Set bytes_written or shards, which the writer counts itself."""
        with self._lock:
            self._counts.update(counts)

    def snapshot(self) -> ExtractSnapshot:
        """A consistent copy of all counters."""
        with self._lock:
            stage, done, total = self._stage
            end = self._stopped if self._stopped is not None else self.clock()
            counts = dict(self._counts)
            totals = dict(self._totals)
            gauges = self._gauges
            seconds = end - self._started if self._started is not None else 0.0
        return ExtractSnapshot(
            stage=stage,
            stage_done=done,
            stage_total=total,
            seconds=seconds,
            samples=counts.get("samples", 0),
            samples_total=totals.get("samples_total", 0),
            held_samples=totals.get("held_samples", 0),
            real_tokens=counts.get("real_tokens", 0),
            padded_tokens=counts.get("padded_tokens", 0),
            held_tokens=totals.get("held_tokens", 0),
            tokens_total=totals.get("tokens_total", 0),
            bytes_written=counts.get("bytes_written", 0),
            shards=counts.get("shards", 0),
            inflight_bytes=gauges.inflight() if gauges else 0,
            inflight_limit=gauges.limit if gauges else 0,
            peak_inflight=gauges.peak() if gauges else 0,
            queued=gauges.queued() if gauges else {},
            targets=gauges.targets() if gauges else {},
            waited=gauges.waited() if gauges else {},
        )


@dataclass(frozen=True, kw_only=True)
class TrainSnapshot:
    """One look at a training run. losses, taus: (step, value) so far; buckets: samples of the newest step by bucket.

    seconds: since the first step of this run; waited: of them for data; spent: of them by part of the step; trouble:
    what the user should mend while the run goes on.
    """

    stage: str
    step: int
    first_step: int
    total_steps: int
    seconds: float
    loss: float | None
    losses: tuple[tuple[int, float], ...]
    taus: tuple[tuple[int, float], ...]
    lr: float
    grad_norm: float | None
    tokens: int
    blocks: int
    buckets: dict[int, int]
    waited: float
    spent: dict[str, float]
    trouble: str | None = None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to go at the pace so far, or None before there is one."""
        done = self.step - self.first_step
        return (self.total_steps - self.step) * self.seconds / done if done > 0 else None


@dataclass
class TrainTelemetry:
    """What a training run says of itself. Written by the training thread, read by whoever draws."""

    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _now: dict[str, Any] = field(default_factory=dict)
    _losses: list[tuple[int, float]] = field(default_factory=list)
    _taus: list[tuple[int, float]] = field(default_factory=list)
    _started: float | None = None
    _stopped: float | None = None

    def stage(self, name: str) -> None:
        """Enter a phase: "opening the store", "validating", "training", ..."""
        with self._lock:
            self._now["stage"] = name

    def start(self, *, step: int, total_steps: int) -> None:
        """The first step of this run begins."""
        with self._lock:
            self._now |= {"stage": "training", "step": step, "first_step": step, "total_steps": total_steps}
            self._started = self.clock()

    def stop(self) -> None:
        """The last step is done."""
        with self._lock:
            self._stopped = self.clock()

    def update(self, **now: Any) -> None:
        """Newest values of `TrainSnapshot`'s fields; a loss joins the history."""
        with self._lock:
            self._now |= now
            if "loss" in now:
                self._losses.append((self._now["step"], now["loss"]))

    def tau(self, step: int, value: float) -> None:
        """A validation's walk tau."""
        with self._lock:
            self._taus.append((step, value))

    def snapshot(self) -> TrainSnapshot:
        """A consistent copy."""
        with self._lock:
            end = self._stopped if self._stopped is not None else self.clock()
            empty: dict[str, Any] = {
                "stage": "starting", "step": 0, "first_step": 0, "total_steps": 0, "loss": None, "lr": 0.0,
                "grad_norm": None, "tokens": 0, "blocks": 0, "buckets": {}, "waited": 0.0, "spent": {},
            }  # fmt: skip
            return TrainSnapshot(
                **(empty | self._now),
                seconds=end - self._started if self._started is not None else 0.0,
                losses=tuple(self._losses),
                taus=tuple(self._taus),
            )
