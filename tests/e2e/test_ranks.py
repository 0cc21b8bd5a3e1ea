"""Under torchrun: ranks share one plan, a killed rank takes the group down, a rerun with other ranks goes on."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tool import pipeline
from dflash_tool.store.reader import HiddenStore
from tests.warm import Warm

from .running import bytes_under, contents, extract_config, extract_words, torchrun_words, wait_until, workers


@pytest.fixture(scope="module")
def alone(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The store of one process."""
    out = tmp_path_factory.mktemp("alone") / "store"
    pipeline.extract(extract_config(random_target(), token_rows(1000, longest=250), out))
    return out


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_and_a_rerun_with_other_ranks(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm, alone: Path,
    victim: int,
) -> None:  # fmt: skip
    shared = tmp_path / "shared"
    words = extract_words(random_target(), token_rows(1000, longest=250), shared)
    run = warm.start(torchrun_words(2, words))
    wait_until(run, lambda: bytes_under(shared / "shards") > 0.3 * bytes_under(alone / "shards"))
    os.kill(workers(run.ranks[0].pid)[victim], signal.SIGKILL)
    said = run.communicate(timeout=120)
    assert run.returncode != 0, said
    assert not HiddenStore.open(shared).manifest.complete
    result = json.loads(warm.start([*words, "--json"], 3 if victim else 2).end())
    assert result["run"]["ranks"] == (3 if victim else 2)
    assert len(result["run"]["targets"]) == result["run"]["ranks"]
    assert contents(shared) == contents(alone)
