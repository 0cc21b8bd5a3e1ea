"""`live` from end to end on a tiny random target: the same steps as `extract` and `train`."""

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_tool import pipeline
from dflash_tool.errors import DflashError, TargetError
from dflash_tool.pipeline.live_source import LiveFeed
from dflash_tool.store.reader import HiddenStore
from dflash_tool.target import TargetModel
from dflash_tool.trainer import Replica
from dflash_tool.trainer.metrics import read_metrics
from tests.warm import Warm

from .live_kit import config as config_of
from .live_kit import losses, weights, words
from .running import contents, wait_until

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's


@contextmanager
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What every microbatch was, in order: samples, shape, anchors, labels."""
    seen: list[tuple[Any, ...]] = []
    blocks_of = Replica._blocks

    def watch(self: Replica, batch: Any, lengths: Any, epoch: int) -> Any:
        blocks = blocks_of(self, batch, lengths, epoch)
        seen.append(
            (epoch, batch.index_in_step, batch.sample_ids.tolist(), tuple(batch.states.shape),
             blocks.sample.tolist(), blocks.position.tolist(), blocks.labels.tolist())
        )  # fmt: skip
        return blocks

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "_blocks", watch)
        yield seen


def test_the_same_steps_as_extract_and_train(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = config_of(random_target(), token_rows(100), tmp_path / "live")
    with _watched(monkeypatch) as live:
        pipeline.live(config)
    offline = config.model_copy(update={"tee": tmp_path / "store"})
    pipeline.extract(offline.extract())
    with _watched(monkeypatch) as trained:
        pipeline.train(offline.train().model_copy(update={"out": tmp_path / "train"}))
    assert len(live) > 20
    assert live == trained
    np.testing.assert_allclose(losses(tmp_path / "live"), losses(tmp_path / "train"), rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_the_same_steps_on_cuda(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, devices: tuple[str, str]
) -> None:
    """Straight from target to drafter, or through the host; with a tee, which `train` then repeats."""
    config = config_of(
        random_target(), token_rows(100), tmp_path / "live", tee=tmp_path / "store", target_device=devices[0],
        drafter_device=devices[1], dtype="float32",
    )  # fmt: skip
    pipeline.live(config)
    pipeline.train(config.train().model_copy(update={"out": tmp_path / "train"}))
    rtol = 1e-2 if devices[1] == "cuda" else 1e-5  # bf16
    np.testing.assert_allclose(losses(tmp_path / "live"), losses(tmp_path / "train"), rtol=rtol)


@pytest.mark.parametrize("changed", [{"targets": 2}, {"targets": 3, "drafters": 2, "hs_queue_depth": 1}])
def test_several_targets_and_drafters_take_the_same_steps(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, object],
) -> None:  # fmt: skip
    """Whoever computes a batch, each step has the same microbatches; one drafter has the same losses to the bit."""
    target, data = random_target(), token_rows(100)
    with _watched(monkeypatch) as one:
        pipeline.live(config_of(target, data, tmp_path / "one"))
    with _watched(monkeypatch) as several:
        pipeline.live(config_of(target, data, tmp_path / "several", **changed))
    assert sorted(one) == sorted(several)
    if "drafters" in changed:
        np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "several"), rtol=1e-5)
    else:
        assert one == several
        assert losses(tmp_path / "one") == losses(tmp_path / "several")


@pytest.mark.parametrize("tee", [True, False])
def test_killed_and_run_again_is_the_unbroken_run(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm, tee: bool
) -> None:
    """SIGKILL at three moments, with a checkpoint every few steps: equal losses, weights and stores."""
    target, data = random_target(), token_rows(100)
    changed = [{"tee": tmp_path / f"{name}-store"} if tee else {} for name in ("unbroken", "killed")]
    pipeline.live(config_of(target, data, tmp_path / "unbroken", **changed[0]))
    command = words(target, data, tmp_path / "killed", **changed[1])
    for steps in (1, 4, 8):
        run = warm.start(command)
        wait_until(run, lambda steps=steps: len(losses(tmp_path / "killed")) >= steps)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert run.returncode == -signal.SIGKILL
    warm.start(command).end()
    assert losses(tmp_path / "killed") == losses(tmp_path / "unbroken")
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    if tee:
        assert HiddenStore.open(tmp_path / "killed-store").manifest.complete
        assert contents(tmp_path / "killed-store") == contents(tmp_path / "unbroken-store")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_in_order(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm, signum: int,
    code: int,
) -> None:  # fmt: skip
    """Targets run ahead until the window is full; the signal ends the step, saves and says how to go on."""
    out = tmp_path / "run"
    command = words(
        random_target(),
        token_rows(100),
        out,
        epochs=500,
        save_every=1000,
        val_every=1000,
        inflight_gib=0.0001,
        targets=2,
    )
    run = warm.start(command)
    wait_until(run, lambda: len(losses(out)) >= 3)
    run.send_signal(signum)
    _, err = run.communicate(timeout=120)
    assert run.returncode == code, err
    state = json.loads((out / "checkpoints" / "last" / "state.json").read_text())
    assert f"stands at step {state['step']:,} of" in err
    assert "run the same command to go on" in err
    assert "Traceback" not in err


class BoomError(Exception):
    """What breaks."""


def test_a_target_that_raises_stops_everybody(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two targets fails in the middle: its error comes out, the threads end, a rerun goes on."""
    config = config_of(random_target(), token_rows(100), tmp_path / "run", targets=2)
    capture, calls = TargetModel.capture_padded, itertools.count()

    def broken(self: TargetModel, *args: Any) -> Any:
        if next(calls) == 40:
            raise BoomError
        return capture(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TargetModel, "capture_padded", broken)
        with pytest.raises(BoomError):
            pipeline.live(config)
    assert not {"prefetcher", "watchdog"} & {thread.name for thread in threading.enumerate()}
    done = pipeline.live(config)
    assert 0 < done.trained.steps < done.trained.total_steps
    pipeline.live(config.model_copy(update={"out": tmp_path / "unbroken"}))
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")


def test_a_drafter_that_raises_stops_everybody(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Replica._forward, itertools.count()

    def broken(self: Replica, *args: Any) -> Any:
        if next(calls) == 30:
            raise BoomError
        return forward(self, *args)

    monkeypatch.setattr(Replica, "_forward", broken)
    with pytest.raises(BoomError):
        pipeline.live(config_of(random_target(), token_rows(100), tmp_path / "run", drafters=2, inflight_gib=0.0001))
    assert not {"prefetcher", "watchdog"} & {thread.name for thread in threading.enumerate()}


def test_a_target_that_hangs_is_named(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(random_target(), token_rows(100), tmp_path / "run", targets=2)
    capture, calls, end = TargetModel.capture_padded, itertools.count(), threading.Event()

    def hanging(self: TargetModel, *args: Any) -> Any:
        if next(calls) == 40:
            end.wait(600)
        return capture(self, *args)

    monkeypatch.setattr(TargetModel, "capture_padded", hanging)
    monkeypatch.setattr("dflash_tool.pipeline.live_run.LiveFeed", partial(LiveFeed, hang_seconds=3.0))
    with pytest.raises(TargetError, match=r"target [01] on cpu has been at one batch of [\d,]+ tokens"):
        pipeline.live(config)
    end.set()


@pytest.mark.parametrize("batch_samples", [16, 1])
def test_samples_with_nan_are_left_out_and_listed(
    random_target: Callable[..., Path],
    token_rows: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_samples: int,
) -> None:
    """A sample is spoiled in each epoch; it is named once, and the step goes on without it, or with nothing."""
    config = config_of(
        random_target(),
        token_rows(100),
        tmp_path / "run",
        tee=tmp_path / "store",
        max_bad=0.02,
        batch_samples=batch_samples,
        epochs=2,
        val_every=1000,
        save_every=1000,
    )
    spoiled = 4  # the first tokens of this row
    forward = TargetModel._forward
    rows = [json.loads(line)["input_ids"] for line in config.data[0].read_text().splitlines()]

    def spoil(self: TargetModel, batch: Any, make: Any) -> Any:
        mine = [ids[:n].tolist() == rows[spoiled] for ids, n in zip(batch.input_ids, batch.lengths, strict=True)]
        bad = torch.tensor(mine)[:, None, None]
        embedding: torch.nn.Module = self.decoder.get_input_embeddings()  # type: ignore[operator]
        hook = embedding.register_forward_hook(lambda _module, _inputs, out: out.masked_fill(bad, torch.nan))
        try:
            return forward(self, batch, make)
        finally:
            hook.remove()

    monkeypatch.setattr(TargetModel, "_forward", spoil)
    training = pipeline.plan_live(config).training
    done = pipeline.live(config)
    assert done.quarantined == (f"{config.data[0]}:{spoiled + 1}",)
    manifest = HiddenStore.open(tmp_path / "store").manifest
    assert manifest.complete
    assert len(manifest.quarantined) == 1
    samples = [row["samples"] for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert sum(samples) == 2 * (training - 1)
    pipeline.train(config.train().model_copy(update={"out": tmp_path / "train"}))
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "train"), rtol=1e-5)
    with pytest.raises(DflashError, match="max-bad"):
        pipeline.live(config.model_copy(update={"out": tmp_path / "none", "tee": None, "max_bad": 0.0}))


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"inflight_gib": 0.00001}, 2, "--inflight-gib"),
        ({"target_device": ["cpu", "cpu"]}, 2, "--target-device: got cpu twice"),
        ({"drafter_device": ["cpu", "cpu"]}, 2, "--drafter-device: got cpu twice"),
        ({"aux_layers": "2"}, 2, "lacks layer 2"),
        ({"max_steps_ahead": 0}, 2, "--max-steps-ahead"),
        ({"overlength": "skip", "max_length": 2}, 1, "nothing to do"),
    ],
)
def test_wrong_options(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run,
    changed: dict[str, object], code: int, says: str,
) -> None:  # fmt: skip
    """Refused with a word, and nothing is left behind."""
    target, data = random_target(), token_rows(30)
    command = words(target, data, tmp_path / "run", **{"tee": tmp_path / "store", **changed})[3:]
    result = dflash(*command)
    assert result.code == code, result.err
    assert says in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "store").exists()


def test_dry_run_says_what_then_happens(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    command = [
        *words(random_target(), token_rows(200), tmp_path / "run", epochs=1, drafters=2, buckets=20)[3:],
        "--json",
    ]
    said = dflash(*command, "--dry-run")
    assert said.code == 0, said.err
    assert not (tmp_path / "run").exists()
    plan = json.loads(said.out)
    done = json.loads(dflash(*command).out)
    assert plan["total_steps"] == done["total_steps"]
    flow = done["flow"]
    (target,) = flow["targets"].values()
    assert plan["live"]["padding"] == pytest.approx(1 - target["tokens"] / target["padded_tokens"])
    assert flow["peak_inflight_bytes"] <= flow["inflight_limit_bytes"] == plan["live"]["limit"]
    assert any("can't hold every bucket" in warning for warning in plan["warnings"])
    assert 0 < plan["live"]["lost"] < 1
