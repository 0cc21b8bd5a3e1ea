"""Which samples of a store a drafter was not trained on, as far as its folder tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.loader import split_validation
from dflash_tool.store.joined import JoinedStore, joint_fingerprint
from dflash_tool.store.manifest import settings_fingerprint
from dflash_tool.store.reader import HiddenStore
from dflash_tool.trainer.record import held_out_rule

Int64s = NDArray[np.int64]
DEFAULT_SAMPLES = 512


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Samples of a store.

    rows: those to grade. rest: the others that are usable. trained: rows that it was trained on, as far as known.
    known: whether `rows` are held out. words: which samples `rows` are, for people.
    """

    store: HiddenStore
    rows: Int64s
    rest: Int64s
    trained: Int64s
    known: bool
    words: str


def choose_samples(drafter: Path, store: HiddenStore, limit: int | None = None) -> Chosen:
    """At most `limit` samples: the run's validation split if the folder tells it, otherwise a fair sample of the store.

    Both are chosen by a hash of the content, so the same limit gives the same samples again. A drafter that was trained
    on several stores tells it for each of them, as long as all are where the run found them.
    """
    limit = limit or DEFAULT_SAMPLES
    samples, committed = store.samples, store.committed
    rule = held_out_rule(drafter)
    found = None if rule is None else _trained_on(*rule, store)
    trained = np.empty(0, np.int64)
    if rule is not None and found is not None:
        trained, rows = _split(rule[0], *found, limit)
        if len(rows):
            words = "held out when it was trained"
            return Chosen(store=store, rows=rows, rest=trained, trained=trained, known=True, words=words)
    # The share just below 1 leaves the limit to decide.
    others, rows = split_validation(samples.ids, committed, seed=0, fraction=1 - 2**-20, at_most=limit)
    if found is not None:
        words = "NOT held out: its run trained on the whole store"
    elif rule is not None:
        words = "not known to be held out: it was trained on another store, or on several that are not all at hand"
    else:
        words = "not known to be held out: its folder doesn't tell what it was trained on"
    return Chosen(store=store, rows=rows, rest=others, trained=trained, known=False, words=words)


def _trained_on(config: Mapping[str, Any], fingerprint: str, store: HiddenStore) -> tuple[JoinedStore, int] | None:
    """The stores of a run, and the place of `store` among them; None if it isn't one, or another is gone or changed."""
    roots = [Path(root) for root in config.get("store", ())]
    weights = tuple(config.get("weight") or (1.0,) * max(1, len(roots)))
    stores = [store]  # alone it may have moved
    if len(weights) > 1:
        try:
            stores = [HiddenStore.open(root) for root in roots]
        except StoreError:
            return None
        ours = settings_fingerprint(store.manifest)
        stores = [store if settings_fingerprint(each.manifest) == ours else each for each in stores]
    if len(stores) != len(weights) or store not in stores:
        return None
    if joint_fingerprint([each.manifest for each in stores], weights) != fingerprint:
        return None
    return JoinedStore(stores, weights, seed=config.get("seed", 0)), stores.index(store)


def _split(config: Mapping[str, Any], joined: JoinedStore, place: int, limit: int) -> tuple[Int64s, Int64s]:
    """Committed rows of one store that its run trained on, and at most `limit` of those that it held out."""
    store, whole = joined.stores[place], joined.samples
    most = config.get("val_samples", 512)
    options = {"seed": config.get("seed", 0), "fraction": config.get("val_fraction", 0.01)}
    everything = np.ones(len(whole), np.bool_)  # as training: quarantined samples have their side too
    trained, held_out = split_validation(whole.ids, everything, at_most=most, **options)
    trained = np.unique(whole.row[trained[whole.store[trained] == place]])
    contents = {each[:12] for each in map(bytes, whole.ids[held_out])}
    _, rows = split_validation(store.samples.ids, store.committed, at_most=min(most, limit), **options)
    held_out_too = [store.samples.sample_id(row)[:12] in contents for row in rows.tolist()]
    return trained[store.committed[trained]], rows[np.array(held_out_too, np.bool_)]
