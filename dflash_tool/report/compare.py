"""Stores side by side: a row a fact, a column a store, and which facts differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from dflash_tool.stats import StoreStats, target_padding
from dflash_tool.store.samples import Samples
from dflash_tool.wording import count, share, size


@dataclass(frozen=True)
class Fact:
    """One fact of each store, as text."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the stores don't all say the same."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class Comparison:
    """Several stores. common_samples: prepared samples (by id) that all of them have."""

    stores: tuple[str, ...]
    facts: tuple[Fact, ...]
    common_samples: int

    def as_json(self) -> dict[str, Any]:
        """What goes beside the stores' own documents."""
        return {
            "common_samples": self.common_samples,
            "facts": [{"name": each.name, "values": each.values, "differs": each.differs} for each in self.facts],
        }


def compare(stores: Sequence[StoreStats]) -> Comparison:
    """Facts and common samples of two stores or more. Raises StoreError for samples that can't be read."""
    columns = [_facts(each) for each in stores]
    names = list(dict.fromkeys(name for column in columns for name in column))
    facts = [Fact(name, tuple(column.get(name, "") for column in columns)) for name in names]
    return Comparison(tuple(str(each.store) for each in stores), tuple(facts), _common(stores))


def _common(stores: Sequence[StoreStats]) -> int:
    first, *others = (Samples.open(each.store).sample_ids.combine_chunks() for each in stores)
    for other in others:
        first = first.filter(pc.is_in(first, value_set=other))
    return len(first)


def _facts(seen: StoreStats) -> dict[str, str]:
    manifest = seen.manifest
    target, run = manifest.target, manifest.run
    return {
        "state": "complete" if manifest.complete else "unfinished",
        "target": target.name,
        "target's weights": target.weights_fingerprint[:12],
        "layers": ", ".join(map(str, manifest.layers)),
        "hidden size": str(target.hidden_size),
        "computed in": target.dtype,
        "stored as": manifest.store_dtype,
        "tokenizer": manifest.tokenizer[:12],
        "chat template": manifest.template[:12],
        "template arguments": ", ".join(f"{name}={value}" for name, value in manifest.template_args.items()) or "none",
        "mask token": str(manifest.mask_token_id),
        "longest allowed": count(manifest.max_length),
        "seed": str(manifest.seed),
        "data": ", ".join(file.path for file in manifest.data) or "none",
        "samples": count(seen.samples),
        "samples planned": count(manifest.samples),
        "tokens": count(seen.tokens),
        "supervised": share(seen.supervised_tokens / max(seen.tokens, 1)),
        **{f"length p{p}": count(length) for p, length in seen.percentiles.items()},
        "bucket edges": ", ".join(map(str, manifest.edges)),
        "padding": share(target_padding(manifest), 2),
        "shards": count(seen.shards),
        "under shards/": size(seen.shard_bytes),
        "beside them": size(seen.other_bytes),
        "skipped rows": count(sum(manifest.skipped.values())),
        "quarantined": count(len(manifest.quarantined)),
        **({"tokens/s of the last run": f"{run.real_tokens / run.seconds:,.0f}"} if run and run.seconds else {}),
    }
