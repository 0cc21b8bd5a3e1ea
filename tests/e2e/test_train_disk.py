"""`train` on a disk that refuses: what is said, what stays, and that nothing is called done that isn't on disk."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_tool.drafter.acceptance import Yield
from dflash_tool.errors import StoreError
from dflash_tool.store.manifest import read_manifest, write_manifest
from dflash_tool.trainer import checkpoint, metrics, validate
from dflash_tool.trainer.group import DrafterGroup
from dflash_tool.trainer.metrics import read_metrics

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
SETTINGS = {
    "block-size": 4, "draft-layers": 1, "anchors": 8, "batch-samples": 16, "max-steps": 8, "lr": 1e-2,
    "val-fraction": 0.1, "val-every": 1, "save-every": 3, "log-every": 1, "keep": 1, "inflight-gib": 0.1,
}  # fmt: skip
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


def _no_room() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def _taus(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> None:
    """Let the validations of steps 0, 1, ... find these walk taus."""
    run, each = validate.Validator.run, iter(taus)

    def graded(*args: object) -> validate.Validation:
        found = run(*args)  # type: ignore[arg-type]
        tau = next(each)
        found.by_bucket = {0: (Yield(1, 1), Yield(round(1000 * tau), 1000))}
        return found

    monkeypatch.setattr(validate.Validator, "run", graded)


def _saves(monkeypatch: pytest.MonkeyPatch, refused: set[int]) -> list[int]:
    """Let the disk refuse checkpoints of these steps; the list fills with the steps of all that were tried."""
    tried: list[int] = []
    save = checkpoint.save_drafter

    def sometimes(model: object, folder: Path) -> None:
        tried.append(int(folder.name.rpartition("-")[2]))
        if tried[-1] in refused:
            raise _no_room()
        save(model, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save_drafter", sometimes)
    return tried


def test_a_run_whose_last_checkpoint_is_refused_is_not_done(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert dflash("train", "--store", store, "--out", whole, *FLAGS).code == 0
    with monkeypatch.context() as patch:
        _saves(patch, refused=set(range(4, 99)))
        refused = dflash("train", "--store", store, "--out", run, *FLAGS)
    assert refused.code == 1
    assert "No space left" in refused.err
    assert "goes on from step 3" in refused.err
    assert "Trained" not in refused.out
    assert dflash("train", "--store", store, "--out", run, *FLAGS).code == 0
    ours, theirs = (load_file(each / "checkpoints" / "last" / "model.safetensors") for each in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_best_on_disk_outlives_a_better_one_that_is_refused(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    _taus(monkeypatch, [1.0, 1.1, 1.5, 1.2, 1.9, 1.3, 1.3, 1.3, 1.3])
    tried = _saves(monkeypatch, refused={4})
    done = dflash("train", "--store", store, "--out", run, *FLAGS, "--json")
    assert done.code == 0
    assert tried == [1, 2, 3, 4, 6, 8], "new bests, every third step and the last one, each once"
    best = (run / "checkpoints" / "best").resolve()
    assert best.name == "step-0000002"
    assert json.loads((best / "state.json").read_text())["best_walk_tau"] == 1.5
    said = json.loads(done.out)
    assert said["best_walk_tau"] == 1.5
    assert "checkpoint of step 4 could not be saved" in " ".join(said["notes"])


def test_metrics_that_the_disk_refuses_wait_for_room(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all, writes = metrics.write_all, iter(range(99))

    def sometimes(fd: int, data: memoryview) -> None:
        if 4 <= next(writes) < 9:
            os.write(fd, data[:20])
            raise _no_room()
        write_all(fd, data)

    monkeypatch.setattr(metrics, "write_all", sometimes)
    done = dflash("train", "--store", store, "--out", tmp_path / "run", *FLAGS, "--json")
    assert done.code == 0
    rows = [(row["kind"], row["step"]) for row in read_metrics(tmp_path / "run")]
    assert rows == [("validation", 0), *((kind, step) for step in range(1, 9) for kind in ("train", "validation"))]
    assert sum("could not be written" in note for note in json.loads(done.out)["notes"]) == 1


def test_a_sample_that_cannot_be_read_costs_no_step_before_it(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    flags = [*FLAGS, "--val-every", 99, "--save-every", 99]
    assert dflash("train", "--store", store, "--out", whole, *flags).code == 0
    add_up, calls = DrafterGroup.add_up, iter(range(99))

    def damaged(*args: Any) -> Any:
        if next(calls) == 4:
            raise StoreError("the rows of layer 3 changed since they were written")
        return add_up(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterGroup, "add_up", damaged)
        refused = dflash("train", "--store", store, "--out", run, *flags)
    assert refused.code == 1
    assert "changed since they were written" in refused.err
    assert json.loads((run / "checkpoints" / "last" / "state.json").read_text())["step"] == 4
    assert dflash("train", "--store", store, "--out", run, *flags).code == 0
    ours, theirs = (load_file(each / "checkpoints" / "last" / "model.safetensors") for each in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[1]"])
def test_settings_that_are_damaged(store: Path, tmp_path: Path, dflash: Run, content: bytes) -> None:
    (tmp_path / "train.yaml").write_bytes(content)
    refused = dflash("train", "--store", store, "--out", tmp_path, *FLAGS)
    assert refused.code == 1
    assert f"{tmp_path / 'train.yaml'} is damaged; restore it" in " ".join(refused.err.split())
    assert (tmp_path / "train.yaml").read_bytes() == content


def test_a_refused_store_leaves_the_settings_alone(store: Path, tmp_path: Path, dflash: Run) -> None:
    """The run's settings still name its own store, and a damaged state says what is wrong with it."""
    run, other = tmp_path / "run", tmp_path / "other"
    once = [*FLAGS, "--max-steps", 1]
    assert dflash("train", "--store", store, "--out", run, *once).code == 0
    settings = (run / "train.yaml").read_bytes()
    shutil.copytree(store, other)
    manifest = read_manifest(other)
    write_manifest(other, manifest.model_copy(update={"seed": 7}))
    refused = dflash("train", "--store", other, "--out", run, *once)
    assert refused.code != 0
    assert "of other stores" in refused.err
    assert (run / "train.yaml").read_bytes() == settings
    (run / "checkpoints" / "last" / "state.json").write_text("{")
    assert "EOF while parsing" in dflash("train", "--store", store, "--out", run, *once).err
