"""The stores a drafter is trained from: opened, checked against each other, joined. ConfigError names both values."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_tool.errors import ConfigError, StoreError
from dflash_tool.schemas.manifest import Manifest
from dflash_tool.schemas.train import TrainConfig
from dflash_tool.store.follow import check_written, wait_until_begun
from dflash_tool.store.joined import JoinedStore
from dflash_tool.store.reader import HiddenStore, most_open_files
from dflash_tool.wording import counted

# What numbers must have in common to train one drafter, and how to mend it. Data, template and lengths may differ.
_SHARED: dict[str, tuple[Callable[[Manifest], Any], str]] = {
    "target": (
        lambda manifest: (
            manifest.target.name,
            manifest.target.config_fingerprint,
            manifest.target.weights_fingerprint,
        ),
        "a drafter serves one target: train one for each",
    ),
    "tokenizer": (lambda manifest: manifest.tokenizer, "token ids mean other text: extract with one tokenizer"),
    "store dtype": (lambda manifest: manifest.store_dtype, "extract with one --store-dtype"),
    "convention of layer ids": (lambda manifest: manifest.layer_convention, "extract with one version"),
}


def open_stores(config: TrainConfig, *, unfinished: bool = False) -> JoinedStore:
    """Open `--store ...` with their weights. Raises ConfigError or StoreError for what doesn't fit together.

    unfinished: samples may be missing for good, since a live run makes them again and again.
    """
    weights = _weights(config)
    _refuse_twice(config.store)
    each_open = most_open_files() // len(config.store)
    for root in config.store if config.follow else ():
        wait_until_begun(root)
    stores = [HiddenStore.open(root, max_open=each_open) for root in config.store]
    for store in () if unfinished else stores:
        _check_whole(store, config)
    for one, other in pairwise(stores):
        for name, (value, remedy) in _SHARED.items():
            ours, theirs = value(one.manifest), value(other.manifest)
            if ours != theirs:
                raise ConfigError(
                    f"--store: {name} of {one.root} is {_text(ours)}, of {other.root} {_text(theirs)}; {remedy}"
                )
    return JoinedStore(stores, weights, seed=config.seed)


def _check_whole(store: HiddenStore, config: TrainConfig) -> None:
    """Every sample is there or quarantined, or with `--follow` will be, in the order in which training wants them."""
    committed, seed = int(store.committed.sum()), store.manifest.seed
    if not store.manifest.complete and not config.follow:
        raise StoreError(
            f"the store {store.root} is unfinished ({committed:,} of {counted(store.manifest.samples, 'sample')}): run "
            "the `dflash extract` that made it again to finish it, or train while that is running, with --follow"
        )
    if not store.manifest.complete and seed != config.seed:
        raise ConfigError(
            f"--seed: got {config.seed}, but {store.root} is being extracted in the order of seed {seed}: give --seed "
            f"{seed}, or train once it is complete, without --follow"
        )
    check_written(store)
    if store.manifest.complete and (lost := int((~store.committed & ~store.quarantined).sum())):
        raise StoreError(
            f"the store {store.root} has lost {lost:,} of its {counted(len(store.samples), 'sample')}: run the "
            "`dflash extract` that made it again; `dflash stats --verify` names what is missing"
        )


def choose_layers(config: TrainConfig, store: JoinedStore, *, option: str) -> tuple[int, ...]:
    """The aux layers: those that `option` gave, or all, if all stores hold the same. ConfigError if one is lacking."""
    first = store.stores[0]
    for other in store.stores[1:]:
        ours, theirs = first.manifest.layer_ids, other.manifest.layer_ids
        if config.aux_layers is None and ours != theirs:
            raise ConfigError(
                f"--aux-layers is needed: {first.root} holds layers {_text(ours)}, {other.root} {_text(theirs)}; "
                f"choose among those of both: {_text(sorted({*ours} & {*theirs})) or 'none'}"
            )
    layers = config.aux_layers or first.manifest.layer_ids
    for each in store.stores:
        if lacking := sorted(set(layers) - set(each.manifest.layer_ids)):
            raise ConfigError(
                f"{option}: the store {each.root} lacks layer {_text(lacking)} of {_text(layers)}; it holds "
                f"{_text(each.manifest.layer_ids)}"
            )
    return tuple(layers)


def _weights(config: TrainConfig) -> tuple[float, ...]:
    weights = config.weight or (1.0,) * len(config.store)
    if len(weights) != len(config.store):
        raise ConfigError(
            f"--weight: got {len(weights)} ({_text(weights)}) for {len(config.store)} stores "
            f"({_text(config.store)}); give one for each --store, in their order, or none"
        )
    if not any(weights):
        raise ConfigError(f"--weight: got {_text(weights)}, at least one must be above 0; leave out a store instead")
    return weights


def _refuse_twice(roots: tuple[Path, ...]) -> None:
    seen: dict[Path, Path] = {}
    for root in roots:
        before = seen.setdefault(root.resolve(), root)
        if before is not root:
            raise ConfigError(
                f"--store: {before} and {root} are the same store; to see its samples twice an epoch, give it once, "
                "with --weight 2"
            )


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
