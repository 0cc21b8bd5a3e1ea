"""`manifest.json`: what the numbers in a store are. Written before the first shard, completed at the end."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_tool.schemas.config import STORE_ITEMSIZE, LayerId, StoreDtype

FORMAT_VERSION: Final = 1
LAYER_CONVENTION = (
    "id k is the output of decoder layer k (0-based): the residual stream after layer k, before any final "
    "norm; transformers' hidden_states[k + 1]"
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetInfo(_Frozen):
    """The LLM whose hidden states these are. Fingerprints are XXH3-128 in hex."""

    name: str
    model_type: str
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0, description="rows of the embedding")
    config_fingerprint: str
    weights_fingerprint: str
    dtype: Literal["float32", "bfloat16", "float16"]


class DataFile(_Frozen):
    """One input file, as it was when it was read."""

    path: str
    bytes: int
    xxh3: str


class RunSummary(_Frozen):
    """Measured in the run that finished the store, over all its ranks. Bytes in flight are those of one process."""

    seconds: float
    samples: int
    real_tokens: int
    padded_tokens: int
    peak_inflight_bytes: int
    inflight_limit_bytes: int
    ranks: int
    targets: dict[str, int] = Field(description="real tokens, by target")
    waited: dict[str, float] = Field(description="seconds, by who waited for what")


class Manifest(_Frozen):
    """The store's contract with every later reader. `SETTINGS` are compared when a run resumes."""

    format: Literal["dflash-store"] = "dflash-store"
    format_version: Literal[1] = FORMAT_VERSION
    created: str
    target: TargetInfo
    tokenizer: str = Field(description="fingerprint of the tokenizer")
    template: str = Field(description="fingerprint of the chat template")
    template_args: dict[str, Any]
    turns: Literal["each", "last"]
    data: tuple[DataFile, ...]
    layer_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    final_hidden: bool = Field(default=False, description="also stores the state before the final norm")
    layer_convention: str = LAYER_CONVENTION
    store_dtype: StoreDtype
    max_length: int
    overlength: Literal["truncate", "skip"]
    seed: int
    edges: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        min_length=1, description="inclusive upper bucket edges, in tokens"
    )
    batch_tokens: int
    mask_token_id: int | None
    samples: int = Field(gt=0)
    tokens: int = Field(gt=0)
    supervised_tokens: int = Field(ge=0)
    planned_padded_tokens: int = Field(gt=0)
    skipped: dict[str, int] = Field(description="rows of the data that gave no sample, by reason")
    prepared: dict[str, int] = Field(default_factory=dict, description="rows read, duplicates, cut, split")
    quarantined: tuple[Annotated[str, Field(pattern="^[0-9a-f]{32}$")], ...] = Field(
        default=(), description="sample ids (hex) with non-finite states"
    )
    versions: dict[str, str]
    complete: bool = False
    run: RunSummary | None = None

    @property
    def layers(self) -> tuple[LayerId, ...]:
        """All stored layers, in the order of the index's hashes."""
        return (*self.layer_ids, "final") if self.final_hidden else self.layer_ids

    @property
    def layer_row_bytes(self) -> int:
        """Bytes of one token's row in one layer's array."""
        return self.target.hidden_size * STORE_ITEMSIZE[self.store_dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows over all stored layers."""
        return self.layer_row_bytes * len(self.layers)


# What must be equal for a run to go on with a store that holds committed shards, and how users set it.
SETTINGS: dict[str, str] = {
    "target.config_fingerprint": "--target",
    "target.weights_fingerprint": "--target",
    "target.dtype": "--dtype",
    "tokenizer": "--target (its tokenizer)",
    "template": "--chat-template",
    "template_args": "--template-arg",
    "turns": "--turns",
    "data": "--data",
    "layer_ids": "--layers",
    "final_hidden": "--final-hidden",
    "store_dtype": "--store-dtype",
    "max_length": "--max-length",
    "overlength": "--overlength",
    "seed": "--seed",
    "edges": "--buckets",
    "batch_tokens": "--batch-tokens",
    "mask_token_id": "--mask-token-id",
}
