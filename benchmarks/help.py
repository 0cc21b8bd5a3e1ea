"""Seconds until `dflash --help` has answered: what every typo and every look at an option costs.

    python benchmarks/help.py

Five runs after one to warm up, each a process of its own. CPU seconds are printed as well: they hold on a busy machine.
"""

import os
import subprocess
import sys
import time

RUNS = 5


def main() -> None:
    """Print the medians."""
    took: list[tuple[float, float]] = []
    for _ in range(RUNS + 1):
        began, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-m", "dflash_tool", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        took.append((time.perf_counter() - began, cpu))
    wall, cpu = (sorted(each)[RUNS // 2] for each in zip(*took[1:], strict=True))
    print(f"dflash --help: {wall:.2f} s, of it {cpu:.2f} s on the CPU (medians of {RUNS} runs)")


if __name__ == "__main__":
    main()
