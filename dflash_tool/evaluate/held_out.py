"""Which samples of a store a drafter was not trained on, as far as its folder tells."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_tool.loader import split_validation
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

    Both are chosen by a hash of the content, so the same limit gives the same samples again.
    """
    limit = limit or DEFAULT_SAMPLES
    samples, committed = store.samples, store.committed
    rule = held_out_rule(drafter)
    same = rule is not None and rule[1] == settings_fingerprint(store.manifest)
    if rule is not None and same:
        config = rule[0]
        options = {"seed": config.get("seed", 0), "fraction": config.get("val_fraction", 0.01)}
        most = config.get("val_samples", 512)
        trained, held_out = split_validation(samples.ids, committed, at_most=most, **options)
        if len(held_out):
            _, rows = split_validation(samples.ids, committed, at_most=min(most, limit), **options)
            words = "held out when it was trained"
            return Chosen(store=store, rows=rows, rest=trained, trained=trained, known=True, words=words)
    # The share just below 1 leaves the limit to decide.
    others, rows = split_validation(samples.ids, committed, seed=0, fraction=1 - 2**-20, at_most=limit)
    nothing = np.empty(0, np.int64)
    if same:
        words, trained = "NOT held out: its run trained on the whole store", np.flatnonzero(committed)
    elif rule is not None:
        words, trained = "not known to be held out: it was trained on another store", nothing
    else:
        words, trained = "not known to be held out: its folder doesn't tell what it was trained on", nothing
    return Chosen(store=store, rows=rows, rest=others, trained=trained, known=False, words=words)
