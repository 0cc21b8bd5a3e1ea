"""`train` with many drafters and under torchrun: the same run whoever computes it, and one end for all."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_tool import pipeline
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.store.layout import array_file
from dflash_tool.trainer.metrics import read_metrics
from tests.warm import Warm

from .running import torchrun_words, wait_until, workers

OPTIONS = {
    "block_size": 4, "draft_layers": 1, "anchors": 8, "batch_samples": 16, "epochs": 6, "lr": 1e-3,
    "microbatch_tokens": 200, "val_fraction": 0.1, "val_every": 100, "save_every": 3, "log_every": 1,
    "inflight_gib": 0.1,
}  # fmt: skip


def words(store: Path, out: Path, **changed: object) -> list[str]:
    options = {"store": store, "out": out, **OPTIONS, **changed}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "dflash_tool", "train", *flags]


def train(warm: Warm, world: int, command: list[str]) -> dict[str, Any]:
    """Run to the end on so many ranks; what rank 0 says."""
    result: dict[str, Any] = json.loads(warm.start([*command, "--json"], world).end())  # the other ranks are silent
    return result


def rows(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == kind]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """The same samples in the same steps, and losses that agree to rounding."""
    for mine, theirs in zip(rows(one), rows(other), strict=True):
        for name in ("step", "epoch", "samples", "blocks", "buckets", "lr"):
            assert mine[name] == theirs[name]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    final = [rows(run, "validation")[-1]["loss"] for run in (one, other)]
    assert final[0] == pytest.approx(final[1], abs=1e-5)


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one drafter."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    pipeline.train(TrainConfig.model_validate({"store": store, "out": out, **OPTIONS}))
    return out


def test_several_drafters_in_one_process(store: Path, alone: Path, tmp_path: Path) -> None:
    """The run of one drafter, up to rounding; and the same bits twice."""
    config = {"store": store, **OPTIONS, "drafters": 3}
    results = [pipeline.train(TrainConfig.model_validate({**config, "out": tmp_path / name})) for name in "ab"]
    assert_same_run(tmp_path / "a", alone)
    assert rows(tmp_path / "a")[0]["drafters"].keys() == {"drafter 0", "drafter 1", "drafter 2"}
    assert all(results[0].spent[part] > 0 for part in ("data", "forward", "backward", "optimizer", "validation"))
    assert results[0].bottleneck
    same_bits(tmp_path / "a", tmp_path / "b")


def same_bits(one: Path, other: Path) -> None:
    assert [(row["step"], row["loss"]) for row in rows(one)] == [(row["step"], row["loss"]) for row in rows(other)]
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_two_ranks_of_two_drafters_twice(store: Path, alone: Path, tmp_path: Path, warm: Warm) -> None:
    """Both combine; nothing depends on who is faster."""
    launched = warm.start(torchrun_words(2, [*words(store, tmp_path / "a", drafters=2), "--json"]))
    said = json.loads(launched.end())  # one document: the other rank is silent
    assert (said["ranks"], said["drafters"]) == (2, 4)
    train(warm, 2, words(store, tmp_path / "b", drafters=2))
    assert_same_run(tmp_path / "a", alone)
    same_bits(tmp_path / "a", tmp_path / "b")
    row = rows(tmp_path / "a")[-1]
    assert row["drafters"].keys() == {f"rank {rank} drafter {number}" for rank in range(2) for number in range(2)}
    assert all({"compute", "data", "drafters", "ranks"} == seconds.keys() for seconds in row["drafters"].values())
    assert row["rank_skew_seconds"] >= 0
    assert row["memory_bytes"] > 0


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resumed_in_an_epoch_on_another_number_of_ranks(
    store: Path, alone: Path, tmp_path: Path, warm: Warm, before: int, after: int
) -> None:
    """A run of 36 steps is stopped after at least 4, the first epoch has 6, and goes on elsewhere."""
    out = tmp_path / "run"
    command = words(store, out, save_every=1)
    run = warm.start(command, before)
    wait_until(run, lambda: len(rows(out)) >= 4)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    stood = json.loads((out / "checkpoints" / "last" / "state.json").read_text())["step"]
    assert 4 <= stood < 36
    result = train(warm, after, command)
    assert result["steps"] == 36 - stood
    assert any("losses agree to rounding" in note for note in result["notes"])
    assert_same_run(out, alone)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed(store: Path, alone: Path, tmp_path: Path, warm: Warm, victim: int) -> None:
    """The other one stops within a minute and says why; a rerun goes on to the same end."""
    out = tmp_path / "run"
    run = warm.start(torchrun_words(2, words(store, out)))
    wait_until(run, lambda: len(rows(out)) >= 5)
    os.kill(workers(run.ranks[0].pid)[victim], signal.SIGKILL)
    _, said = run.communicate(timeout=60)
    assert run.returncode != 0
    gone = f"rank {victim} has given no sign of life", "another rank was lost while gradients were added up"
    assert any(reason in said for reason in gone), said
    assert train(warm, 2, words(store, out))["steps"] > 0
    assert_same_run(out, alone)


def test_a_signal_to_one_rank_stops_all_in_order(store: Path, tmp_path: Path, warm: Warm) -> None:
    out = tmp_path / "run"
    run = warm.start(words(store, out, epochs=500, save_every=10_000, val_every=10_000), 2)
    wait_until(run, lambda: len(rows(out)) >= 3)
    os.kill(run.ranks[1].pid, signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode != 0
    state = json.loads((out / "checkpoints" / "last" / "state.json").read_text())
    assert state["step"] == rows(out)[-1]["step"]
    assert f"stopped by SIGTERM. The run stands at step {state['step']:,} of" in said
    assert "rank 1 stops with the others" in said


def test_an_error_on_one_rank_ends_all_with_its_reason(store: Path, tmp_path: Path, warm: Warm) -> None:
    """A damaged sample, which one rank reads (in a second epoch the other might, and reads ahead)."""
    part, out = tmp_path / "store", tmp_path / "run"
    shutil.copytree(store, part)
    file = array_file(next((part / "shards").iterdir()), 1)
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    run = warm.start(words(part, out, epochs=1, save_every=1000), 2)
    _, said = run.communicate(timeout=120)
    assert run.returncode != 0
    messages = [line.removeprefix("dflash: ") for line in said.splitlines() if line.startswith("dflash: ")]
    (heard,) = [line for line in messages if line.startswith("rank ")]
    (told,) = [line for line in messages if not line.startswith("rank ")]
    assert told.startswith("sample ")
    assert heard.partition(" stopped: ")[2] == told
    if steps := rows(out):  # whoever read it, what was done before is kept
        state = json.loads((out / "checkpoints" / "last" / "state.json").read_text())
        assert state["step"] == state["loader"]["step"] == steps[-1]["step"]


def test_more_ranks_than_microbatches(store: Path, tmp_path: Path, warm: Warm) -> None:
    """Works: a rank without work takes part all the same, and that is said once."""
    big = words(store, tmp_path / "run", microbatch_tokens=100_000, batch_samples=3, max_steps=6)
    result = train(warm, 3, big)
    assert result["steps"] == 6
    assert sum("had nothing to do" in note for note in result["notes"]) == 1
