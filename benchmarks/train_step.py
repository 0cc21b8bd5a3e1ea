"""What an optimizer step of the training loop costs beside its bare arithmetic, in time and in memory.

Run: python benchmarks/train_step.py [--rounds R] [--threads T]

1. The loop's step, reading from the store included, over forward, backward, clipping and optimizer alone, of the same
   microbatches with everything ready: contexts assembled, anchors drawn. Rounds alternate; the ratio is the median of
   the rounds' own ratios.
2. How much more memory a step's peak takes with a vocabulary of 150,000 than with one of 2,000, the head's weights
   aside, for the same slots: the growth of the process's peak over what it held before, each in a process of its own.
3. The same contexts with answers of 600 and of 40 supervised tokens: cost follows anchors.

One thread by default: on a busy machine several would mostly wait for each other.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from store_kit import make_store
from torch import Tensor
from transformers import Qwen3Config

from dflash_tool.drafter.anchors import Blocks, decay_weights, draw_anchors, make_blocks
from dflash_tool.drafter.config import DrafterConfig, drafter_config
from dflash_tool.drafter.head import TargetHead
from dflash_tool.drafter.loss import _CHUNK_BYTES, _LEAST_ROWS, Loss, decay_loss
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.loader import LoadedStep, MixingLoader, anchor_counts, epoch_plans
from dflash_tool.store.reader import HiddenStore
from dflash_tool.trainer import DrafterGroup, DrafterTrainLoop, Replica

LAYERS, BLOCK, LR = (1, 9, 17, 25, 33), 16, 6e-4
WEIGHTS = decay_weights(BLOCK)
VOCABS, ANSWERS = (2_000, 150_000), (600, 40)
Ready = list[list[tuple[Tensor, Blocks]]]


def loss(hidden: Tensor, blocks: Blocks, head: TargetHead) -> Loss:
    """The loop's default."""
    return decay_loss(hidden, blocks, WEIGHTS, head)


def settings_of(width: int, layers: int, vocab: int) -> DrafterConfig:
    """A drafter in SmolLM2-135M's proportions."""
    target = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=36,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 192),
        head_dim=64,
    )
    settings, _ = drafter_config(
        target, target_layer_ids=LAYERS, mask_token_id=vocab - 1, block_size=BLOCK, num_layers=layers
    )
    return settings


def head_of(settings: DrafterConfig) -> TargetHead:
    """A random head."""
    generator = torch.Generator().manual_seed(1)
    return TargetHead(0.02 * torch.randn(settings.vocab_size, settings.hidden_size, generator=generator))


class Bench:
    """A store, a loop over it, and the same drafter bare."""

    def __init__(
        self, root: Path, *, width: int, layers: int, vocab: int, steps: int, samples: int, answer: int, anchors: int
    ) -> None:
        lengths = np.random.default_rng(0).integers(610, 660, steps * samples).tolist()
        make_store(root, lengths, edges=(660,), layers=LAYERS, hidden_size=width, vocab=vocab - 1, answer=answer)
        self.store = HiddenStore.open(root)
        rows = np.arange(len(lengths))
        plan_of = epoch_plans(
            self.store.samples,
            rows,
            anchors_of=anchor_counts(self.store.samples),
            anchors=anchors,
            block_size=BLOCK,
            seed=0,
            batch_samples=samples,
            context_budget=4096,
            block_budget=8192,
        )
        self.loader = MixingLoader(
            self.store, rows, plan_of, layers=LAYERS, epochs=2, window_bytes=1 << 28, threads=1, verify="first"
        )
        settings = settings_of(width, layers, vocab)
        self.anchors, self.head = anchors, head_of(settings)
        self.model = DFlashDraftModel(settings, seed=0)
        replica = Replica(self.model, self.head, loss=loss, anchors=anchors)
        self.loop = DrafterTrainLoop(DrafterGroup([replica]), total_steps=2 * steps, lr=LR)
        self.bare = DFlashDraftModel(settings, seed=0)
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def ready(self, step: LoadedStep) -> list[tuple[Tensor, Blocks]]:
        """What a bare step needs of each microbatch, copied."""
        made = []
        for batch in step:
            rows = [slice(0, length) for length in batch.lengths.tolist()]
            tokens, masks = (
                [each[row] for each, row in zip(tensor.numpy(), rows, strict=True)]
                for tensor in (batch.input_ids, batch.loss_mask)
            )
            copies = np.zeros(len(rows))
            drawn = draw_anchors(masks, batch.sample_ids, copies, count=self.anchors, seed=0, epoch=step.epoch)
            blocks = make_blocks(tokens, masks, drawn, block_size=BLOCK)
            made.append((batch.context(dtype=torch.float32), blocks))
        return made

    def bare_step(self, ready: list[tuple[Tensor, Blocks]]) -> float:
        """Forward, backward, clip, optimizer; returns the seconds."""
        began = time.perf_counter()
        weight = sum(blocks.total_weight(WEIGHTS) for _, blocks in ready)
        self.optimizer.zero_grad(set_to_none=True)
        for context, blocks in ready:
            noise = self.head.noise(blocks, self.bare.settings.mask_token_id)
            hidden = self.bare.draft_blocks(context, noise, blocks)
            (loss(hidden, blocks, self.head).numerator / weight).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.bare.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - began


@contextmanager
def bench(**sizes: int) -> Iterator[Bench]:
    """A bench in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        made = Bench(Path(folder) / "store", **sizes)
        with made.store, made.loader, made.loop.group:
            yield made


def overhead(rounds: int) -> float:
    """Step of the loop over the bare step."""
    steps = rounds + 1
    with bench(width=576, layers=3, vocab=8192, steps=steps, samples=8, answer=600, anchors=24) as made:
        begun = made.loader.state_dict()
        every = []
        for step in made.loader:
            if step.epoch:
                break
            every.append(made.ready(step))
        made.loader.load_state_dict(begun)
        ours, seconds = iter(made.loader), []
        for ready in every:
            theirs = made.bare_step(ready)
            began = time.perf_counter()
            made.loop.step(next(ours))
            seconds.append((time.perf_counter() - began, theirs))
    mine, theirs = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
    ratio = statistics.median(a / b for a, b in seconds[1:])
    slots = sum(len(blocks) * BLOCK for _, blocks in every[0])
    print(f"a step of {len(every[0])} microbatches, {slots} slots: {1000 * mine:.0f} ms, bare {1000 * theirs:.0f} ms")
    return ratio


def shorter_answers(rounds: int) -> float:
    """Step with long answers over the step with short ones, of the same contexts."""
    medians = []
    for answer in ANSWERS:
        with bench(width=192, layers=3, vocab=8192, steps=rounds + 1, samples=2, answer=answer, anchors=512) as made:
            seconds = []
            for step in made.loader:
                began = time.perf_counter()
                made.loop.step(step)
                seconds.append(time.perf_counter() - began)
                if len(seconds) > rounds:
                    break
            medians.append(statistics.median(seconds[1:]))
        print(f"answers of {answer} tokens: {1000 * medians[-1]:.0f} ms a step")
    return medians[0] / medians[1]


def status(name: str) -> int:
    """A memory figure of this process in bytes (Linux)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measure_memory(vocab: int) -> None:
    """Print the bytes by which the peak grows in a forward and backward of 64 blocks, the head in memory before."""
    lengths, anchors = 640, 64

    def run(settings: DrafterConfig, head: TargetHead) -> None:
        model = DFlashDraftModel(settings, seed=0)
        mask = np.ones(lengths, np.uint8)
        tokens = np.random.default_rng(0).integers(0, 90, lengths)
        ids = np.zeros((1, 2), np.uint64)
        drawn = draw_anchors([mask], ids, np.zeros(1), count=anchors, seed=0, epoch=0)
        blocks = make_blocks([tokens], [mask], drawn, block_size=BLOCK)
        context = torch.randn(1, lengths, len(LAYERS) * settings.hidden_size)
        hidden = model.draft_blocks(context, head.noise(blocks, settings.mask_token_id), blocks)
        torch.autograd.grad(loss(hidden, blocks, head).numerator, list(model.parameters()))

    small = settings_of(192, 2, 100)
    run(small, head_of(small))
    settings = settings_of(192, 2, vocab)
    head = head_of(settings)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run(settings, head)
    print(status("VmHWM") - before)


def memory(threads: int) -> float:
    """Growth of the peak from the small vocabulary to the large one, in chunks of logits."""
    peaks = []
    for vocab in VOCABS:
        command = [sys.executable, __file__, "--threads", str(threads), "--memory", str(vocab)]
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back: the peak is what is in use
        done = [subprocess.run(command, env=env, check=True, capture_output=True, text=True) for _ in range(3)]
        peaks.append(min(int(run.stdout) for run in done))
        print(f"vocabulary of {vocab:,}: the peak grows by {peaks[-1] / 2**20:.1f} MiB")
    return (peaks[1] - peaks[0]) / max(_CHUNK_BYTES["cpu"], _LEAST_ROWS * VOCABS[1] * 4)


def main() -> int:
    """Print the table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="The training loop's step beside its bare arithmetic")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, metavar="VOCAB", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        measure_memory(args.memory)
        return 0
    table = [
        ("the loop's step over the bare step", overhead(args.rounds), "at most", 1.03),
        ("more memory with 150,000 tokens than with 2,000, in chunks of logits", memory(args.threads), "below", 2.0),
        ("steps as fast with answers of 40 as with 600", shorter_answers(max(3, args.rounds // 3)), "at least", 5.0),
    ]
    print()
    met = []
    for what, value, word, goal in table:
        met.append(value >= goal if word == "at least" else value <= goal)
        print(f"{what:<70} {value:6.3f}   {word} {goal}" + ("" if met[-1] else "   MISSED"))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
