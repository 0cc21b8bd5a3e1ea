"""Shared by all tests: one torch thread, no network, tiny random targets, processes that start fast."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from .warm import Warm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)
# No example fails because other work shares the cores.
settings.register_profile("dflash", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dflash")

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
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(32 + number): number for number in range(95)} | {"<end>": 95, "<mask>": 96}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", mask_token="<mask>")


SLIDING = {"sliding_window": 8}  # far shorter than the samples
HALF_SLIDING = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# What each family's config has beside the common sizes; what follows a ":" is a variant of one architecture.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": SLIDING,
    "qwen2": {**HALF_SLIDING, "use_sliding_window": True},
    "qwen3_moe": EXPERTS,
    "gemma2": {**HALF_SLIDING, "query_pre_attn_scalar": 16, "final_logit_softcapping": None},
    "gemma3_text": {**HALF_SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text:bidirectional": {**HALF_SLIDING, "use_bidirectional_attention": True},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "phi3:longrope": {
        "pad_token_id": 0,
        "original_max_position_embeddings": 20,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "partial_rotary_factor": 1.0,
        },
    },
    "gpt2": {"resid_pdrop": 0.1, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {},
    "bloom": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
NESTED = {"gemma3": "gemma3_text", "llava": "llama"}  # a vision tower beside a text config


@pytest.fixture(params=[*FAMILIES, *NESTED])
def any_family(request: pytest.FixtureRequest) -> str:
    """Each family that `random_target` can make."""
    family: str = request.param
    return family


@pytest.fixture(scope="session")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once) a random target folder: a name of FAMILIES or NESTED, `layers` decoder layers, tied or not."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    made: dict[tuple[str, int, bool], Path] = {}

    def config(family: str, layers: int, tied: bool) -> Any:
        kind = family.partition(":")[0]
        sizes = {
            "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
            "num_attention_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": tied,
            "initializer_range": 0.2,
        }  # fmt: skip
        if kind in {"opt", "bloom"}:
            sizes["init_std" if kind == "opt" else "initializer_range"] = 0.2
        elif kind not in {"gpt2", "gpt_neox", "phi", "phi3"}:
            sizes |= {"num_key_value_heads": 2, "head_dim": 16}
        extra = dict(FAMILIES[family])
        if "layer_types" in extra:
            extra["layer_types"] = (extra["layer_types"] * layers)[:layers]
        return AutoConfig.for_model(kind, **sizes, **extra)

    def make(family: str = "qwen3", *, layers: int = 6, tied: bool = True) -> Path:
        key = (family, layers, tied)
        if key not in made:
            torch.manual_seed(len(made))
            if family in NESTED:
                vision = {
                    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
                    "image_size": 28, "patch_size": 14,
                }  # fmt: skip
                text = config(NESTED[family], layers, tied).to_dict()
                tokens = {"image_token_index": 94, "image_token_id": 94, "tie_word_embeddings": tied}
                whole = AutoConfig.for_model(family, text_config=text, vision_config=vision, **tokens)
                model = AutoModelForImageTextToText.from_config(whole)
            else:
                model = AutoModelForCausalLM.from_config(config(family, layers, tied))
            for name, values in model.named_parameters():
                if name.endswith("bias"):  # zero at first, which would hide a forgotten one
                    values.data.normal_(0, 0.2)
            folder = tmp_path_factory.mktemp(f"{family.replace(':', '-')}-{layers}-{tied}")
            model.save_pretrained(folder)
            small_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Starts Python modules in processes that don't have to import anything first."""
    with closing(Warm(os.environ | {"OMP_NUM_THREADS": "1"})) as python:
        yield python


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
