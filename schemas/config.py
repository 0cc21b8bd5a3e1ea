"""What a run was asked to do: frozen, validated once at the edge, saved beside every output."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
StoreDtype = Literal["bfloat16", "float16", "float32"]
STORE_ITEMSIZE: dict[StoreDtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# A stored layer: the 0-based decoder layer, or the last layer's output before the final norm.
LayerId = int | Literal["final"]


def int_list(value: Any) -> Any:
    """`"1,9,17"` (command line) or `[1, 9, 17]` (YAML) -> a tuple of ints; pydantic judges the rest."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


_PATHS = {"target", "data", "out", "chat_template", "tee"}


def _at_home(value: Any) -> Any:
    """`~/x` -> the home folder's x, as a shell does it for options."""
    if isinstance(value, list | tuple):
        return [_at_home(each) for each in value]
    return str(Path(value).expanduser()) if str(value).startswith("~") else value


def strings(value: Any) -> Any:
    """A YAML file may say `cpu` for `[cpu]`."""
    return (value,) if isinstance(value, str) else value


def _buckets(value: Any) -> Any:
    """`"6"`: that many buckets; `"128,512,2048"`: these upper edges."""
    if isinstance(value, int):
        return value
    parts = value.split(",") if isinstance(value, str) else list(value)
    try:
        numbers = [int(part) for part in parts if str(part).strip()]
    except ValueError:
        numbers = []
    one = isinstance(value, str) and "," not in value
    if not numbers or (one and not 1 <= numbers[0] <= 256):
        raise ValueError("give a number of buckets from 1 to 256, or ascending edges such as 128,512,2048")
    return numbers[0] if one else tuple(numbers)


class RunConfig(BaseModel):
    """What every run has: where it writes, its seed, how much may be in flight (GiB: powers of two)."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    out: Path
    mask_token_id: int | None = Field(default=None, ge=0)
    inflight_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)


class ExtractConfig(RunConfig):
    """Everything that decides what `extract` does. Sizes in GiB and MiB are powers of two.

    `buckets` is a count or explicit inclusive upper edges; `layers` are 0-based decoder layer ids (the
    output of that layer); None means "choose by the target, the device or the machine".
    """

    target: str
    data: tuple[Path, ...] = Field(min_length=1)
    max_length: int | None = Field(default=None, ge=2)
    overlength: Literal["truncate", "skip"] = "truncate"
    turns: Literal["each", "last"] = "each"
    chat_template: Path | None = None
    template_args: dict[str, Any] = Field(default_factory=dict)
    layers: Annotated[Annotated[tuple[int, ...], Field(min_length=1)] | None, BeforeValidator(int_list)] = None
    final_hidden: bool = Field(default=False, description="store the last layer's output before the final norm too")
    dtype: ComputeDtype = "auto"
    store_dtype: StoreDtype = "bfloat16"
    target_device: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(strings)] = ("auto",)
    targets: int = Field(default=1, ge=1, description="replicas on each target device")
    trust_remote_code: bool = False
    buckets: Annotated[Annotated[int, Field(ge=1, le=256)] | tuple[int, ...], BeforeValidator(_buckets)] = 6
    batch_tokens: int | None = Field(default=None, ge=1)
    hs_queue_depth: int | None = Field(default=None, ge=1)
    shard_mib: float = Field(default=1024, ge=0.001, allow_inf_nan=False)
    commit_every: float = Field(default=120, gt=0, allow_inf_nan=False, description="seconds")
    max_bad: float = Field(default=0.01, ge=0, le=1, description="share of samples with NaN or Inf states")
    strict: bool = False
    verify: bool = Field(default=False, description="hash the shards that are there, and make damaged ones again")

    @model_validator(mode="before")
    @classmethod
    def _paths(cls, values: Any) -> Any:
        """A YAML file may say `data: chats.jsonl` for one file, and `~` anywhere."""
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("data"), str | Path):
            values = {**values, "data": [values["data"]]}
        return {name: _at_home(value) if name in _PATHS else value for name, value in values.items()}
