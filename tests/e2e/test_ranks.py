"""Under torchrun: ranks share one plan, a killed rank takes the group down, a rerun with other ranks goes on."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tool.store.reader import HiddenStore

from .running import ENV, bytes_under, contents, extract_words, torchrun_words, wait_until, workers


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_and_a_rerun_with_other_ranks(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, victim: int
) -> None:
    target, data = random_target(), token_rows(1500, longest=250)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    subprocess.run(extract_words(target, data, alone), env=ENV, check=True, capture_output=True)
    words = extract_words(target, data, shared)
    run = subprocess.Popen(torchrun_words(2, words), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(run, lambda: bytes_under(shared / "shards") > 0.3 * bytes_under(alone / "shards"))
    os.kill(workers(run.pid)[victim], signal.SIGKILL)
    said, _ = run.communicate(timeout=120)
    assert run.returncode != 0, said.decode()
    assert not HiddenStore.open(shared).manifest.complete
    again = subprocess.run(
        torchrun_words(3 if victim else 2, [*words, "--json"]),
        env=ENV,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    result = json.loads(again.stdout)
    assert result["run"]["ranks"] == (3 if victim else 2)
    assert len(result["run"]["targets"]) == result["run"]["ranks"]
    assert contents(shared) == contents(alone)
