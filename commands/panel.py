"""What a running `extract` shows."""

from contextlib import AbstractContextManager

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_tool.commands.format import count, duration, facts, share, size, waits_text
from dflash_tool.commands.redraw import show_live
from dflash_tool.telemetry import ExtractSnapshot, ExtractTelemetry
from dflash_tool.wording import counted


def show_progress(telemetry: ExtractTelemetry, console: Console) -> AbstractContextManager[None]:
    """Draw an extraction while the body runs."""
    return show_live(lambda: extract_panel(telemetry.snapshot()), lambda: plain_line(telemetry.snapshot()), console)


def plain_line(now: ExtractSnapshot) -> str:
    """One line for a log: where the run is, how fast, how much padding, how full the window."""
    if now.stage != "extracting":
        of = f" {share(now.stage_done / now.stage_total, 0)}" if now.stage_total else ""
        return f"{now.stage}{of}"
    eta = f", {duration(now.eta_seconds)} to go" if now.eta_seconds is not None else ""
    return (
        f"{count(now.held_samples + now.samples)}/{counted(now.samples_total, 'sample')}, "
        f"{now.tokens_per_second:,.0f} tokens/s, padding {share(now.padding)}, "
        f"in flight {size(now.inflight_bytes)} of {size(now.inflight_limit)}, "
        f"{size(now.bytes_written)} in {counted(now.shards, 'shard')}{eta}"
    )


def extract_panel(now: ExtractSnapshot) -> RenderableType:
    """The panel of one snapshot."""
    if now.stage != "extracting":
        bar = ProgressBar(total=max(now.stage_total, 1), completed=now.stage_done, pulse=now.stage_total == 0)
        return Panel(Group(Text(now.stage), bar), title="dflash extract", title_align="left", border_style="cyan")
    done = now.held_tokens + now.real_tokens
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(
        ProgressBar(total=max(now.tokens_total, 1), completed=done),
        f"{share(done / max(now.tokens_total, 1), 0)} · "
        + (f"{duration(now.eta_seconds)} to go" if now.eta_seconds is not None else "…"),
    )
    queued = ", ".join(f"bucket {bucket}: {items}" for bucket, items in sorted(now.queued.items())) or "empty"
    body = facts(
        [
            ("samples", f"{count(now.held_samples + now.samples)} of {count(now.samples_total)}"),
            ("speed", f"{now.tokens_per_second:,.0f} tokens/s, padding {share(now.padding)}"),
            *_targets(now),
            ("written", f"{size(now.bytes_written)}, {counted(now.shards, 'shard')} committed"),
            (
                "in flight",
                f"{size(now.inflight_bytes)} of {size(now.inflight_limit)}, at most {size(now.peak_inflight)} so far",
            ),
            ("queue", queued),
            ("waited", waits_text(now.waited)),
        ]
    )
    return Panel(Group(head, body), title="dflash extract", title_align="left", border_style="cyan")


def _targets(now: ExtractSnapshot) -> list[tuple[str, str]]:
    """A line for each target, where there are several."""
    if len(now.targets) < 2 or now.seconds <= 0:
        return []
    return [("", f"{name}: {tokens / now.seconds:,.0f} tokens/s") for name, tokens in now.targets.items()]
