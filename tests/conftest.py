"""Shared by all tests: one torch thread, no network, tiny random targets."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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
            made[key] = folder
        return made[key]

    return make
