"""`evaluate`: what a drafter is worth, from a store alone and in real generation. Writes nothing.

Everything is opened and compared before the first forward: a drafter of another target, a store without its layers,
data without a prompt are refused at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.drafter.acceptance import Yield
from dflash_tool.drafter.config import DrafterConfig, other_target
from dflash_tool.drafter.files import load_drafter, read_drafter_config
from dflash_tool.drafter.head import load_head, make_head
from dflash_tool.errors import ConfigError, DflashError
from dflash_tool.evaluate.generation import Generation
from dflash_tool.evaluate.held_out import Chosen, choose_samples
from dflash_tool.evaluate.measure import Measured, Progress, measure
from dflash_tool.evaluate.prompts import DEFAULT_PROMPTS, Prompts, read_prompts
from dflash_tool.prompts import PrepareOptions, find_files, load_tokenizer
from dflash_tool.schemas.evaluate import EvalConfig
from dflash_tool.store.layout import HEAD
from dflash_tool.store.reader import HiddenStore
from dflash_tool.target import (
    TargetFolder,
    compute_dtype,
    head_tensors,
    load_whole,
    open_target,
    resolve_device,
    weights_fingerprint,
)
from dflash_tool.trainer import Validation, Validator
from dflash_tool.trainer.validate import bigram_table, bigram_yield

_BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}


@dataclass(frozen=True, kw_only=True)
class Graded:
    """A store's samples: which ones, what was found, a bigram table's walk on them. edges: of buckets, in tokens."""

    chosen: Chosen
    found: Validation
    bigram: Yield
    edges: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """One JSON document."""
        found = self.found
        return {
            **{name: value for name, value in found.as_row().items() if name not in {"kind", "loss"}},
            "samples": len(self.chosen.rows),
            "held_out": self.chosen.known,
            "which": self.chosen.words,
            "bigram_tau": self.bigram.tau,
            "accepted_by_slot": (found.reached / np.maximum(found.counted, 1)).tolist(),
            "by_source": {
                name: {"anchor_tau": anchor.tau, "walk_tau": walk.tau, "anchors": anchor.forwards}
                for name, (anchor, walk) in sorted(found.by_source.items())
            },
        }


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What was measured. graded: from the store; measured: in generation; failures: what does not add up."""

    config: EvalConfig
    settings: DrafterConfig
    graded: Graded | None
    measured: Measured | None
    notes: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """Sentences; empty if all is well."""
        return self.measured.failures if self.measured else []

    def as_json(self) -> dict[str, Any]:
        """One JSON document."""
        return {
            "drafter": str(self.config.drafter),
            "store": self.graded.as_json() if self.graded else None,
            "generation": self.measured.as_json(self.settings.block_size - 1) if self.measured else None,
            "notes": list(self.notes),
            "failures": self.failures,
        }


def evaluate(config: EvalConfig, on_progress: Progress | None = None) -> EvalResult:
    """Measure a drafter. Raises a `DflashError` for all that a user can mend, before anything is computed."""
    if (config.target is None) != (not config.data):
        raise ConfigError("--target and --data go together: the target answers the prompts of the data")
    if config.target is None and config.store is None:
        raise ConfigError("nothing to measure on: give --store STORE, or --target PATH and --data FILE, or all three")
    settings = read_drafter_config(config.drafter)
    device = resolve_device("auto")
    chosen = None if config.store is None else _open_store(config, config.store, settings)
    target = None if config.target is None else _open_target(config, config.target, settings, chosen)
    prompts = None if target is None else _prompts(config, settings, target, chosen)
    graded = None if chosen is None else _grade(config, chosen, device)
    measured, notes = None, []
    if target is not None and prompts is not None:
        notes = _notes(prompts, chosen)
        table = _bigrams(prompts, chosen, settings.vocab_size)
        measured = _generate(config, target, prompts, table, device, on_progress)
    return EvalResult(config=config, settings=settings, graded=graded, measured=measured, notes=tuple(notes))


def _open_store(config: EvalConfig, root: Path, settings: DrafterConfig) -> Chosen:
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    store = HiddenStore.open(root)
    if wrong := other_target(settings, AutoConfig.from_pretrained(root / HEAD)):
        raise DflashError(f"{config.drafter} is no drafter for the target of {root}:\n  " + "\n  ".join(wrong))
    if lacking := sorted(set(settings.target_layer_ids) - set(store.manifest.layer_ids)):
        raise DflashError(
            f"the store {root} lacks layer {', '.join(map(str, lacking))}, which the drafter sees; it holds "
            f"{', '.join(map(str, store.manifest.layer_ids))}: extract again with --layers"
        )
    if not store.committed.any():
        raise DflashError(f"the store {root} holds no sample yet: let `dflash extract` go on")
    return choose_samples(config.drafter, store, config.limit)


def _open_target(config: EvalConfig, name: str, settings: DrafterConfig, chosen: Chosen | None) -> TargetFolder:
    target = open_target(name)
    if wrong := other_target(settings, target.config):
        raise DflashError(f"{config.drafter} is no drafter for {name}:\n  " + "\n  ".join(wrong))
    theirs = None if chosen is None else chosen.store.manifest.target
    if theirs is not None and (ours := weights_fingerprint(target)) != theirs.weights_fingerprint:
        raise DflashError(
            "--store is of another target than --target: its weights have the fingerprint "
            f"{theirs.weights_fingerprint} ({theirs.name}), those of {name} {ours}: give the target of the store, or "
            "leave --store out"
        )
    return target


def _grade(config: EvalConfig, chosen: Chosen, device: torch.device) -> Graded:
    store = chosen.store
    model = load_drafter(config.drafter, device=device, dtype=torch.float32)
    settings = model.settings
    head = load_head(store.root / HEAD, device=device, dtype=compute_dtype("auto", device))
    layers, batch_tokens = settings.target_layer_ids, _BATCH_TOKENS[device.type]
    found = Validator(store, chosen.rows, head, layers=layers, gamma=None, batch_tokens=batch_tokens).run(model)
    sizes = {"block_size": settings.block_size, "vocab_size": settings.vocab_size}
    bigram = bigram_yield(store.samples, chosen.rest, chosen.rows, **sizes)
    return Graded(chosen=chosen, found=found, bigram=bigram, edges=store.manifest.edges)


def _prompts(config: EvalConfig, settings: DrafterConfig, target: TargetFolder, chosen: Chosen | None) -> Prompts:
    """Prompts prepared as the store was, if there is one: then those that were trained on are known, and left out."""
    room = config.max_new_tokens + settings.block_size
    longest = None if target.max_position is None else target.max_position - room
    if longest is not None and longest < 1:
        raise ConfigError(
            f"--max-new-tokens {config.max_new_tokens}: this target has positions for {target.max_position} tokens, a "
            f"block of {settings.block_size} included"
        )
    folder, trained = target.path, set[bytes]()
    options: dict[str, Any] = {"template_args": config.template_args}
    if chosen is not None:
        manifest, folder = chosen.store.manifest, chosen.store.root / HEAD  # with the template that extract was given
        options = {
            "template_args": {**manifest.template_args, **config.template_args},
            "max_length": manifest.max_length,
            "overlength": manifest.overlength,
            "turns": manifest.turns,
        }
        trained = {chosen.store.samples.sample_id(row)[:12] for row in chosen.trained.tolist()}
    return read_prompts(
        find_files(config.data),
        load_tokenizer(folder),
        PrepareOptions(vocab_size=target.vocab_size, mask_token_id=settings.mask_token_id, **options),
        limit=config.limit or DEFAULT_PROMPTS,
        longest=longest,
        trained=trained,
    )


def _bigrams(prompts: Prompts, chosen: Chosen | None, vocab_size: int) -> NDArray[np.int64] | None:
    """A table learned from the store's other answers, or from those of the data that no prompt is from."""
    answers: Iterable[tuple[NDArray[Any], NDArray[Any]]] = prompts.others
    if chosen is not None:
        samples = chosen.store.samples
        answers = ((samples.tokens(row), samples.mask(row)) for row in chosen.rest.tolist())
    elif not prompts.others:
        return None
    return bigram_table(answers, vocab_size)


def _generate(
    config: EvalConfig,
    target: TargetFolder,
    prompts: Prompts,
    table: NDArray[np.int64] | None,
    device: torch.device,
    on_progress: Progress | None,
) -> Measured:
    dtype = compute_dtype("auto", device)
    model = load_whole(target, device, dtype)
    drafter = load_drafter(config.drafter, device=device, dtype=dtype)
    head = make_head(head_tensors(model, target))
    generation = Generation(model, drafter, max_new_tokens=config.max_new_tokens)
    return measure(
        generation, head, prompts.prompts, temperature=config.temperature, bigrams=table, on_progress=on_progress
    )


def _notes(prompts: Prompts, chosen: Chosen | None) -> list[str]:
    """What was left out of the data, and whether the prompts are known to be held out."""
    left_out = [
        f"{count:,} {why}"
        for count, why in (
            (prompts.trained, "that the drafter was trained on"),
            (prompts.long, "that leave no room for an answer"),
            (prompts.repeated, "that came before"),
        )
        if count
    ]
    notes = [f"prompts left out: {', '.join(left_out)}"] if left_out else []
    if chosen is None:
        notes.append("without --store nothing tells which of these prompts the drafter was trained on")
    elif not len(chosen.trained):
        notes.append(
            "the drafter may have been trained on these prompts: its folder doesn't tell, or names another store"
        )
    return notes
