"""Under torchrun: ranks share one plan, a killed rank takes the group down, a rerun with other ranks goes on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tool.store.reader import HiddenStore

from .running import ENV, bytes_under, contents, extract_words, wait_until


def _torchrun(world: int, words: list[str]) -> list[str]:
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), *port, *words[1:]]


def _workers(agent: int) -> list[int]:
    """Pids of the ranks, by local rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = [item for item in environment if item.startswith(b"LOCAL_RANK=")]
        if int(fields[1]) == agent and rank:
            found[int(rank[0].removeprefix(b"LOCAL_RANK="))] = int(process.name)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_and_a_rerun_with_other_ranks(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, victim: int
) -> None:
    target, data = random_target(), token_rows(1500, longest=250)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    subprocess.run(extract_words(target, data, alone), env=ENV, check=True, capture_output=True)
    words = extract_words(target, data, shared)
    run = subprocess.Popen(_torchrun(2, words), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(run, lambda: bytes_under(shared / "shards") > 0.3 * bytes_under(alone / "shards"))
    os.kill(_workers(run.pid)[victim], signal.SIGKILL)
    said, _ = run.communicate(timeout=120)
    assert run.returncode != 0, said.decode()
    assert not HiddenStore.open(shared).manifest.complete
    again = subprocess.run(
        _torchrun(3 if victim else 2, [*words, "--json"]),
        env=ENV,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    result = json.loads(again.stdout)
    assert result["run"]["ranks"] == (3 if victim else 2)
    assert contents(shared) == contents(alone)
