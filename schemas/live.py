"""What a live run was asked to do: how hidden states are made, and how a drafter is trained on them."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.train import TrainConfig, TrainOptions

HELD_OUT = "held-out"


class LiveConfig(ExtractConfig, TrainOptions):
    """Everything that decides what `live` does; `out` is the run's folder.

    `tee` is a store that also gets what passes; without it only the held-out samples are stored, in the run's folder.
    """

    tee: Path | None = None
    max_steps_ahead: int = Field(default=8, ge=1, description="steps that targets may be ahead of the drafters")

    @property
    def store(self) -> Path:
        """The store with the prepared samples, the target's head and the hidden states of held-out samples."""
        return self.out / HELD_OUT if self.tee is None else self.tee

    def extract(self) -> ExtractConfig:
        """What the store is made with. The drafter's layers are captured if no others are asked for."""
        layers = {"layers": self.layers or self.aux_layers} if self.layers or self.aux_layers else {}
        return ExtractConfig.model_validate(self._given(ExtractConfig) | layers | {"out": self.store})

    def train(self) -> TrainConfig:
        """What the drafter is trained with: `dflash train` with this and a finished `tee` takes the same steps."""
        return TrainConfig.model_validate(self._given(TrainConfig) | {"store": self.store})

    def _given(self, model: type[BaseModel]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set & model.model_fields.keys()}
