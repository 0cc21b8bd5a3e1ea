"""Names on the Hugging Face hub beside folders. No network: `snapshot_download` is replaced, or offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from dflash_tool.errors import TargetError
from dflash_tool.target import open_target

REPOSITORY = [
    "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "modeling_own.py", "README.md",
    "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx",
]  # fmt: skip


def test_a_name_is_downloaded(random_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = random_target("qwen3"), []

    def download(name: str, **patterns: Any) -> str:
        calls.append((name, sorted(filter_repo_objects(REPOSITORY, **patterns))))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    target = open_target("Qwen/Qwen3-0.6B")
    assert (target.path, target.num_layers, target.hidden_size) == (folder, 6, 32)
    wanted = sorted(REPOSITORY[:8])
    assert calls == [("Qwen/Qwen3-0.6B", wanted)]
    open_target("Qwen/Qwen3-0.6B", trust_remote_code=True)
    assert calls[1][1] == sorted([*wanted, "modeling_own.py"])
    open_target(str(folder))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (GatedRepoError("403", response=MagicMock()), "gated: accept its terms"),
        (RepositoryNotFoundError("404", response=MagicMock()), "no such model on the Hugging Face hub"),
        (OSError("No space left on device"), "can't be downloaded .*No space left"),
    ],
)
def test_a_name_that_can_not_be_downloaded(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", MagicMock(side_effect=error))
    with pytest.raises(TargetError, match=f"no target at nobody/nothing: there is no such folder.*{says}"):
        open_target("nobody/nothing")


def test_offline_and_impossible_names(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="offline or out of reach"):
        open_target("nobody/nothing-at-all")
    for name in ("./models/mine", "a/b/c", str(tmp_path / "absent")):
        with pytest.raises(TargetError, match=r"no target at .* expected a folder with config\.json"):
            open_target(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="this is a file"):
        open_target(str(tmp_path / "file"))
