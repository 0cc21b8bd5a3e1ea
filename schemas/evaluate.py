"""What an evaluation was asked to do."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class EvalConfig(BaseModel):
    """A store, a target with data, or both. `limit` None: 512 samples of the store, 50 prompts of the data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafter: Path
    target: str | None = None
    data: tuple[Path, ...] = ()
    store: Path | None = None
    limit: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=256, ge=2)
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    template_args: dict[str, Any] = Field(default_factory=dict)
