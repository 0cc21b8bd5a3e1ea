"""`export` from end to end: the same bits as the checkpoint, conforming files, refusals that leave nothing behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dflash_tool
from dflash_tool import pipeline
from dflash_tool.drafter.head import load_head
from dflash_tool.pipeline import exporting

from .running import small_run

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def run(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return small_run(random_target(), token_rows(60), tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize(
    ("family", "tied", "rope", "changed"),
    [
        ("qwen3", True, None, {}),
        ("qwen3", False, YARN, {"block_size": 8, "aux_layers": (1, 3)}),
        ("llama", True, YARN, {"block_size": 8}),
        ("llama", False, None, {"aux_layers": (2,), "draft_layers": 2}),
    ],
)
def test_logits_are_the_checkpoint_s_to_the_bit(
    family: str, tied: bool, rope: dict[str, Any] | None, changed: dict[str, object],
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run,
) -> None:  # fmt: skip
    target = tmp_path / "target"
    shutil.copytree(random_target(family, tied=tied), target)
    if rope:
        raw = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(raw | {"rope_parameters": rope}))
    run = small_run(target, token_rows(40), tmp_path, max_steps=2, **changed)
    before, after = run / "checkpoints" / "best", tmp_path / "drafter"
    pipeline.export(run, after)
    trained, exported = (dflash_tool.load_drafter(folder) for folder in (before, after))
    settings = exported.settings
    assert settings == trained.settings
    assert settings.block_size == changed.get("block_size", 4)
    assert settings.target_layer_ids == changed.get("aux_layers", (1, 2, 3))
    assert settings.rope["rope_type"] == (rope or {"rope_type": "default"})["rope_type"]
    head = load_head(tmp_path / "store" / "head", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    noise = head.embed(torch.randint(0, 90, (1, settings.block_size), generator=generator))
    states = torch.randn(1, 12, exported.fc.in_features, generator=generator)
    with torch.no_grad():
        one, other = (head.logits(model(noise, states).last_hidden_state) for model in (trained, exported))
    assert torch.equal(one, other)
    assert dflash("export", "--check", after, "--target", target).code == 0


def test_what_is_in_the_folder(run: Path, tmp_path: Path, dflash: Run) -> None:
    out = tmp_path / "new" / "drafter"
    result = dflash("export", run / "checkpoints" / "last", "--out", out, "--dtype", "bfloat16")
    assert result.code == 0, result.err
    assert sorted(file.name for file in out.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "training.json"
    ]  # fmt: skip
    assert list(out.parent.iterdir()) == [out]
    assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    record = json.loads((out / "training.json").read_text())
    state = json.loads((run / "checkpoints" / "last" / "state.json").read_text())
    manifest = json.loads((run.parent / "store" / "manifest.json").read_text())
    assert record["config"] == state["config"]
    assert record["step"] == state["step"]
    for name in ("target", "tokenizer", "template", "data", "layer_ids", "store_dtype"):
        assert record["store"][name] == manifest[name]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [row for row in rows if row["kind"] == "validation" and row["step"] == state["step"]]
    assert record["validation"] == measured
    card = (out / "README.md").read_text()
    assert f"walk tau **{measured['walk_tau']:.2f}**" in card
    assert f"60.jsonl: {manifest['samples']} samples" in card
    assert '"num_speculative_tokens": 3' in card
    assert f"{state['step']} of {state['total_steps']} steps" in card


def test_a_store_that_is_gone_is_said(run: Path, tmp_path: Path, dflash: Run) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run, moved, symlinks=True)
    state = moved / "checkpoints" / "best" / "state.json"
    raw = json.loads(state.read_text())
    raw["config"]["store"] = str(tmp_path / "gone")
    state.write_text(json.dumps(raw))
    document = json.loads(dflash("export", moved, "--out", tmp_path / "out", "--json").out)
    assert document["step"] == raw["step"]
    assert "is not there any more" in document["notes"][0]
    assert "unknown" in (tmp_path / "out" / "README.md").read_text()


def test_leftovers_of_a_killed_export_are_no_hindrance(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "model.safetensors").write_bytes(b"half")
    pipeline.export(run, tmp_path / "out")
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]
    assert pipeline.check(tmp_path / "out") == []


def test_what_does_not_conform_is_never_there(
    run: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = exporting.save_drafter

    def off(model: Any, folder: Path, **options: Any) -> None:
        save(model, folder, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors["norm.weight"] += 1
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(exporting, "save_drafter", off)
    result = dflash("export", run, "--out", tmp_path / "out")
    assert result.code == 1
    assert "norm.weight is not what was trained" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nowhere", "--out", "out"], 1, "there is no such folder"),
        (["empty", "--out", "out"], 1, "is neither a run of `dflash train`"),
        (["young", "--out", "out"], 1, "has no checkpoint yet"),
        ([], 2, "give a run or a checkpoint and --out DIR, or --check DIR"),
        (["run"], 2, "give a run or a checkpoint and --out DIR"),
        (["run", "--out", "empty"], 1, "empty exists"),
        (["run", "--out", "out", "--target", "x"], 2, "--target goes with --check"),
        (["run", "--check", "run"], 2, "--check only looks"),
        (["--check", "nowhere"], 1, "there is no such folder"),
        (["--check", "run/checkpoints/best", "--target", "nowhere"], 1, "no target at nowhere"),
        (["run", "--out", "out", "--dtype", "int8"], 2, "--dtype"),
    ],
)
def test_wrong_options(
    run: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(run)
    (tmp_path / "empty").mkdir()
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "train.yaml").touch()
    result = dflash("export", *words)
    assert result.code == code, result.err
    assert says in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "empty").iterdir())


def test_check_names_what_is_off(run: Path, tmp_path: Path, dflash: Run, random_target: Callable[..., Path]) -> None:
    out = tmp_path / "drafter"
    pipeline.export(run, out)
    fine = dflash("export", "--check", out)
    assert (fine.code, "is what engines expect" in fine.out) == (0, True)
    other = dflash("export", "--check", out, "--target", random_target(layers=4))
    assert other.code == 1
    assert "number of target layers: the drafter says 6, the target 4" in other.out

    raw = json.loads((out / "config.json").read_text())
    raw["mask_token_id"] = raw["dflash_config"]["mask_token_id"] = 95  # the tokenizer's end token
    (out / "config.json").write_text(json.dumps(raw))
    wrong = dflash("export", "--check", out, "--target", random_target(), "--json")
    assert wrong.code == 1
    trained, end = json.loads(wrong.out)["off"]
    assert "mask_token_id is 95, but 96 was trained" in trained
    assert "mask_token_id 95: this is the tokenizer's eos token" in end
