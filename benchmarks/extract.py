"""`extract` against a bare loop and against what public dumpers do, as ratios measured in one run.

    python benchmarks/extract.py [tiny] [smollm2] [--samples N] [--pairs N] [--batch-tokens N]

- bare loop: the truncated forward on the same planned batches, results thrown away; in pairs with `extract` (plan,
  queue, hashing, shards on disk), alternating, medians
- dumper: dataset-order batches of 8, padded to the longest, attention mask, `output_hidden_states=True`, full model
- peak: what fp32 matmuls sustain here, before and after each `extract` (the better of the two); the share counts
  real tokens' operations alone

Tokens are real ones. Loading and tokenising count on no side; the writing and the fsync of shards count in `extract`.
Each side computes in a thread that ends with it: OpenMP keeps a pool of workers for every thread that computed, and
with more of them than cores all of them go to sleep between operations, which would slow down whoever comes last.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from smollm2 import smollm2
from transformers import AutoModelForCausalLM

from dflash_tool import pipeline
from dflash_tool.planning import ExtractionPlan
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.target import TargetModel

EXAMPLES = Path(__file__).parent.parent / "examples"
DUMPER_BATCH = 8
T = TypeVar("T")


def main() -> None:
    """Measure the targets named on the command line (both by default) and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*", default=["tiny", "smollm2"], choices=["tiny", "smollm2"])
    parser.add_argument("--samples", type=int, help="chats to use [default: all for tiny, 240 for smollm2]")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, help="as in `extract` [default: its own]")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}")
    for name in args.targets:
        folder = EXAMPLES / "tiny-target" if name == "tiny" else smollm2()
        samples = args.samples or (100_000 if name == "tiny" else 240)
        with tempfile.TemporaryDirectory() as scratch:
            measure(name, folder, samples, args.pairs, args.batch_tokens, Path(scratch))


def measure(name: str, folder: Path, samples: int, pairs: int, batch_tokens: int | None, scratch: Path) -> None:
    """Print one target's figures."""
    data = scratch / "chats.jsonl"
    data.write_text("".join((EXAMPLES / "chats.jsonl").read_text().splitlines(keepends=True)[:samples]))
    config = ExtractConfig(target=str(folder), data=(data,), out=scratch / "plan", batch_tokens=batch_tokens)
    plan = pipeline.plan(config)
    bare, ours, busy = [], [], []
    target = alone(lambda: load(plan))
    for pair in range(pairs):
        bare.append(alone(lambda: rate(plan.manifest.tokens, lambda: bare_loop(plan, target))))
        before = alone(peak_flops)
        run = pipeline.extract(config.model_copy(update={"out": scratch / f"store-{pair}"})).run
        assert run is not None
        ours.append(run.real_tokens / run.seconds)
        busy.append(max(before, alone(peak_flops)))
    dumper_samples = min(len(plan.samples), max(80, samples // 10))
    dumper = alone(lambda: dump_rate(folder, plan, dumper_samples))
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, bare, strict=True))
    operations = operations_a_token(plan, target)
    shares = [mine * operations / peak for mine, peak in zip(ours, busy, strict=True)]
    pair_ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    rows = {
        "samples, real tokens": f"{len(plan.samples):,}, {plan.manifest.tokens:,}",
        "padding": f"{100 * plan.padding:.2f} %",
        "bare loop, tokens/s": f"{statistics.median(bare):,.0f}",
        "extract, tokens/s": f"{statistics.median(ours):,.0f}",
        "extract / bare loop": f"{ratio:.3f}   pairs: {', '.join(f'{pair:.3f}' for pair in pair_ratios)}",
        f"dumper, tokens/s ({dumper_samples} samples)": f"{dumper:,.0f}",
        "extract / dumper": f"{statistics.median(ours) / dumper:.2f}",
        "fp32 matmul peak": f"{', '.join(f'{peak / 1e9:.0f}' for peak in busy)} GFLOP/s",
        "extract, share of that peak": (
            f"{statistics.median(shares):.2f}   pairs: {', '.join(f'{each:.2f}' for each in shares)}"
        ),
    }
    layers = ", ".join(map(str, plan.manifest.layer_ids))
    print(f"\n{name}: {folder.name}, layers {layers} of {plan.resolved.target.num_layers}")
    for label, value in rows.items():
        print(f"  {label:<34}{value}")


def alone(run: Callable[[], T]) -> T:
    """What `run` returns, computed by a thread that ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def load(plan: ExtractionPlan) -> TargetModel:
    """The truncated target that `extract` runs, without the hooks that capture."""
    resolved = plan.resolved
    target = TargetModel.load(
        resolved.target,
        layers=resolved.layers,
        device=resolved.devices[0],
        dtype=resolved.dtype,
        store_dtype="bfloat16",
    )
    for module in target.decoder.modules():
        module._forward_hooks.clear()
    return target


@torch.inference_mode()
def bare_loop(plan: ExtractionPlan, target: TargetModel) -> None:
    """The forward alone, on the batches of the plan in their order."""
    for batch in plan.batches:
        ids = np.zeros((len(batch.rows), batch.width), np.int64)
        for place, row in enumerate(batch.rows):
            tokens = plan.samples.tokens(int(row))
            ids[place, : len(tokens)] = tokens
        target.decoder(input_ids=torch.from_numpy(ids), use_cache=False)


@torch.inference_mode()
def dump_rate(folder: Path, plan: ExtractionPlan, samples: int) -> float:
    """Real tokens a second of dataset-order batches through the whole model with all hidden states."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths = plan.samples.lengths

    def dump() -> None:
        for start in range(0, samples, DUMPER_BATCH):
            rows = range(start, min(start + DUMPER_BATCH, samples))
            width = int(lengths[rows.start : rows.stop].max())
            ids, mask = torch.zeros((2, len(rows), width), dtype=torch.long)
            for place, row in enumerate(rows):
                tokens = torch.from_numpy(plan.samples.tokens(row).astype(np.int64))
                ids[place, : len(tokens)], mask[place, : len(tokens)] = tokens, 1
            out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
            [state.to(torch.bfloat16) for state in out.hidden_states]

    return rate(int(lengths[:samples].sum()), dump)


def rate(tokens: int, run: Callable[[], None]) -> float:
    """Tokens a second."""
    began = time.perf_counter()
    run()
    return tokens / (time.perf_counter() - began)


def peak_flops(seconds: float = 2.0) -> float:
    """What fp32 matmuls of 2048 x 2048 sustain for two seconds, in operations a second."""
    a, b = torch.randn(2, 2048, 2048)
    torch.matmul(a, b)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.matmul(a, b)
        done += 1
    return done * 2 * 2048**3 / (time.perf_counter() - began)


def operations_a_token(plan: ExtractionPlan, target: TargetModel) -> float:
    """Multiplications and additions of matrices for one real token, attention over its own sample included."""
    matrices = sum(
        parameter.numel()
        for name, parameter in target.decoder.named_parameters()
        if parameter.dim() == 2 and "embed" not in name
    )
    text = plan.resolved.target.config
    heads = text.num_attention_heads * getattr(text, "head_dim", text.hidden_size // text.num_attention_heads)
    lengths = plan.samples.lengths.astype(np.float64)
    attended = float((lengths * (lengths + 1) / 2).sum() / lengths.sum())
    layers = max(layer for layer in plan.manifest.layer_ids) + 1
    return 2 * matrices + 4 * heads * attended * layers


if __name__ == "__main__":
    main()
