"""Shared by all tests: one torch thread, no network, tiny random targets."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)

DATA = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of the case files."""
    return DATA


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """The embedded, really trained target."""
    return EXAMPLES / "tiny-target"


def small_tokenizer() -> "PreTrainedTokenizerFast":
    """A tokenizer of 97 ids, one for each printable ASCII character, with an end and a mask token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(32 + number): number for number in range(95)} | {"<end>": 95, "<mask>": 96}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="?")), eos_token="<end>", mask_token="<mask>"
    )


@pytest.fixture(scope="session")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once) a random target folder: family "qwen3" or "llama", `layers` decoder layers, tied or not."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    made: dict[tuple[str, int, bool], Path] = {}

    def make(family: str = "qwen3", *, layers: int = 6, tied: bool = True) -> Path:
        key = (family, layers, tied)
        if key not in made:
            torch.manual_seed(len(made))
            sizes = {
                "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
                "tie_word_embeddings": tied, "initializer_range": 0.2,
            }  # fmt: skip
            model = (
                Qwen3ForCausalLM(Qwen3Config(**sizes)) if family == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
            )
            folder = tmp_path_factory.mktemp(f"{family}-{layers}-{tied}")
            model.save_pretrained(folder)
            small_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


class CommandResult(NamedTuple):
    """Exit code, stdout, stderr of one command."""

    code: int
    out: str
    err: str


@pytest.fixture
def dflash(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Run the command line in this process: `dflash("stats", store, "--json")`."""
    from dflash_tool.cli import main

    def run(*words: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["dflash", *map(str, words)])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        return CommandResult(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def token_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a JSONL file of ready tokens for the random targets (97 ids, the last two never used)."""

    def make(samples: int, *, longest: int = 120, seed: int = 0) -> Path:
        rng = np.random.default_rng(seed)
        path = tmp_path_factory.mktemp("rows") / f"{samples}.jsonl"
        with path.open("w") as file:
            for _ in range(samples):
                length = int(min(longest, 3 + rng.lognormal(3, 0.8)))
                ids = rng.integers(0, 95, length).tolist()
                mask = [0, *([1] * (length - 1))]
                file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
        return path

    return make
