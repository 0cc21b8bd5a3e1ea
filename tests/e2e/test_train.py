"""`train` from end to end on a store of a tiny random target: gradients, resume, checkpoints, metrics, refusals."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_tool.pipeline import train_run
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer.metrics import read_metrics
from tests.warm import Warm

from .running import ENV, wait_until

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
SMALL = {
    "block_size": 4, "draft_layers": 1, "anchors": 8, "batch_samples": 16, "epochs": 2, "lr": 1e-3,
    "val_fraction": 0.1, "val_every": 4, "save_every": 3, "log_every": 1, "inflight_gib": 0.1,
}  # fmt: skip


def _config(store: Path, out: Path, **changed: object) -> TrainConfig:
    return TrainConfig.model_validate({"store": store, "out": out, **SMALL, **changed})


def _words(store: Path, out: Path, **changed: object) -> list[str]:
    options = {"store": store, "out": out, **SMALL, **changed}
    return ["train", *(word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def _first_gradient(config: TrainConfig) -> tuple[list[torch.Tensor], int]:
    """The first step's gradient in fp64, and how many microbatches it came from."""
    run = train_run.open_run(config, TrainTelemetry())
    run.model.double()
    run.head.double()
    with run.loader, run.loop.group:
        steps = iter(run.loader)
        step = next(steps)
        run.loop.step(step)
        return [gradient.clone() for gradient in run.loop.group.sums.gradients], len(step)


def test_a_step_s_gradient_does_not_depend_on_its_microbatches(store: Path, tmp_path: Path) -> None:
    """Uneven lengths and supervised counts, 3 microbatches (one a bucket) against many."""
    few, few_count = _first_gradient(_config(store, tmp_path, microbatch_tokens=100_000))
    many, many_count = _first_gradient(_config(store, tmp_path, microbatch_tokens=40))
    assert few_count <= 3
    assert many_count >= 7
    for one, other in zip(few, many, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_microbatch_that_does_not_fit_is_halved_to_the_same_gradient(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_tool.trainer import Replica

    whole, _ = _first_gradient(_config(store, tmp_path))
    forward = Replica._forward

    def limited(self: Replica, batch: object, blocks: object) -> object:
        result = forward(self, batch, blocks)  # type: ignore[arg-type]
        if len(blocks) > 5:  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(Replica, "_forward", limited)
    halved, _ = _first_gradient(_config(store, tmp_path))
    for one, other in zip(whole, halved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last" / "model.safetensors")


def _rows(run: Path, kind: str) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(run) if row["kind"] == kind]


def test_killed_and_resumed_to_the_bit(store: Path, tmp_path: Path, warm: Warm) -> None:
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    words = [sys.executable, "-m", "dflash_tool"]
    subprocess.run([*words, *_words(store, unbroken)], env=ENV, check=True, capture_output=True)
    for steps in (2, 5, 9):
        run = warm.start([*words, *_words(store, killed)])
        wait_until(run, lambda steps=steps: len(_rows(killed, "train")) >= steps)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert run.returncode == -signal.SIGKILL
    warm.start([*words, *_words(store, killed)]).end()
    assert _rows(killed, "train") == _rows(unbroken, "train")
    assert _rows(killed, "validation") == _rows(unbroken, "validation")
    ours, theirs = _weights(killed), _weights(unbroken)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_finished_run_has_what_engines_and_people_need(store: Path, tmp_path: Path, dflash: Run) -> None:
    out = tmp_path / "run"
    done = dflash(*_words(store, out), "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    steps = [row for row in read_metrics(out) if row["kind"] == "train"]
    assert [row["step"] for row in steps] == list(range(1, result["total_steps"] + 1))
    assert all(sum(row["buckets"].values()) == row["samples"] for row in steps)
    assert result["first"]["step"] == 0
    assert result["last"]["step"] == result["total_steps"]
    assert {"walk_tau", "anchor_tau", "accuracy_by_slot", "by_bucket"} <= result["last"].keys()
    folder = out / "checkpoints"
    kept = sorted(path.name for path in folder.glob("step-*"))
    assert f"step-{result['total_steps']:07d}" in kept
    assert len(kept) <= 3
    best = json.loads((folder / "best" / "state.json").read_text())
    assert best["validation"]["step"] == best["step"]  # what it measured goes with it wherever it is copied
    config = json.loads((folder / "last" / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["target_layer_ids"] == [1, 3]
    again = json.loads(dflash(*_words(store, out), "--json").out)
    assert again["steps"] == 0


def test_stopped_in_order(store: Path, tmp_path: Path, warm: Warm) -> None:
    out = tmp_path / "run"
    words = [sys.executable, "-m", "dflash_tool", *_words(store, out, epochs=500, save_every=1000, val_every=1000)]
    run = warm.start(words)
    wait_until(run, lambda: len(_rows(out, "train")) >= 3)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 143, err
    assert "run the same command to go on" in err
    state = json.loads((out / "checkpoints" / "last" / "state.json").read_text())
    assert f"stands at step {state['step']:,} of" in err


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"aux_layers": "1,2"}, 2, "lacks layer 2"),
        ({"block_size": 1}, 2, "--block-size"),
        ({"mask_token_id": 5}, 2, "occurs in the data"),
        ({"mask_token_id": 500}, 2, "ids 0..96"),
        ({"drafter_device": "tpu"}, 2, "not a device"),
        ({"lr": 0}, 2, "--lr"),
        ({"store": "nowhere"}, 1, "no store"),
        ({"inflight_gib": 0.000001}, 2, "--inflight-gib"),
    ],
)
def test_wrong_options(
    store: Path, tmp_path: Path, dflash: Run, changed: dict[str, object], code: int, says: str
) -> None:
    result = dflash(*_words(**{"store": store, "out": tmp_path / "run", **changed}))  # type: ignore[arg-type]
    assert result.code == code, result.err
    assert says in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()


def test_other_settings_and_other_folders_are_refused(store: Path, tmp_path: Path, dflash: Run) -> None:
    out = tmp_path / "run"
    assert dflash(*_words(store, out)).code == 0
    other = dflash(*_words(store, out, lr=0.5, anchors=3))
    assert other.code == 2
    assert "--lr: the run has 0.001, now 0.5" in " ".join(other.err.split())
    assert "--anchors: the run has 8, now 3" in " ".join(other.err.split())
    assert dflash(*_words(store, out, log_every=2)).code == 0
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.tex").touch()
    assert "holds something else" in dflash(*_words(store, tmp_path / "else")).err


def test_an_unfinished_store_is_refused(store: Path, tmp_path: Path, dflash: Run) -> None:
    from dflash_tool.store.manifest import read_manifest, write_manifest

    part = tmp_path / "store"
    shutil.copytree(store, part)
    write_manifest(part, read_manifest(part).model_copy(update={"complete": False, "run": None}))
    refused = dflash(*_words(part, tmp_path / "run"))
    assert refused.code == 1
    assert "unfinished" in refused.err


def test_a_loss_that_is_not_finite_stops_the_run(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last good checkpoint stays; step and samples are named."""
    from dflash_tool.trainer import DrafterTrainLoop

    apply, done = DrafterTrainLoop._apply, iter(range(99))

    def broken(self: DrafterTrainLoop, sums: object, *rest: object) -> object:
        if next(done) == 4:
            sums.gradients[0][0] = float("nan")  # type: ignore[attr-defined]
        return apply(self, sums, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DrafterTrainLoop, "_apply", broken)
    out = tmp_path / "run"
    stopped = dflash(*_words(store, out))
    assert stopped.code == 1
    assert "NaN or Inf in step 4" in stopped.err
    assert "--init-from" in stopped.err
    assert "rows" in stopped.err
    state = json.loads((out / "checkpoints" / "last" / "state.json").read_text())
    assert state["step"] <= 4
    assert all(bool(torch.isfinite(tensor).all()) for tensor in _weights(out).values())


def test_a_full_disk_while_saving_is_said_and_the_run_goes_on(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from dflash_tool.trainer import checkpoint

    save = checkpoint.save_drafter
    full = iter([False, True, *[False] * 99])

    def sometimes(*args: object) -> None:
        if next(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save_drafter", sometimes)
    done = dflash(*_words(store, tmp_path / "run"), "--json")
    assert done.code == 0
    assert any("could not be saved" in note for note in json.loads(done.out)["notes"])


def test_overfits_a_few_samples(store: Path, tmp_path: Path) -> None:
    """8 samples, seen often: nearly every block is drafted right, so anchor tau nears what labels allow."""
    config = _config(
        store,
        tmp_path / "run",
        batch_samples=8,
        epochs=120,
        max_steps=120,
        lr=3e-3,
        anchors=64,
        val_fraction=0,
        draft_layers=2,
    )
    run = train_run.open_run(config, TrainTelemetry())
    rows = run.train_rows[:8]
    from dflash_tool.loader import MixingLoader, anchor_counts, epoch_plans
    from dflash_tool.trainer import Validator

    plan = epoch_plans(
        run.store.samples, rows, anchors_of=anchor_counts(run.store.samples), anchors=64, block_size=4, seed=0,
        batch_samples=8, context_budget=4096, block_budget=8192,
    )  # fmt: skip
    with MixingLoader(
        run.store, rows, plan, layers=(1, 3), epochs=120, window_bytes=1 << 28, threads=1, verify="first"
    ) as loader:
        for step in loader:
            run.loop.step(step)
    found = Validator(run.store, rows, run.head, layers=(1, 3), gamma=None, batch_tokens=4096).run(run.model)
    every = found.counted.sum() + sum(anchor.forwards for anchor, _ in found.by_bucket.values())
    possible = every / sum(anchor.forwards for anchor, _ in found.by_bucket.values())
    assert found.anchor_tau > 0.95 * possible
