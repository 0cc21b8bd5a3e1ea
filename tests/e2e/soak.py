"""`python -m tests.e2e.soak [--kills 20] [--rank-kills 10]`: many kills on one extraction of the example chats.

First single processes are killed (SIGKILL) after random amounts of new bytes; then one rank of groups under torchrun,
each time rerun with 1, 2 or 3 ranks. The last rerun finishes, and the store is compared with an unbroken run's: each
sample exactly once, every bit equal.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dflash_tool.store.manifest import read_manifest
from dflash_tool.store.reader import HiddenStore

from .running import ENV, bytes_under, contents, extract_words, torchrun_words, wait_until, workers

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def main() -> None:
    """Kill, rerun, compare; exits 1 with a traceback if anything differs."""
    parser = argparse.ArgumentParser(description="many kills on one extraction")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rank-kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder:
        unbroken, alone, ranks = (Path(folder) / name for name in ("unbroken", "killed", "killed-ranks"))
        _finish(_words(unbroken))
        whole = bytes_under(unbroken / "shards")
        for number in range(args.kills):
            _kill_one(subprocess.Popen(_words(alone), **_QUIET), alone, rng.uniform(0, 1.5 / args.kills) * whole)
            print(f"kill {number + 1}: {_held(alone)} samples held", flush=True)
        _compare("one process", args.kills, alone, unbroken)
        for number in range(args.rank_kills):
            world = 2 if number == 0 else rng.choice([1, 2, 3])
            words = _words(ranks) if world == 1 else torchrun_words(world, _words(ranks))
            victim = rng.randrange(world) if world > 1 else None
            _kill_one(subprocess.Popen(words, **_QUIET), ranks, rng.uniform(0, 1.5 / args.rank_kills) * whole, victim)
            print(f"kill {number + 1}: rank {victim or 0} of {world}, {_held(ranks)} samples held", flush=True)
        _compare("torchrun", args.rank_kills, ranks, unbroken)


_QUIET = {"env": ENV, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def _words(out: Path) -> list[str]:
    return extract_words(EXAMPLES / "tiny-target", EXAMPLES / "chats.jsonl", out, shard_mib=2, commit_every=1)


def _finish(words: list[str]) -> None:
    subprocess.run(words, check=True, env=ENV, stdout=subprocess.DEVNULL)


def _kill_one(run: "subprocess.Popen[bytes]", out: Path, new_bytes: float, victim: int | None = None) -> None:
    before = bytes_under(out / "shards")
    wait_until(run, lambda: bytes_under(out / "shards") >= before + new_bytes)
    if victim is None:
        run.send_signal(signal.SIGKILL)
    elif run.poll() is None and (pids := workers(run.pid)):
        os.kill(pids[victim % len(pids)], signal.SIGKILL)
    run.wait()


def _held(out: Path) -> int:
    return int(HiddenStore.open(out).committed.sum()) if (out / "manifest.json").exists() else 0


def _compare(name: str, kills: int, out: Path, unbroken: Path) -> None:
    if kills:
        _finish(_words(out))
        assert read_manifest(out).complete
        assert contents(out) == contents(unbroken)
        print(f"{name}: {kills} kills, each sample exactly once, every bit equal to an unbroken run's", flush=True)


if __name__ == "__main__":
    sys.exit(main())
