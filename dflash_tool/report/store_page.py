"""What is in a store, in pictures: `look` reads what the page needs, `store_page` draws it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import StoreError
from dflash_tool.report.charts import Series, bar_chart, histogram, line_chart
from dflash_tool.report.compare import Comparison
from dflash_tool.report.norms import LayerNorms, layer_norms
from dflash_tool.report.padding import MOST_BUCKETS, padding_by_buckets, padding_by_scheme
from dflash_tool.report.page import Chapter, Figure, Table, page
from dflash_tool.stats import StoreStats, target_padding
from dflash_tool.store.reader import HiddenStore
from dflash_tool.store.samples import Samples
from dflash_tool.store.verify import Damage
from dflash_tool.wording import count, counted, duration, share, short, size

_SHARD_BINS = 20


@dataclass(frozen=True, kw_only=True)
class StoreLook:
    """A store's numbers and what its page shows beside them.

    padding: (scheme, share); curve: share of padding by number of buckets, from 1; supervised: share by bucket; norms:
    by layer, over `read` samples; unread: why there are none. damage: None where nobody looked for it.
    """

    stats: StoreStats
    padding: Sequence[tuple[str, float]]
    curve: Sequence[float]
    supervised: Sequence[float]
    norms: Sequence[LayerNorms]
    read: int
    unread: str
    damage: Sequence[Damage] | None


def look(stats: StoreStats, damage: Sequence[Damage] | None = None) -> StoreLook:
    """Read what is missing for the page: lengths in the data's order, masks' counts, rows of a few samples."""
    samples = Samples.open(stats.store)
    lengths = samples.lengths.astype(np.int64)
    norms: list[LayerNorms] = []
    read, unread = 0, ""
    try:
        with HiddenStore.open(stats.store) as store:
            read, norms = layer_norms(store)
    except StoreError as error:
        unread = str(error)
    return StoreLook(
        stats=stats,
        padding=padding_by_scheme(lengths, stats.manifest.edges, target_padding(stats.manifest)),
        curve=padding_by_buckets(lengths),
        supervised=_supervised(samples, len(stats.manifest.edges)),
        norms=norms,
        read=read,
        unread=unread,
        damage=damage,
    )


def _supervised(samples: Samples, buckets: int) -> list[float]:
    """Share of supervised tokens in each bucket's prepared samples."""
    every, ours = (
        np.bincount(samples.buckets, weights=column, minlength=buckets)
        for column in (samples.lengths, samples.supervised)
    )
    shares: NDArray[np.float64] = ours / np.maximum(every, 1)
    return [float(value) for value in shares]


def store_page(looks: Sequence[StoreLook], comparison: Comparison | None = None) -> str:
    """The page of one store, or of several with what they have in common first."""
    chapters = [_compared(comparison)] if comparison else []
    for each in looks:
        chapters += _chapters(each, title=str(each.stats.store) if comparison else "At a glance")
    if comparison:
        return page("Stores compared", ", ".join(str(each.stats.store) for each in looks), chapters)
    seen = looks[0].stats
    return page(f"Store {seen.store}", _state(seen), chapters)


def _compared(comparison: Comparison) -> Chapter:
    rows = [(f"{fact.name}{' (differs)' * fact.differs}", *fact.values) for fact in comparison.facts]
    return Chapter(
        title="Side by side",
        text=f"{counted(comparison.common_samples, 'sample')} in all of them, by content.",
        tables=[("Facts", Table(("", *comparison.stores), rows, words=True))],
    )


def _state(seen: StoreStats) -> str:
    held = f"{count(seen.samples)} of {counted(seen.manifest.samples, 'sample')}"
    if seen.at_work:
        return f"{held} committed; being written by {seen.at_work}"
    return f"complete: {held}" if seen.manifest.complete else f"unfinished: {held} committed"


def _chapters(each: StoreLook, title: str) -> list[Chapter]:
    seen = each.stats
    return [
        Chapter(
            title=title,
            notes=_troubles(each),
            facts=_facts(each),
            figures=[
                *([_lengths(seen)] if seen.histogram else []),
                _by_bucket(seen),
                _padding(each),
                _curve(each),
                _supervised_figure(each),
                *([_layers(seen), _shards(seen)] if seen.shards else []),
                *([_norms(each)] if each.norms else []),
            ],
            tables=[("What the manifest says", _manifest(seen)), ("Samples left out", _left_out(each))],
        )
    ]


def _troubles(each: StoreLook) -> list[str]:
    seen, found = each.stats, []
    if each.damage:
        found.append(f"Damaged: {counted(len(each.damage), 'finding')}; the table below names them.")
    if seen.manifest.quarantined:
        found.append(f"Quarantined: {counted(len(seen.manifest.quarantined), 'sample')} with NaN or Inf states.")
    if each.unread:
        found.append(f"The hidden states could not be read: {each.unread}")
    return found


def _facts(each: StoreLook) -> list[tuple[str, str]]:
    seen, manifest = each.stats, each.stats.manifest
    target = manifest.target
    rows = [
        (
            "target",
            f"{target.name} ({target.model_type}, {target.num_layers} layers, hidden size {target.hidden_size})",
        ),
        ("layers", f"{', '.join(map(str, manifest.layers))}, stored as {manifest.store_dtype}"),
        ("samples", f"{count(seen.samples)} with {counted(seen.tokens, 'token')}"),
        ("supervised", share(seen.supervised_tokens / max(seen.tokens, 1))),
        (
            "on disk",
            f"{size(seen.shard_bytes)} in {counted(seen.shards, 'shard')}, {size(seen.other_bytes)} beside them",
        ),
        ("padding", f"{share(target_padding(manifest), 2)} of what the target computes; none is stored"),
        ("damage", _damage(each.damage)),
        ("quarantined", counted(len(manifest.quarantined), "sample")),
    ]
    run = manifest.run
    if run and run.seconds:
        rows.append(("last run", f"{run.real_tokens / run.seconds:,.0f} tokens/s over {duration(run.seconds)}"))
    return rows


def _damage(damage: Sequence[Damage] | None) -> str:
    if damage is None:
        return "not looked for (--verify hashes every byte)"
    return counted(len(damage), "finding") if damage else "none: every byte is as it was written"


def _lengths(seen: StoreStats) -> Figure:
    return Figure(
        title="Lengths",
        text="Committed samples by length, on a logarithmic scale; dashed lines are the buckets' upper edges.",
        picture=histogram(
            [(low, high + 1, samples) for low, high, samples in seen.histogram],
            label=f"Histogram of sample lengths in {counted(len(seen.histogram), 'bin')}, with bucket edges",
            x="tokens", y="samples", log=True, edges=seen.manifest.edges,
        ),
        table=Table(
            ("tokens", "samples"),
            [(f"{low}-{high}" if high > low else str(low), count(n)) for low, high, n in seen.histogram],
        ),
    )  # fmt: skip


def _name(seen: StoreStats, bucket: int) -> str:
    each = seen.buckets[bucket]
    return f"{bucket}: {each.lower + 1}-{each.upper}"


def _by_bucket(seen: StoreStats) -> Figure:
    samples = max(seen.samples, 1)
    return Figure(
        title="Buckets",
        text="Each bucket's share of the committed samples and of their tokens (bucket: lengths in tokens).",
        picture=bar_chart(
            [(_name(seen, b.bucket), (b.samples / samples, b.token_share)) for b in seen.buckets],
            names=("samples", "tokens"), label="Share of samples and of tokens by bucket", x="share", show=_percent,
        ),
        table=Table(
            ("bucket", "samples", "planned", "tokens", "shards", "share of samples", "share of tokens"),
            [
                (_name(seen, b.bucket), count(b.samples), count(b.planned), count(b.tokens), count(b.shards),
                 share(b.samples / samples), share(b.token_share))
                for b in seen.buckets
            ],
        ),
    )  # fmt: skip


def _padding(each: StoreLook) -> Figure:
    return Figure(
        title="Padding by scheme",
        text="Share of the tokens a target would compute that is padding, over all prepared samples. The plan sorts "
        "inside its buckets.",
        picture=bar_chart(
            [(name, (value,)) for name, value in each.padding],
            label="Share of padding by scheme", x="padding", show=_percent,
        ),
        table=Table(("scheme", "padding"), [(name, share(value, 2)) for name, value in each.padding]),
    )  # fmt: skip


def _curve(each: StoreLook) -> Figure:
    buckets = len(each.stats.manifest.edges)
    points = [(float(k), value) for k, value in enumerate(each.curve, 1)]
    return Figure(
        title="Would more buckets pay?",
        text=f"Padding with the best edges of K buckets, every sample padded to its edge; this store has {buckets}. "
        "Sorting inside a bucket, as the plan does, pads far less.",
        picture=line_chart(
            [Series("padding", points)], marks=[(buckets, f"this store: {buckets}")] if buckets <= MOST_BUCKETS else [],
            label=f"Share of padding by number of buckets, 1 to {MOST_BUCKETS}",
            x="buckets", y="padding", zero=True, show=_percent,
        ),
        table=Table(("buckets", "padding"), [(f"{k:.0f}", share(value, 2)) for k, value in points]),
    )  # fmt: skip


def _supervised_figure(each: StoreLook) -> Figure:
    rows = [(_name(each.stats, bucket), value) for bucket, value in enumerate(each.supervised)]
    return Figure(
        title="Supervised share",
        text="Share of the tokens that a drafter is trained to draft, by bucket, over all prepared samples.",
        picture=bar_chart(
            [(name, (value,)) for name, value in rows],
            label="Supervised share by bucket",
            x="supervised",
            show=_percent,
        ),
        table=Table(("bucket", "supervised"), [(name, share(value)) for name, value in rows]),
    )


def _layers(seen: StoreStats) -> Figure:
    rows = [(f"layer {layer}", nbytes) for layer, nbytes in seen.layer_bytes.items()]
    return Figure(
        title="Bytes by layer",
        text="What each layer's arrays take on the disk. A drafter that sees fewer layers reads fewer.",
        picture=bar_chart(
            [(name, (nbytes,)) for name, nbytes in rows], label="Bytes on disk by layer", x="bytes", show=size
        ),
        table=Table(("layer", "on disk", "bytes"), [(name, size(nbytes), count(nbytes)) for name, nbytes in rows]),
    )


def _shards(seen: StoreStats) -> Figure:
    counts, ends = np.histogram(seen.shard_sizes, min(_SHARD_BINS, max(1, seen.shards)))
    bins = [(float(low), float(high), int(n)) for low, high, n in zip(ends[:-1], ends[1:], counts, strict=True)]
    low, middle, high = np.percentile(seen.shard_sizes, (0, 50, 100))
    return Figure(
        title="Shard sizes",
        text=f"{counted(seen.shards, 'shard')}: {size(low)} to {size(high)}, half of them below {size(middle)}.",
        picture=histogram(bins, label="Histogram of shard sizes", x="size of a shard", y="shards", show=size),
        table=Table(("size", "shards"), [(f"{size(a)} to {size(b)}", count(n)) for a, b, n in bins if n]),
    )


def _norms(each: StoreLook) -> Figure:
    layers = tuple(str(norms.layer) for norms in each.norms)
    lines = {
        "largest |x|": [norms.largest for norms in each.norms],
        "norm of a row": [norms.norm for norms in each.norms],
        "top channel": [norms.channels[0][1] for norms in each.norms],
        "median channel": [norms.median for norms in each.norms],
    }
    return Figure(
        title="Hidden states by layer",
        text=f"From {counted(each.read, 'sample')} spread over the lengths: mean norm of a row, largest value, and the "
        "mean |x| of the channel where it is largest and of the median one. Far apart: outlier channels.",
        picture=line_chart(
            [Series(name, [(float(place), y) for place, y in enumerate(values)]) for name, values in lines.items()],
            label="Norms and largest values of hidden states by layer", x="layer", y="size", log=True, ticks=layers,
        ),
        table=Table(
            ("layer", "norm of a row", "largest |x|", "median channel", "largest channels: number (mean |x| / median)"),
            [
                (str(norms.layer), short(norms.norm), short(norms.largest), short(norms.median),
                 ", ".join(f"{channel} ({short(value / (norms.median or 1))}x)" for channel, value in norms.channels))
                for norms in each.norms
            ],
        ),
    )  # fmt: skip


def _manifest(seen: StoreStats) -> Table:
    plain = seen.manifest.model_dump(mode="json")
    rows = []
    for name, value in plain.items():
        if name == "quarantined":
            continue
        if isinstance(value, dict):
            rows += [(f"{name}.{inner}", str(held)) for inner, held in value.items()]
        elif name == "data":
            rows += [("data", f"{file['path']} ({size(file['bytes'])}, xxh3 {file['xxh3']})") for file in value]
        else:
            rows.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return Table(("setting", "value"), rows, words=True)


def _left_out(each: StoreLook) -> Table:
    manifest = each.stats.manifest
    rows = [("skipped rows of the data", reason, count(n)) for reason, n in sorted(manifest.skipped.items())]
    rows += [("quarantined (NaN or Inf)", sample, "") for sample in manifest.quarantined]
    rows += [(f"damaged: {found.kind}", str(found.path), found.detail) for found in each.damage or ()]
    return Table(("what", "which", ""), rows or [("none", "", "")], words=True)


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
