"""BucketedHSQueue against queue.Queue: items a second and hand-off latency, with the same threads.

Run: python benchmarks/hs_queue.py [--items N] [--rounds R]

Rates: P producers put N items in all, C consumers get them (or take them, each every C-th, in order). The two
queues alternate; a figure is the median over the rounds, a ratio the median of the rounds' own ratios.
Latency: half of the time of one there-and-back of a single item through two queues and two threads.
"""

import argparse
import gc
import queue
import statistics
import threading
import time
from collections.abc import Callable

from dflash_tool.queue import BucketedHSQueue, Item

BUCKETS = 6
Step = Callable[[int], object]  # puts, gets or takes the item of this index


def transfer(items: int, producers: int, consumers: int, put: Step, get: Step) -> float:
    """Seconds that the threads need to move ``items`` items."""
    start = threading.Barrier(producers + consumers + 1)

    def work(step: Step, first: int, stride: int) -> None:
        start.wait()
        for index in range(first, items, stride):
            step(index)

    threads = [threading.Thread(target=work, args=(put, i, producers)) for i in range(producers)]
    threads += [threading.Thread(target=work, args=(get, i, consumers)) for i in range(consumers)]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def round_trip(items: int, put: tuple[Step, Step], get: tuple[Step, Step]) -> float:
    """Seconds a hand-off: ``items`` times there through the first queue and back through the second."""

    def echo() -> None:
        for index in range(items):
            get[0](index)
            put[1](index)

    thread = threading.Thread(target=echo)
    thread.start()
    began = time.perf_counter()
    for index in range(items):
        put[0](index)
        get[1](index)
    thread.join()
    return (time.perf_counter() - began) / (2 * items)


def plain(plan: list[Item[None]], bound: int) -> tuple[Step, Step]:
    """``put`` and ``get`` of the standard library's queue."""
    fifo: queue.Queue[Item[None]] = queue.Queue(bound)
    return lambda index: fifo.put(plan[index]), lambda _: fifo.get()


def bucketed(plan: list[Item[None]], bound: int, *, taking: bool) -> tuple[Step, Step]:
    """``put`` and ``get`` or ``take`` of ours; the bound is one in bytes, as items are of one byte."""
    ours: BucketedHSQueue[None] = BucketedHSQueue(max_bytes=bound or None)
    return lambda index: ours.put(plan[index]), ours.take if taking else lambda _: ours.get()


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description="BucketedHSQueue against queue.Queue")
    parser.add_argument("--items", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    plan = [Item(index=i, bucket=i % BUCKETS, nbytes=1, payload=None) for i in range(args.items)]
    gc.disable()

    print(f"{BUCKETS} buckets, {args.items} items, median of {args.rounds} alternating rounds")
    print(f"{'threads':8} {'bound':>6} {'call':5} {'queue.Queue':>14} {'BucketedHSQueue':>16} {'ratio':>6}")
    for threads in (1, 2, 4):
        for bound, taking in ((0, False), (64, False), (0, True)):
            ours, theirs = [], []
            for _ in range(args.rounds):
                theirs.append(args.items / transfer(args.items, threads, threads, *plain(plan, bound)))
                pair = bucketed(plan, bound, taking=taking)
                ours.append(args.items / transfer(args.items, threads, threads, *pair))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(
                f"{threads}x{threads:<6} {bound or 'none':>6} {'take' if taking else 'get':5}"
                f" {statistics.median(theirs):>12.0f}/s {statistics.median(ours):>14.0f}/s {ratio:>6.2f}"
            )

    print(f"\n{'hand-off':15} {'queue.Queue':>14} {'BucketedHSQueue':>16} {'rate':>6}")
    hops = args.items // 8
    for taking in (False, True):
        ours, theirs = [], []
        for _ in range(args.rounds):
            a, b = plain(plan, 0), plain(plan, 0)
            theirs.append(round_trip(hops, (a[0], b[0]), (a[1], b[1])))
            c, d = bucketed(plan, 0, taking=taking), bucketed(plan, 0, taking=taking)
            ours.append(round_trip(hops, (c[0], d[0]), (c[1], d[1])))
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        print(
            f"{'take' if taking else 'get':15} {statistics.median(theirs) * 1e6:>11.1f} us"
            f" {statistics.median(ours) * 1e6:>13.1f} us {ratio:>6.2f}"
        )


if __name__ == "__main__":
    main()
