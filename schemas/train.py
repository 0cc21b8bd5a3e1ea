"""What a training run was asked to do, and the state that a checkpoint carries beside its tensors."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dflash_tool.schemas.config import RunConfig, int_list, strings


def _one_or_many(value: Any) -> Any:
    """A YAML file may say `store: ./a` for one store."""
    return value if isinstance(value, list | tuple) else (value,)


class TrainOptions(RunConfig):
    """What decides how a drafter is trained, wherever the hidden states come from.

    None means "choose by the store, the block size or the device".

    Defaults are the DFlash paper's where it gives them. `warmup` is a share of all steps; `microbatch_tokens` counts
    context tokens of one forward, padding included.
    """

    block_size: int = Field(default=16, ge=2)
    draft_layers: int = Field(default=5, ge=1)
    aux_layers: Annotated[tuple[int, ...] | None, BeforeValidator(int_list)] = None
    init_from: Path | None = Field(default=None, description="folder of a drafter to start from")
    anchors: int = Field(default=512, ge=1)
    loss: Literal["decay", "dpace"] = "decay"
    gamma: float | None = Field(default=None, gt=0)
    lr: float = Field(default=6e-4, gt=0)
    warmup: float = Field(default=0.04, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    epochs: int = Field(default=6, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    batch_samples: int = Field(default=512, ge=1)
    microbatch_tokens: int | None = Field(default=None, ge=1)
    grad_checkpointing: bool = False
    val_fraction: float = Field(default=0.01, ge=0, lt=1)
    val_samples: int = Field(default=512, ge=0)
    val_every: int = Field(default=200, ge=1, description="steps")
    save_every: int = Field(default=200, ge=1, description="steps")
    log_every: int = Field(default=10, ge=1, description="steps")
    keep: int = Field(default=2, ge=1, description="newest checkpoints kept, beside the best")
    tensorboard: bool = False
    drafter_device: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(strings)] = ("auto",)
    drafters: int = Field(default=1, ge=1, description="replicas on each drafter device")
    compile: bool = False


class TrainConfig(TrainOptions):
    """Everything that decides what `train` does."""

    store: Annotated[tuple[Path, ...], Field(min_length=1), BeforeValidator(_one_or_many)]
    weight: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)], ...], BeforeValidator(_one_or_many)
    ] = Field(default=(), description="copies of each store's samples, one for each store; none given: 1 each")
    follow: bool = Field(default=False, description="a store may still be in the making")
    loader_threads: int = Field(default=2, ge=1)
    verify_reads: Literal["first", "always", "never"] = "first"


# What may differ between a checkpoint and the run that goes on from it: none of it changes a step's result.
MAY_CHANGE = {
    "store", "follow", "out", "microbatch_tokens", "grad_checkpointing", "val_every", "save_every", "log_every", "keep",
    "tensorboard", "drafter_device", "drafters", "compile", "inflight_gib", "loader_threads", "verify_reads",
}  # fmt: skip


class TrainState(BaseModel):
    """`state.json` of a checkpoint: where the run stands. Tensors lie beside it, as safetensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["dflash-checkpoint"] = "dflash-checkpoint"
    format_version: Literal[1] = 1
    step: int = Field(ge=0, description="optimizer steps taken")
    total_steps: int = Field(ge=1)
    loader: dict[str, Any] = Field(description="MixingLoader.state_dict()")
    config: dict[str, Any] = Field(description="the resolved TrainConfig")
    store_settings: str = Field(description="fingerprint of the store's settings")
    best_walk_tau: float | None = None
    best_step: int | None = None
    validation: dict[str, Any] | None = Field(default=None, description="the newest validation row")
    threads: int = Field(description="torch threads: another number gives other bits")
    drafters: int = Field(default=1, ge=1, description="of all ranks together: so does another number of these")
    versions: dict[str, str]
