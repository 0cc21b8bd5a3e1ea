"""The drafter's attention against one SDPA call with a dense mask: time and memory, forward and backward.

Run: python benchmarks/attention.py [--rounds R] [--threads T]

Peer: torch.nn.functional.scaled_dot_product_attention over all slots of all blocks and [context + all slots] keys, with
the dense [slots, context + slots] mask made beforehand (not timed) and grouped heads. Both get the same tensors, as the
drafter's layers make them. Rounds alternate; a time is the median, a ratio the median of the rounds' own ratios. Memory
is the growth of the process's peak over what it held before, in a process of its own. Errors are the largest
difference over the largest value, of the output and of all gradients, in fp32. One thread by default: on a busy
machine several would mostly wait for each other, in both.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_tool.drafter.anchors import Anchors
from dflash_tool.drafter.attention import AttentionPlan, Backend, block_attention, plan_attention

HEADS, KV_HEADS, WIDTH = 9, 3, 64
CASES = {(600, 256, 8): 2.5, (600, 512, 16): 6.0, (2048, 256, 8): 1.0}  # context, anchors, block size: wanted speed-up
Attend = Callable[[list[Tensor]], Tensor]


def tensors(context: int, blocks: int, size: int, device: str = "cpu") -> list[Tensor]:
    """Random queries, keys and values of the blocks, keys and values of one sample's context."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(blocks, size, HEADS), *[(blocks, size, KV_HEADS)] * 2, *[(1, context, KV_HEADS)] * 2]
    return [torch.randn(*s, WIDTH, generator=generator).to(device).requires_grad_() for s in shapes]


def plan(context: int, blocks: int, size: int, backend: Backend, device: str = "cpu") -> AttentionPlan:
    """Random anchors, as many as there are blocks, and their plan."""
    places = np.sort(np.random.default_rng(0).choice(context, blocks, replace=False))
    anchors = Anchors(np.zeros(blocks, np.int64), places.astype(np.int64))
    return plan_attention(
        anchors,
        samples=1,
        context=context,
        block_size=size,
        heads=HEADS,
        device=torch.device(device),
        backend=backend,
    )


def dense(position: Tensor, context: int, size: int) -> Attend:
    """The peer: one SDPA call under a dense mask."""
    slots = len(position) * size
    block = torch.arange(slots) // size
    visible = torch.cat((torch.arange(context) < position[block, None], block[:, None] == block), 1)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)

    def attend(given: list[Tensor]) -> Tensor:
        q, k, v, k_seen, v_seen = given
        keys, values = (torch.cat((a[0], b.flatten(0, 1))).transpose(0, 1)[None] for a, b in ((k_seen, k), (v_seen, v)))
        queries = q.flatten(0, 1).transpose(0, 1)[None]
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape)

    return attend


def make(kind: str, case: tuple[int, int, int]) -> Attend:
    """`two-part` or `dense`, ready to attend."""
    context, _, size = case
    planned = plan(*case, "two-part")
    if kind == "dense":
        return dense(planned.position, context, size)
    return lambda given: block_attention(*given, planned)


def run(attend: Attend, given: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Seconds of a forward and backward, the output and the gradients."""
    began = time.perf_counter()
    out = attend(given)
    gradients = torch.autograd.grad(out, given, torch.ones_like(out).add_(out.detach()))
    return time.perf_counter() - began, [out.detach(), *gradients]


def error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference over largest value, the worst of the tensors."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


def status(name: str) -> int:
    """A memory figure of this process in MiB (Linux)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


def measure_memory(kind: str, case: tuple[int, int, int]) -> None:
    """Print the MiB by which the peak grows in one forward and backward, the mask or plan included."""
    run(make(kind, (64, 16, 4)), tensors(64, 16, 4))
    given = tensors(*case)
    before = status("VmRSS")
    run(make(kind, case), given)
    print(status("VmHWM") - before)


def memory(kind: str, case: tuple[int, int, int], threads: int) -> int:
    """`measure_memory` in a new process."""
    command = [sys.executable, __file__, "--threads", str(threads), "--memory", kind, *map(str, case)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(case: tuple[int, int, int], wanted: float, rounds: int, threads: int) -> bool:
    """Print a row; whether all goals are met."""
    given = tensors(*case)
    ours, peer = make("two-part", case), make("dense", case)
    results = [(run(ours, given), run(peer, given)) for _ in range(rounds + 1)]
    worst = error(results[0][0][1], results[0][1][1])
    times = [(a[0], b[0]) for a, b in results[1:]]
    speed = statistics.median(b / a for a, b in times)
    mine, theirs = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    my_peak, their_peak = (memory(kind, case, threads) for kind in ("two-part", "dense"))
    met = speed >= wanted and my_peak < 0.5 * their_peak and worst < 1e-5
    row = f"{case[0]:>7}  {case[1]:>3} x {case[2]:<2}  {theirs:>8.0f}  {mine:>8.0f}  {speed:>6.1f}  {wanted:>6.1f}  "
    row += f"{their_peak:>9}  {my_peak:>8}  {my_peak / max(their_peak, 1):>5.2f}  {worst:>8.1e}"
    print(row + ("" if met else "  MISSED"), flush=True)
    return met


def compare_flex(case: tuple[int, int, int]) -> None:
    """On CUDA: flex_attention equals two-part, both on the device, and how much faster it is."""
    given = tensors(*case, "cuda")
    results, seconds = [], []
    for backend in ("two-part", "flex"):
        planned = plan(*case, backend, "cuda")  # type: ignore[arg-type]
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            _, result = run(lambda x, p=planned: block_attention(*x, p), given)  # type: ignore[misc]
            torch.cuda.synchronize()
            last = time.perf_counter() - began
        results.append(result)
        seconds.append(last)
    print(f"flex, {case}: {seconds[0] / seconds[1]:.1f} times as fast as two-part, error {error(*results):.1e}")


def main() -> int:
    """Print the table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="The drafter's attention against SDPA with a dense mask")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs=4, metavar=("KIND", "CONTEXT", "BLOCKS", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        measure_memory(args.memory[0], tuple(map(int, args.memory[1:])))  # type: ignore[arg-type]
        return 0
    print(f"fp32, forward + backward, {HEADS} query and {KV_HEADS} KV heads of {WIDTH}, {args.threads} threads")
    print("context  blocks    dense ms   ours ms  faster  wanted  dense MiB  ours MiB  ratio     error")
    met = [compare(case, wanted, args.rounds, args.threads) for case, wanted in CASES.items()]
    if torch.cuda.is_available():
        for case in CASES:
            compare_flex(case)
    else:
        print("flex_attention skipped: no CUDA device, and its backward needs one")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
