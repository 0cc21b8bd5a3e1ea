"""`live` under torchrun: every rank is a cell of targets and drafters, and the run is that of one process."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_tool import pipeline
from dflash_tool.store.reader import HiddenStore
from tests.warm import Warm

from .live_kit import config, losses, words
from .running import contents, torchrun_words, wait_until, workers


@pytest.fixture(scope="module")
def alone(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A run of one process: its target, its data, its folder."""
    out = tmp_path_factory.mktemp("alone") / "run"
    target, data = random_target(), token_rows(100)
    pipeline.live(config(target, data, out))
    return target, data, out


@pytest.mark.parametrize("victim", [0, 1])
def test_cells_take_the_steps_of_one_process(
    alone: tuple[Path, Path, Path], tmp_path: Path, warm: Warm, victim: int
) -> None:
    """Two cells, one of them killed on the way; then two again or one: the same losses, and a whole store."""
    target, data, unbroken = alone
    cells = tmp_path / "cells"
    command = words(target, data, cells, tee=tmp_path / "cells-store")
    run = warm.start(torchrun_words(2, command))
    wait_until(run, lambda: len(losses(cells)) >= 5)
    os.kill(workers(run.ranks[0].pid)[victim], signal.SIGKILL)
    said = run.communicate(timeout=120)
    assert run.returncode != 0, said
    again = json.loads(warm.start([*command, "--json"], 2 if victim else 1).end())
    assert 0 < again["steps"] < again["total_steps"] == len(losses(unbroken))
    assert len(again["flow"]["targets"]) == (2 if victim else 1)
    assert losses(cells) == pytest.approx(losses(unbroken), abs=1e-5)
    assert HiddenStore.open(tmp_path / "cells-store").manifest.complete
    assert contents(tmp_path / "cells-store")  # each sample once
