"""`evaluate`: what a drafter is worth, from a store alone and in real generation. Writes nothing.

Everything is opened and compared before the first forward: a drafter of another target, a store without its layers,
data without a prompt are refused at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
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
from dflash_tool.target import TargetFolder, compute_dtype, head_tensors, load_whole, open_target, resolve_device
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
            **{name: value for name, value in found.as_row().items() if name != "kind"},
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
            "generation": self.measured.as_json() if self.measured else None,
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
    store, chosen = None, None
    if config.store is not None:
        store = HiddenStore.open(config.store)
        _check_store(config, settings, store)
        chosen = choose_samples(config.drafter, store, config.limit)
    target, prompts = None, None
    if config.target is not None:
        target = open_target(config.target)
        if wrong := other_target(settings, target.config):
            raise DflashError(f"{config.drafter} is no drafter for {config.target}:\n  " + "\n  ".join(wrong))
        prompts = _prompts(config, settings, target, store, chosen)
    graded = None if store is None or chosen is None else _grade(config, store, chosen, device)
    measured, notes = None, []
    if target is not None and prompts is not None:
        notes = _notes(prompts, chosen)
        table = _bigrams(prompts, store, chosen, settings.vocab_size)
        measured = _generate(config, target, prompts, table, device, on_progress)
    return EvalResult(config=config, settings=settings, graded=graded, measured=measured, notes=tuple(notes))


def _check_store(config: EvalConfig, settings: DrafterConfig, store: HiddenStore) -> None:
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    if wrong := other_target(settings, AutoConfig.from_pretrained(store.root / HEAD)):
        raise DflashError(f"{config.drafter} is no drafter for the target of {store.root}:\n  " + "\n  ".join(wrong))
    if lacking := sorted(set(settings.target_layer_ids) - set(store.manifest.layer_ids)):
        raise DflashError(
            f"the store {store.root} lacks layer {', '.join(map(str, lacking))}, which the drafter sees; it holds "
            f"{', '.join(map(str, store.manifest.layer_ids))}: extract again with --layers"
        )
    if not store.committed.any():
        raise DflashError(f"the store {store.root} holds no sample yet: let `dflash extract` go on")


def _grade(config: EvalConfig, store: HiddenStore, chosen: Chosen, device: torch.device) -> Graded:
    model = load_drafter(config.drafter, device=device, dtype=torch.float32)
    settings = model.settings
    head = load_head(store.root / HEAD, device=device, dtype=compute_dtype("auto", device))
    layers, batch_tokens = settings.target_layer_ids, _BATCH_TOKENS[device.type]
    found = Validator(store, chosen.rows, head, layers=layers, gamma=None, batch_tokens=batch_tokens).run(model)
    sizes = {"block_size": settings.block_size, "vocab_size": settings.vocab_size}
    bigram = bigram_yield(store.samples, chosen.rest, chosen.rows, **sizes)
    return Graded(chosen=chosen, found=found, bigram=bigram, edges=store.manifest.edges)


def _prompts(
    config: EvalConfig, settings: DrafterConfig, target: TargetFolder, store: HiddenStore | None, chosen: Chosen | None
) -> Prompts:
    """Prompts prepared as the store was, if there is one: then those that were trained on are known, and left out."""
    room = config.max_new_tokens + settings.block_size
    longest = None if target.max_position is None else target.max_position - room
    if longest is not None and longest < 1:
        raise ConfigError(
            f"--max-new-tokens {config.max_new_tokens}: this target has positions for {target.max_position} tokens, a "
            f"block of {settings.block_size} included"
        )
    options: dict[str, Any] = {"template_args": config.template_args}
    if store is not None:
        manifest = store.manifest
        options = {
            "template_args": {**manifest.template_args, **config.template_args},
            "max_length": manifest.max_length,
            "overlength": manifest.overlength,
            "turns": manifest.turns,
        }
    trained = () if store is None or chosen is None else chosen.trained.tolist()
    return read_prompts(
        find_files(config.data),
        load_tokenizer(target.path if store is None else store.root / HEAD),
        PrepareOptions(vocab_size=target.vocab_size, mask_token_id=settings.mask_token_id, **options),
        limit=config.limit or DEFAULT_PROMPTS,
        longest=longest,
        trained={store.samples.sample_id(row)[:12] for row in trained} if store is not None else (),
    )


def _bigrams(
    prompts: Prompts, store: HiddenStore | None, chosen: Chosen | None, vocab_size: int
) -> NDArray[np.int64] | None:
    """A table learned from the store's other answers, or from those of the data that no prompt is from."""
    answers: Iterable[tuple[NDArray[Any], NDArray[Any]]] = prompts.others
    if store is not None and chosen is not None:
        answers = ((store.samples.tokens(row), store.samples.mask(row)) for row in chosen.rest.tolist())
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
