"""Checkpoints of a run: whole or not there, resumable to the bit, each with a servable drafter inside.

    RUN/checkpoints/step-0000200/   config.json, model.safetensors   what engines load (fp32)
                                    optimizer.safetensors            AdamW's moments, by parameter, and its step
                                    state.json                       step, loader position, config, best so far
    RUN/checkpoints/last, best      links to the newest one and to the one of the highest walk tau

A checkpoint is written to a temporary folder, synced and renamed; then the links move; then old ones are removed: the
newest `keep` and the best stay. There is no generator to save: anchors and order are functions of the seed.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_tool.drafter.files import save_drafter
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.errors import StoreError
from dflash_tool.schemas.run import CHECKPOINTS, STATE
from dflash_tool.schemas.train import TrainState
from dflash_tool.store.files import TEMP_PREFIX, disk_errors, fsync_path, write_file

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    state: TrainState

    def load(self, model: DFlashDraftModel, optimizer: torch.optim.Optimizer) -> None:
        """Put weights and moments into a model and its optimizer. StoreError for a damaged file."""
        try:
            model.load_state_dict(load_file(self.folder / "model.safetensors"))
            moments = load_file(self.folder / "optimizer.safetensors")
            taken = float(moments.get("step", torch.tensor(float(self.state.step))))  # fewer, where steps were empty
            for name, parameter in model.named_parameters():
                state: dict[str, Tensor] = {
                    moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS
                }
                step = torch.tensor(taken, device=parameter.device)  # as the fused optimizer wants it
                optimizer.state[parameter] = {"step": step, **state}
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise StoreError(
                f"the checkpoint {self.folder} can't be read: {error}; remove it to go on from the one before it"
            ) from error


class Checkpoints:
    """The checkpoints of the run folder `run`; keeps the newest `keep` and the best."""

    def __init__(self, run: Path, *, keep: int) -> None:
        self.folder = run / CHECKPOINTS
        self._keep = keep

    def newest(self) -> Checkpoint | None:
        """The one to go on from. Leftovers of a run that was killed are removed."""
        for leftover in self.folder.glob(f"{TEMP_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        found = self._all()
        return read_checkpoint(found[-1]) if found else None

    def save(self, model: DFlashDraftModel, optimizer: torch.optim.Optimizer, state: TrainState) -> Checkpoint:
        """Write a checkpoint and move the links. StoreError if the disk refuses: what was there stays good."""
        folder = self.folder / f"step-{state.step:07d}"
        temporary = self.folder / f"{TEMP_PREFIX}{folder.name}"
        try:
            with disk_errors(folder, "save the checkpoint"):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                save_drafter(model, temporary)
                save_file(_moments(model, optimizer), temporary / "optimizer.safetensors")
                write_file(temporary / STATE, state.model_dump_json(indent=2).encode())
                for file in temporary.iterdir():
                    file.chmod(0o644)  # safetensors writes files that only their owner can read
                    fsync_path(file)
                fsync_path(temporary)
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)
                self._link("last", folder)
                if state.best_step == state.step:
                    self._link("best", folder)
                fsync_path(self.folder)
        except SafetensorError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StoreError(f"can't save the checkpoint {folder}: {error}; check the disk") from error
        except StoreError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._remove_old(state)
        return Checkpoint(folder, state)

    def _link(self, name: str, folder: Path) -> None:
        temporary = self.folder / f"{TEMP_PREFIX}{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.name)
        os.replace(temporary, self.folder / name)  # noqa: PTH105 - replaces the link itself

    def _remove_old(self, state: TrainState) -> None:
        best = f"step-{state.best_step:07d}" if state.best_step is not None else ""
        for folder in self._all()[: -self._keep]:
            if folder.name != best:
                shutil.rmtree(folder, ignore_errors=True)

    def _all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(folder for folder in self.folder.glob("step-*") if (folder / STATE).is_file())


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, its tensors not looked at. StoreError if its `state.json` is missing or damaged."""
    path = folder / STATE
    try:
        return Checkpoint(folder, TrainState.model_validate_json(path.read_bytes()))
    except (OSError, ValidationError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise StoreError(
            f"{path} is damaged: {what}; remove {folder} to go on from the checkpoint before it"
        ) from error


def _moments(model: DFlashDraftModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by name; zeros before its first step."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters())
    taken = next((state["step"] for state in states.values() if "step" in state), torch.zeros(()))
    return {"step": taken.detach().cpu().clone()} | {
        f"{moment}.{name}": state.get(moment, torch.zeros_like(parameters[name])).detach().cpu().contiguous()
        for name, state in states.items()
        for moment in _MOMENTS
    }
