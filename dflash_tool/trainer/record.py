"""What a run tells of a drafter: which checkpoint, trained on what, how good, as `training.json` keeps it.

`training.json` is an export's memory of the run: the resolved config, the drafter as it was trained, fingerprints of
the store, the validation row of that very step. `conformance` holds config.json against it, `eval` finds in it which
samples were held out.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_tool.drafter.config import DrafterConfig
from dflash_tool.drafter.conformance import TRAINING
from dflash_tool.errors import DflashError
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.schemas.run import CHECKPOINTS, STATE, TRAIN_SETTINGS
from dflash_tool.schemas.train import TrainState
from dflash_tool.trainer.checkpoint import Checkpoint, read_checkpoint
from dflash_tool.trainer.metrics import read_metrics


def find_checkpoint(path: Path) -> Checkpoint:
    """A run's best checkpoint (its newest where nothing was held out), or the checkpoint itself.

    Raises DflashError for what is neither, and for a run that has no checkpoint yet.
    """
    if (path / STATE).is_file():
        return read_checkpoint(path.resolve())
    if not path.is_dir():
        raise DflashError(f"{path}: there is no such folder; give that of a run, or one of its checkpoints")
    for name in ("best", "last"):
        if (path / CHECKPOINTS / name / STATE).is_file():
            return read_checkpoint((path / CHECKPOINTS / name).resolve())
    if (path / TRAIN_SETTINGS).is_file():
        raise DflashError(f"the run {path} has no checkpoint yet: let `dflash train` come to --save-every steps")
    raise DflashError(
        f"{path} is neither a run of `dflash train` (it has no {CHECKPOINTS}/) nor one of its checkpoints (no "
        f"{STATE}); a folder that engines load already is looked over with `dflash export --check`"
    )


def measured(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The validation row of this checkpoint's very step; None if there was none."""
    step = checkpoint.state.step
    rows = read_metrics(checkpoint.folder.parent.parent)
    found = [row for row in rows if row.get("kind") == "validation" and row.get("step") == step]
    kept = checkpoint.state.validation
    return found[-1] if found else kept if kept is not None and kept.get("step") == step else None


def training_record(checkpoint: Checkpoint, settings: DrafterConfig, manifest: Manifest | None) -> dict[str, Any]:
    """The document of `training.json`. manifest: of the store it was trained on, if it is still there."""
    state = checkpoint.state
    store: dict[str, Any] = {"settings_fingerprint": state.store_settings}
    if manifest is not None:
        whole = manifest.model_dump(mode="json")
        store |= {name: value for name, value in whole.items() if name not in {"complete", "run", "quarantined"}}
    return {
        "format": "dflash-training",
        "format_version": 1,
        "step": state.step,
        "total_steps": state.total_steps,
        "drafter": asdict(settings),
        "config": state.config,
        "store": store,
        "validation": measured(checkpoint),
        "versions": state.versions,
    }


def held_out_rule(folder: Path) -> tuple[dict[str, Any], str] | None:
    """How a drafter's training chose what it held out: its resolved config and the fingerprint of its store.

    From the checkpoint's state, or from what an export kept of it; None for a drafter that tells nothing.
    Raises StoreError or DflashError for a damaged document.
    """
    if (folder / STATE).is_file():
        state: TrainState = read_checkpoint(folder).state
        return state.config, state.store_settings
    file = folder / TRAINING
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text())
        return dict(record["config"]), str(record["store"]["settings_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DflashError(f"{file} is damaged ({error!r}): export the drafter again") from error
