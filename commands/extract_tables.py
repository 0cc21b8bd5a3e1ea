"""What `dflash extract` prints at the end: the plan (`--dry-run`) or what became of it."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from dflash_tool.commands.format import Columns, count, duration, facts, share, size, waits_text
from dflash_tool.pipeline import ExtractResult
from dflash_tool.planning import BucketPlan, ExtractionPlan
from dflash_tool.schemas.manifest import Manifest, RunSummary
from dflash_tool.wording import counted, verb


def plan_text(plan: ExtractionPlan) -> RenderableType:
    """What would be done."""
    manifest, disk = plan.manifest, plan.disk
    rows = [
        ("target", _target(manifest)),
        ("samples", _samples(manifest)),
        *_data_notes(manifest),
        ("batches", f"{count(len(plan.batches))} of at most {counted(manifest.batch_tokens, 'token')}"),
        ("padding", f"{share(plan.padding, 2)} of the tokens the target computes"),
        (
            "disk",
            f"{size(disk.total)}: {size(disk.shards)} hidden states, {size(disk.samples)} samples, "
            f"{size(disk.head)} head and tokenizer, {size(disk.index)} index",
        ),
        (
            "in flight",
            f"at most {size(plan.peak_inflight_bytes)} of a window of {size(plan.resolved.inflight_limit)}; "
            f"the largest batch is {size(plan.largest_batch_bytes)}",
        ),
    ]
    return Group(
        Text("Dry run: nothing was written.", style="bold"),
        facts(rows),
        "",
        _bucket_table(plan.buckets, manifest.tokens),
        *_skipped(plan),
        *(Text(f"Note: {warning}", style="yellow") for warning in plan.warnings),
    )


def result_text(result: ExtractResult) -> RenderableType:
    """What was done, who waited for whom, and what to do next."""
    manifest, run = result.manifest, result.run
    where = Text(str(result.store), style="bold")
    if run is None:
        return Group(Text.assemble("Nothing to do: ", where, f" is complete (samples: {_samples(manifest)})."))
    there = result.held_samples
    held = f", {count(there)} {verb(there, 'was', 'were')} there already" if there else ""
    rows = [
        ("target", _target(manifest)),
        ("samples", _samples(manifest) + held),
        *_data_notes(manifest),
        *([("speed", _speed(run))] if run.seconds and run.padded_tokens else []),
        *([("targets", _rates(run))] if len(run.targets) > 1 else []),
        (
            "in flight",
            f"peak {size(run.peak_inflight_bytes)} of a window of {size(run.inflight_limit_bytes)}",
        ),
        ("waited", waits_text(run.waited)),
    ]
    if result.removed:
        rows.append(("cleaned up", f"{counted(len(result.removed), 'leftover')} of a run that was stopped"))
    if manifest.quarantined:
        rows.append(
            (
                "quarantined",
                f"{counted(len(manifest.quarantined), 'sample')} with NaN or Inf states: see manifest.json",
            )
        )
    return Group(
        Text.assemble("Complete: ", where),
        facts(rows),
        *_skipped(result.plan),
        *(Text(f"Note: {warning}", style="yellow") for warning in result.notes),
    )


def _speed(run: RunSummary) -> str:
    padding = share(1 - run.real_tokens / run.padded_tokens, 2)
    return f"{run.real_tokens / run.seconds:,.0f} tokens/s over {duration(run.seconds)}, padding {padding}"


def _rates(run: RunSummary) -> str:
    return ", ".join(f"{name} {tokens / run.seconds:,.0f} tokens/s" for name, tokens in run.targets.items())


def _target(manifest: Manifest) -> str:
    layers = ", ".join(map(str, manifest.layer_ids))
    target = manifest.target
    return (
        f"{target.name} ({target.model_type}, {counted(target.num_layers, 'layer')}, "
        f"hidden size {target.hidden_size}), "
        f"layers {layers} computed in {target.dtype}, stored as {manifest.store_dtype}"
    )


def _samples(manifest: Manifest) -> str:
    return (
        f"{count(manifest.samples)} with {counted(manifest.tokens, 'token')}, "
        f"{share(manifest.supervised_tokens / manifest.tokens)} supervised"
    )


def _data_notes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What was unusual about the data; nothing where nothing was."""
    prepared = manifest.prepared
    turns = prepared.get("unsupervised_turns", 0)
    notes = [
        (prepared.get("truncated", 0), "sample", f"cut to {counted(manifest.max_length, 'token')}"),
        (prepared.get("duplicates", 0), "duplicate", "(kept)"),
        (
            prepared.get("split_rows", 0),
            "conversation",
            f"split into {counted(prepared.get('split_parts', 0), 'sample')}, because the template renders earlier "
            "turns differently later on",
        ),
        (turns, "assistant turn", f"left unsupervised (the template renders {verb(turns, 'it', 'them')} otherwise)"),
        (sum(manifest.skipped.values()), "row", "skipped"),
    ]
    said = "; ".join(f"{counted(number, noun)} {what}" for number, noun, what in notes if number)
    if said:
        yield "data", said


def _bucket_table(buckets: Sequence[BucketPlan], tokens: int) -> Columns:
    rows = [
        (
            str(bucket.bucket),
            f"{bucket.lower + 1}-{bucket.upper}",
            count(bucket.samples),
            count(bucket.tokens),
            share(bucket.tokens / tokens),
            count(bucket.batches),
        )
        for bucket in buckets
    ]
    return Columns(("bucket", "tokens a sample", "samples", "tokens", "share", "batches"), rows)


def _skipped(plan: ExtractionPlan) -> Iterator[RenderableType]:
    """The reasons with their first example, when the data was read in this run."""
    if plan.prepared is None or not plan.prepared.skipped:
        return
    yield Text("Skipped rows", style="yellow")
    for line in plan.prepared.describe_skipped():
        yield Text(f"  {line}")
