"""`export`: a run's checkpoint -> the folder that engines load, checked before it has its name; `check` alone."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_tool.drafter.conformance import TRAINING, check_folder
from dflash_tool.drafter.files import load_drafter, read_drafter_config, save_drafter
from dflash_tool.errors import ConfigError, DflashError, StoreError
from dflash_tool.prompts import choose_mask_token, load_tokenizer
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.store.files import TEMP_PREFIX, disk_errors, fsync_path, write_file
from dflash_tool.store.joined import joint_fingerprint
from dflash_tool.store.manifest import read_manifest
from dflash_tool.target import open_target
from dflash_tool.trainer import Checkpoint
from dflash_tool.trainer.card import model_card
from dflash_tool.trainer.record import find_checkpoint, training_record

CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A folder that was written and checked. walk_tau: on held-out answers, at this step; None if not measured."""

    out: Path
    checkpoint: Path
    step: int
    dtype: str
    tensors: int
    parameters: int
    nbytes: int
    walk_tau: float | None
    notes: tuple[str, ...]


def export(source: Path, out: Path, *, dtype: torch.dtype | None = None) -> ExportResult:
    """Write the folder `out` from a run (its best checkpoint) or a checkpoint; it is there whole, or not at all.

    dtype: of the weights; default as trained (fp32). Raises DflashError if `out` exists, the source is no checkpoint,
    or what was written does not conform: then nothing is left.
    """
    _refuse_existing(out)
    checkpoint = find_checkpoint(source)
    model = load_drafter(checkpoint.folder)
    dtype = dtype or model.dtype
    manifest, notes = _manifest(checkpoint)
    record = training_record(checkpoint, model.settings, manifest)
    parameters = sum(value.numel() for value in model.state_dict().values())
    name = str(dtype).removeprefix("torch.")
    temporary = out.with_name(f"{TEMP_PREFIX}{out.name}")
    with disk_errors(out, "write"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            save_drafter(model, temporary, dtype=dtype)
            write_file(temporary / TRAINING, (json.dumps(record, indent=2) + "\n").encode())
            write_file(temporary / CARD, model_card(record, model.settings, name, parameters).encode())
            _check_written(temporary, model, dtype)
            for file in temporary.iterdir():
                file.chmod(0o644)  # safetensors writes files that only their owner can read
                fsync_path(file)
            fsync_path(temporary)
            _refuse_existing(out)  # an empty folder that came meanwhile would be replaced
            temporary.rename(out)
            fsync_path(out.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    row = record["validation"]
    return ExportResult(
        out=out,
        checkpoint=checkpoint.folder,
        step=checkpoint.state.step,
        dtype=name,
        tensors=len(model.state_dict()),
        parameters=parameters,
        nbytes=sum(file.stat().st_size for file in out.iterdir()),
        walk_tau=row["walk_tau"] if row else None,
        notes=notes,
    )


def check(folder: Path, target: str | None = None) -> list[str]:
    """All that is off with a drafter's folder, for a target (a folder or a name on the hub) if one is given.

    Raises DflashError for a target that can't be opened, and for a folder that isn't there.
    """
    if not folder.is_dir():
        raise DflashError(f"--check {folder}: there is no such folder")
    if target is None:
        return check_folder(folder)
    opened = open_target(target)
    found = check_folder(folder, opened.config)
    with suppress(DflashError):  # what is wrong with the config has been found already
        settings = read_drafter_config(folder)
        tokenizer = load_tokenizer(opened.path)
        try:
            choose_mask_token(tokenizer, opened.vocab_size, settings.mask_token_id)
        except ConfigError as error:
            found.append(str(error).replace("--mask-token-id", "config.json: mask_token_id"))
    return found


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise StoreError(f"--out: {out} exists; an export never writes over anything: give a new folder")


def _manifest(checkpoint: Checkpoint) -> tuple[Manifest | None, tuple[str, ...]]:
    """The manifest of the (first) store it was trained on, where the run found it; and what there is to say of that."""
    config = TrainConfig.model_validate(checkpoint.state.config)
    where = ", ".join(map(str, config.store))
    try:
        manifests = [read_manifest(root) for root in config.store]
    except StoreError:
        return None, (f"the store {where} is not there any more: the card says nothing of the data",)
    if joint_fingerprint(manifests, config.weight or [1.0] * len(manifests)) != checkpoint.state.store_settings:
        return None, (f"the store {where} is another one by now: the card says nothing of the data",)
    if len(manifests) > 1:
        return manifests[0], (f"trained on {len(manifests)} stores: the card tells of the first, {config.store[0]}",)
    return manifests[0], ()


def _check_written(folder: Path, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Read what was written: the same bits as the checkpoint's, and a drafter that conforms. DflashError if not."""
    found = check_folder(folder)
    again = load_drafter(folder).state_dict() if not found else {}
    found += [
        f"{name} is not what was trained"
        for name, value in model.state_dict().items()
        if not found and not torch.equal(again[name], value.to(dtype))
    ]
    if found:
        raise DflashError(
            "what was exported does not conform, so nothing is left of it:\n  "
            + "\n  ".join(found)
            + "\ncheck the disk; if that is in order, this is a defect of dflash: please report it"
        )
