"""`train` with another loss, from a drafter's weights, with TensorBoard, compiled: what each does and refuses."""

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_tool import pipeline
from dflash_tool.drafter.files import load_drafter
from dflash_tool.pipeline import train_run
from dflash_tool.pipeline.drafters import compile_parts
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.telemetry import TrainTelemetry
from dflash_tool.trainer.metrics import read_metrics

Run = Callable[..., Any]
OPTIONS = {
    "block_size": 4, "draft_layers": 1, "anchors": 8, "batch_samples": 16, "max_steps": 4, "lr": 1e-3,
    "val_fraction": 0.1, "log_every": 1, "inflight_gib": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def store(extract: Callable[..., Path]) -> Path:
    """As everywhere, but in six buckets: here a loss has to fall in four steps."""
    return extract(100, buckets=6)


@pytest.fixture(scope="module")
def drafter(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of 4 steps."""
    run = tmp_path_factory.mktemp("runs") / "first"
    pipeline.train(TrainConfig.model_validate({"store": store, "out": run, **OPTIONS}))
    return run / "checkpoints" / "last"


def words(store: Path, out: Path, *flags: object, without: tuple[str, ...] = ()) -> list[object]:
    options = {"store": store, "out": out, **OPTIONS}
    given = [(name, value) for name, value in options.items() if name not in without]
    return ["train", *(word for name, value in given for word in (f"--{name.replace('_', '-')}", value)), *flags]


def test_from_a_drafter(store: Path, drafter: Path, tmp_path: Path, dflash: Run) -> None:
    """It has that one's shape and weights: the first validation is that one's last. Going on needs it no more."""
    shape = ("block_size", "draft_layers")
    given = shutil.copytree(drafter, tmp_path / "drafter")
    done = dflash(*words(store, tmp_path / "run", "--init-from", given, "--json", without=shape))
    assert done.code == 0, done.err
    last = json.loads((drafter / "state.json").read_text())["validation"]
    assert json.loads(done.out)["first"]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert json.loads((tmp_path / "run/checkpoints/last/config.json").read_text())["block_size"] == 4
    shutil.rmtree(given)
    again = dflash(*words(store, tmp_path / "run", "--init-from", given, without=shape))
    assert again.code == 0, again.err
    new = dflash(*words(store, tmp_path / "new", "--init-from", given, without=shape))
    assert "no drafter in" in new.err


def test_its_weights_are_the_drafters(store: Path, drafter: Path, tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"store": store, "out": tmp_path, **OPTIONS, "init_from": drafter})
    run = train_run.open_run(config, TrainTelemetry())
    theirs = load_file(drafter / "model.safetensors")
    assert all(torch.equal(value, theirs[name]) for name, value in run.model.state_dict().items())


@pytest.mark.parametrize(
    ("flags", "changed", "says"),
    [
        (("--block-size", 8), {}, "--block-size 8: the drafter {} has 4; leave the option out"),
        (("--draft-layers", 3), {}, "--draft-layers 3: the drafter {} has 1"),
        (("--aux-layers", "1"), {}, "--aux-layers 1: the drafter {} has 1,3"),
        (("--mask-token-id", 96), {"mask_token_id": 95}, "--mask-token-id 96: the drafter {} has 95"),
        ((), {"mask_token_id": 5}, "--mask-token-id 5: this token occurs in the data"),
        ((), {"target_layer_ids": [1, 2]}, "--init-from: the store {store} lacks layer 2"),
        ((), {"hidden_size": 64}, "--init-from: the drafter {} was made for a target with hidden_size 64"),
        ((), {"vocab_size": 98}, "with vocab_size 98, that of the store has 97"),
        ((), {"num_target_layers": 9}, "with num_target_layers 9"),
        ((), {"architectures": ["Other"]}, "architecture Other, expected DFlashDraftModel"),
        ((), None, "no drafter in {}"),
    ],
)
def test_a_drafter_that_does_not_fit(
    store: Path, drafter: Path, tmp_path: Path, dflash: Run, flags: tuple[object, ...], changed: Any, says: str
) -> None:
    other = tmp_path / "drafter"
    other.mkdir()
    if changed is not None:
        config = json.loads((drafter / "config.json").read_text()) | changed
        config["dflash_config"] |= {name: value for name, value in changed.items() if name in config["dflash_config"]}
        (other / "config.json").write_text(json.dumps(config))
    shape = ("block_size", "draft_layers")
    refused = dflash(*words(store, tmp_path / "run", "--init-from", other, *flags, without=shape))
    assert refused.code in {1, 2}
    assert " ".join(says.format(other, store=store).split()) in " ".join(refused.err.split())
    assert "Traceback" not in refused.err
    assert not (tmp_path / "run").exists()


def test_dpace_trains_and_is_another_loss(store: Path, drafter: Path, tmp_path: Path, dflash: Run) -> None:
    out = tmp_path / "run"
    assert dflash(*words(store, out, "--loss", "dpace")).code == 0
    ours, theirs = ([row for row in read_metrics(run) if row["kind"] == "train"] for run in (out, drafter.parents[1]))
    assert ours[0]["loss"] != theirs[0]["loss"]
    assert ours[0]["blocks"] == theirs[0]["blocks"]
    assert ours[-1]["loss"] < ours[0]["loss"]
    other = dflash(*words(store, out))
    assert "--loss: the run has dpace, now decay" in " ".join(other.err.split())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compile_is_for_cuda(store: Path, drafter: Path, tmp_path: Path, dflash: Run) -> None:
    refused = dflash(*words(store, tmp_path / "run", "--compile", "--drafter-device", "cpu"))
    assert refused.code == 2
    assert "--compile is for CUDA devices" in refused.err
    model = load_drafter(drafter)
    names = list(model.state_dict())
    compile_parts(model)
    assert list(model.state_dict()) == names  # what is saved stays servable


def test_tensorboard_that_is_not_there(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused = dflash(*words(store, tmp_path / "run", "--tensorboard"))
    assert refused.code == 2
    assert "pip install 'dflash-tool[tensorboard]'" in refused.err
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_what_metrics_get(
    store: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars: list[tuple[str, float, int]] = []
    opened: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            opened.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

        def __enter__(self) -> "SummaryWriter":
            return self

        def __exit__(self, *_: object) -> None:
            opened.append(("closed", 0))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    out = tmp_path / "run"
    assert dflash(*words(store, out, "--tensorboard")).code == 0
    assert opened == [(str(out / "tensorboard"), 0), ("closed", 0)]
    for row in read_metrics(out):
        assert (f"{row['kind']}/loss", row["loss"], row["step"]) in scalars


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--drafters", 0), "--drafters: got"),
        (("--drafter-device", "cpu", "--drafter-device", "tpu"), "--drafter-device: 'tpu' is not a device"),
        (("--loss", "other"), "--loss"),
    ],
)
def test_wrong_options(store: Path, tmp_path: Path, dflash: Run, flags: tuple[object, ...], says: str) -> None:
    refused = dflash(*words(store, tmp_path / "run", *flags))
    assert refused.code == 2
    assert says in " ".join(refused.err.split())
    assert not (tmp_path / "run").exists()
