"""`dflash stats`: what is in a store, and whether every byte of it is what was written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from dflash_tool.commands.format import Columns, bar, count, facts, share, size
from dflash_tool.commands.options import AsJson, Html
from dflash_tool.commands.report_tables import comparison_text, write_page
from dflash_tool.errors import StoreError
from dflash_tool.wording import counted

if TYPE_CHECKING:
    from dflash_tool.stats import StoreStats
    from dflash_tool.store.verify import Damage

_BAR_CELLS = 32


def stats(
    stores: Annotated[
        list[Path],
        typer.Argument(
            help="A store that `dflash extract` made or is making. Several are compared.",
            metavar="STORE",
            show_default=False,
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every byte again; exit 1 and name what is damaged.")
    ] = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a store: samples, tokens, bytes, layers, a table by bucket, the lengths.

    Example: dflash stats ./store --verify

    Example: dflash stats ./store --html store.html

    Example: dflash stats ./store ./other-store
    """
    from dflash_tool.report.compare import compare

    found = [_look(store, verify) for store in stores]
    known = [each.seen for each in found if each.seen is not None]
    comparison = compare(known) if len(known) == len(stores) > 1 else None
    if html is not None and known:
        from dflash_tool.report.store_page import look, store_page

        looks = [look(each.seen, each.damage) for each in found if each.seen is not None]
        write_page(html, store_page(looks, comparison))
    if as_json:
        documents = [_document(each) for each in found]
        whole = (
            documents[0] if len(stores) == 1 else {"stores": documents, **(comparison.as_json() if comparison else {})}
        )
        print(json.dumps(whole, indent=2))  # noqa: T201 - the one document on stdout
    elif html is not None and known:
        Console().print(f"Wrote {html}", soft_wrap=True, markup=False, highlight=False)
        _print_damage(found)
    elif comparison is not None:
        Console().print(comparison_text(comparison))
        _print_damage(found)
    else:
        for each in found:
            if each.seen is not None:
                Console().print(stats_text(each.seen))
        _print_damage(found)
    if any(each.damage for each in found):
        raise typer.Exit(1)


class _Found(NamedTuple):
    """What was found in a store: its numbers, unless it is too damaged; what is damaged, if that was asked."""

    store: Path
    seen: "StoreStats | None"
    damage: "list[Damage] | None"


def _look(store: Path, verify: bool) -> _Found:
    from dflash_tool.stats import store_stats

    damage = list(_verify(store, Console(stderr=True))) if verify else None
    try:
        return _Found(store, store_stats(store), damage)
    except StoreError:
        if not damage:  # too damaged to count: the list of damage says more than the first thing that fails
            raise
        return _Found(store, None, damage)


def _document(found: _Found) -> dict[str, Any]:
    document: dict[str, Any] = found.seen.as_json() if found.seen else {"store": str(found.store)}
    if found.damage is not None:
        document["damage"] = [_damage_json(each) for each in found.damage]
    return document


def _print_damage(found: list[_Found]) -> None:
    for each in found:
        if each.damage is not None:
            if len(found) > 1:
                Console().print(Text(str(each.store), style="bold"))
            Console().print(_damage_text(each.damage, each.seen.at_work if each.seen else None))


def _verify(store: Path, messages: Console) -> "Iterator[Damage]":
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dflash_tool.store.beside import verify_committed
    from dflash_tool.store.verify import bytes_to_verify

    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
        task = progress.add_task("verify", total=bytes_to_verify(store))
        yield from verify_committed(store, progress=lambda nbytes: progress.advance(task, nbytes))


def stats_text(seen: "StoreStats") -> RenderableType:
    """A store at a glance."""
    from dflash_tool.stats import target_padding

    manifest = seen.manifest
    target = manifest.target
    rows = [
        (
            "target",
            f"{target.name} ({target.model_type}, {counted(target.num_layers, 'layer')}, "
            f"hidden size {target.hidden_size})",
        ),
        (
            "layers",
            f"{', '.join(map(str, manifest.layers))}, computed in {target.dtype}, stored as {manifest.store_dtype}",
        ),
        (
            "samples",
            f"{count(seen.samples)} with {counted(seen.tokens, 'token')}, "
            f"{share(seen.supervised_tokens / max(seen.tokens, 1))} supervised",
        ),
        ("lengths", ", ".join(f"p{p} {count(value)}" for p, value in seen.percentiles.items()) or "none yet"),
        (
            "on disk",
            f"{size(seen.shard_bytes)} in {counted(seen.shards, 'shard')}, "
            f"{share(seen.overhead_bytes / max(seen.shard_bytes, 1), 2)} of it no real rows; "
            f"{size(seen.other_bytes)} beside them",
        ),
        (
            "padding",
            f"{share(target_padding(manifest), 2)} of the tokens the target computes (none is stored)",
        ),
    ]
    if manifest.run and manifest.run.seconds:
        rows.append(
            (
                "last run",
                f"{manifest.run.real_tokens / manifest.run.seconds:,.0f} tokens/s, in flight at most "
                f"{size(manifest.run.peak_inflight_bytes)} of {size(manifest.run.inflight_limit_bytes)}",
            )
        )
    skipped = ", ".join(f"{count(n)} {reason}" for reason, n in sorted(manifest.skipped.items()))
    if skipped:
        rows.append(("skipped", skipped))
    if manifest.quarantined:
        rows.append(("quarantined", f"{counted(len(manifest.quarantined), 'sample')} with NaN or Inf states"))
    return Group(
        Text.assemble((str(seen.store), "bold"), f"  {_state(seen)}"),
        facts(rows),
        "",
        _buckets(seen),
        "",
        *_histogram(seen),
    )


def _state(seen: "StoreStats") -> str:
    if seen.manifest.complete:
        return "complete" + (f"; at work on it is {seen.at_work}" if seen.at_work else "")
    so_far = f"{count(seen.samples)} of {counted(seen.manifest.samples, 'sample')}"
    return f"{so_far} so far, being written by {seen.at_work}" if seen.at_work else f"unfinished: {so_far}"


def _buckets(seen: "StoreStats") -> Columns:
    rows = [
        (
            str(b.bucket),
            f"{b.lower + 1}-{b.upper}",
            count(b.samples) if b.samples == b.planned else f"{count(b.samples)}/{count(b.planned)}",
            count(b.tokens),
            share(b.token_share),
            f"{share(b.padded_share)} lost",
            count(b.shards),
        )
        for b in seen.buckets
    ]
    return Columns(("bucket", "length", "samples", "tokens", "share", "if padded", "shards"), rows)


def _histogram(seen: "StoreStats") -> Iterator[Text]:
    if not seen.histogram:
        return
    most = max(samples for _, _, samples in seen.histogram)
    spans = [f"{first}-{last}" if last > first else str(first) for first, last, _ in seen.histogram]
    width = max(map(len, spans))
    yield Text("length, samples", style="dim")
    for span, (_, _, samples) in zip(spans, seen.histogram, strict=True):
        drawn = bar(samples / most, _BAR_CELLS)
        yield Text.assemble(f"{span:>{width}}  ", (drawn, "cyan"), f"{' ' if drawn else ''}{count(samples)}")


def _damage_text(damage: "list[Damage]", at_work: str | None) -> RenderableType:
    if not damage:
        text = "Verified: every byte is as it was written."
        if at_work:
            text = f"Verified: every committed byte is as it was written; {at_work}, goes on writing."
        return Text(text, style="green")
    lines = [Text(f"Damaged: {counted(len(damage), 'finding')}", style="bold red")]
    lines += [Text(f"  {found.kind}: {found.path}: {found.detail}") for found in damage]
    lines.append(Text("Run the `dflash extract` that made it again with --verify: it makes what is damaged anew."))
    return Group(*lines)


def _damage_json(found: "Damage") -> dict[str, Any]:
    return {
        "kind": found.kind,
        "path": str(found.path),
        "detail": found.detail,
        "shard": str(found.shard) if found.shard else None,
        "samples": [sample.hex() for sample in found.sample_ids],
    }
