"""A live run: how well its two sides overlap, what it adds to their own work, and whether its memory stays put.

Run: python benchmarks/live.py [--samples N] [--steps N]

1. Timed stages on real threads: two targets and a drafter that do nothing but wait, as long as a batch's tokens say,
   with the real source, window and queues between them. Wall over the slower side's own time: at most 1.1.
2. A real run, tiny target, two targets and one drafter of a thread each: wall over the sum of what both sides
   computed, and who waited for what.
3. Its resident memory from step 50 to the last one: under 2 % more.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_tool import pipeline
from dflash_tool.buckets import StepPlan, assign_buckets, choose_edges
from dflash_tool.loader import PlannedStep
from dflash_tool.pipeline.live_source import LiveFeed
from dflash_tool.schemas.live import LiveConfig
from dflash_tool.target import PaddedStates, Way
from dflash_tool.telemetry import TrainTelemetry

ROOT = Path(__file__).parent.parent
SECONDS_A_TOKEN = 2e-4  # of a target; the drafter takes half, so that both sides take equally long
LAYER = 0


class Samples:
    """Token ids that nobody looks at."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.ids = np.zeros((len(lengths), 2), np.uint64)
        self.copies = np.zeros(len(lengths), np.int64)

    def tokens(self, row: int) -> np.ndarray:
        """[T]."""
        return np.zeros(self.lengths[row], np.int32)

    mask = tokens

    def __len__(self) -> int:
        return len(self.lengths)


class Target:
    """Takes as long as its tokens say, without the GIL."""

    device = torch.device("cpu")

    def capture_padded(self, input_ids: np.ndarray, lengths: np.ndarray, layers: object, to: Way) -> PaddedStates:
        """States that nobody looks at."""
        del layers
        time.sleep(input_ids.size * SECONDS_A_TOKEN)
        states = to.empty((1, *input_ids.shape, 1), torch.float32)
        return PaddedStates(states=states, finite=np.ones(len(lengths), np.bool_), arrival=to.arrival(states))


def timed_stages(samples: int) -> None:
    """Two targets and a drafter that only wait."""
    lengths = np.clip(np.random.default_rng(0).lognormal(4.0, 0.9, samples), 4, 512).astype(np.int64)
    buckets = assign_buckets(lengths, choose_edges(lengths, 6))
    ids = np.random.default_rng(1).integers(0, 2**63, (samples, 2)).astype(np.uint64)
    plan = StepPlan(
        ids=ids, lengths=lengths, buckets=buckets, block_tokens=np.zeros(samples, np.int64), seed=0, epoch=0,
        batch_samples=64, context_budget=1024, block_budget=1,
    )  # fmt: skip
    steps = [
        PlannedStep(
            epoch=0, index=step.index, rows=plan.samples(step.index), microbatches=step.microbatches,
            drafters=(0,) * len(step.microbatches), fingerprint="",
        )
        for step in plan
    ]  # fmt: skip
    feed = LiveFeed(
        targets={"target 0": Target(), "target 1": Target()}, samples=Samples(lengths),  # type: ignore[arg-type]
        layers=(LAYER,), drafters=(torch.device("cpu"),), row_bytes=4, limit_bytes=1 << 30, places=8, steps_ahead=8,
        on_quarantine=lambda _: None,
    )  # fmt: skip
    source = feed(iter(steps), (LAYER,))
    began = time.perf_counter()
    source.start()
    number = step = 0
    while (planned := source.take_step(step)) is not None:
        for microbatch in planned.microbatches:
            batch = source.take_batch(number)
            time.sleep(microbatch.padded_tokens * SECONDS_A_TOKEN / 2)
            batch.release()
            number += 1
        step += 1
    wall = time.perf_counter() - began
    source.close()
    tokens = sum(batch.padded_tokens for each in steps for batch in each.microbatches)
    side = tokens * SECONDS_A_TOKEN / 2
    print(f"timed stages: {number} batches in {step} steps, wall / slower side {wall / side:.3f}")


class Watch(TrainTelemetry):
    """Notes the resident memory after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.resident: dict[int, int] = {}

    def update(self, **now: Any) -> None:
        """As `TrainTelemetry` does."""
        super().update(**now)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident[self.snapshot().step] = pages * 4096


def real_run(steps: int) -> None:
    """The tiny target and a small drafter on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        config = LiveConfig.model_validate(
            {
                "target": str(ROOT / "examples/tiny-target"), "data": [ROOT / "examples/chats.jsonl"],
                "out": Path(folder) / "run", "max_length": 96, "targets": 2, "target_device": "cpu",
                "drafter_device": "cpu", "draft_layers": 1, "block_size": 8, "anchors": 8, "batch_samples": 8,
                "microbatch_tokens": 512, "epochs": 1000, "max_steps": steps, "val_samples": 0, "save_every": 1 << 30,
                "inflight_gib": 0.2,
            }
        )  # fmt: skip
        telemetry = pipeline.LiveTelemetry(train=Watch())
        result = pipeline.live(config, telemetry)
    flow, trained, resident = result.flow, result.trained, telemetry.train.resident  # type: ignore[attr-defined]
    assert flow is not None
    targets = sum(target.computing for target in flow.targets.values())
    drafter = sum(seconds for part, seconds in trained.spent.items() if part not in {"data", "saving"})
    print(
        f"real run: {trained.steps} steps in {trained.seconds:.1f} s; targets computed {targets:.1f} s, the drafter "
        f"{drafter:.1f} s; wall / their sum {trained.seconds / (targets + drafter):.3f}"
    )
    print(f"  waited: {', '.join(f'{who} {seconds:.1f} s' for who, seconds in flow.waited.items())}, "
          f"drafter for data {trained.waited:.1f} s")  # fmt: skip
    print(f"  {result.bottleneck}; at most {flow.peak:,} of {flow.limit:,} bytes in flight")
    last = max(resident)
    if last >= 150:
        early, late = (
            int(np.median([resident[step] for step in range(first, first + 50)])) for first in (50, last - 49)
        )
        print(
            f"memory: {early:,} bytes in steps 50 to 99, {late:,} in the last 50 of {last} (medians): "
            f"{100 * (late / early - 1):+.2f} %"
        )


def main() -> int:
    """All three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed_stages(options.samples)
    real_run(options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
