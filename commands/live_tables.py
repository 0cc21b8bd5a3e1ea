"""What `dflash live` shows while it runs and prints at its end."""

from contextlib import AbstractContextManager
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from dflash_tool.commands.format import count, duration, facts, share, size, waits_text
from dflash_tool.commands.panel import extract_panel
from dflash_tool.commands.panel import plain_line as extract_line
from dflash_tool.commands.redraw import show_live
from dflash_tool.commands.train_tables import plain_line as train_line
from dflash_tool.commands.train_tables import train_bar, train_rows, train_text
from dflash_tool.pipeline import Flow, LivePlan, LiveResult, LiveTelemetry


def show_run(telemetry: LiveTelemetry, console: Console) -> AbstractContextManager[None]:
    """Draw a live run while the body runs."""
    return show_live(lambda: live_panel(telemetry), lambda: plain_line(telemetry), console)


def plain_line(telemetry: LiveTelemetry) -> str:
    """One line for a log."""
    flow = telemetry.flow()
    if flow is None:
        return extract_line(telemetry.extract.snapshot())
    now = telemetry.train.snapshot()
    rate = flow.tokens / max(now.seconds, 1e-9)
    return (
        f"{train_line(now)}; targets {rate:,.0f} tokens/s, idle {share(flow.idle)}, "
        f"in flight {size(flow.inflight)} of {size(flow.limit)}"
    )


def live_panel(telemetry: LiveTelemetry) -> RenderableType:
    """The panel of a moment: the extraction's while the held-out samples are captured, then both sides."""
    flow = telemetry.flow()
    if flow is None:
        return extract_panel(telemetry.extract.snapshot())
    now = telemetry.train.snapshot()
    return Panel(
        Group(
            train_bar(now), facts([*train_rows(now), ("devices", telemetry.devices), *_flow_rows(flow, now.seconds)])
        ),
        title=f"dflash live · {now.stage}",
        title_align="left",
        border_style="cyan",
    )


def _flow_rows(flow: Flow, seconds: float) -> list[tuple[str, str]]:
    targets = [
        (
            name,
            f"{target.tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            f"waited {duration(target.waiting)} ({share(target.idle)})",
        )
        for name, target in flow.targets.items()
    ]
    queued = ", ".join(f"bucket {bucket}: {items}" for bucket, items in sorted(flow.queued.items())) or "empty"
    waited = {"memory": flow.for_memory, "places": flow.for_places, "drafters to finish a step": flow.for_steps}
    return [
        *targets,
        ("in flight", f"{size(flow.inflight)} of {size(flow.limit)}, at most {size(flow.peak)}"),
        ("queue", queued),
        ("dispatch waited", f"for {waits_text(waited)}"),
    ]


def live_text(result: LiveResult) -> RenderableType:
    """What came of it, and who waited for whom."""
    parts: list[RenderableType] = [train_text(replace(result.trained, bottleneck=""))]
    if result.flow is not None:
        parts.append(facts([("devices", result.devices), *_flow_rows(result.flow, result.trained.seconds)]))
        parts.append(Text(f"{result.bottleneck[:1].upper()}{result.bottleneck[1:]}."))
    if result.quarantined:
        named = ", ".join(result.quarantined[:3])
        parts.append(
            Text(
                f"Note: {count(len(result.quarantined))} samples with NaN or Inf states were left out: {named}",
                "yellow",
            )
        )
    return Group(*parts)


def plan_text(plan: LivePlan) -> RenderableType:
    """What would be done."""
    figures, stored = plan.figures, plan.extraction
    rows = [
        ("devices", plan.devices),
        ("samples", f"{count(plan.training)} to train on, {count(plan.held_out)} held out"),
        (
            "steps",
            f"{count(plan.total_steps)}, {count(figures.steps)} an epoch of {figures.batches_a_step:.1f} batches each",
        ),
        ("padding", f"{share(figures.padding, 2)} of the tokens the targets compute"),
        ("step ends", f"drafters lose {share(figures.lost, 1)} of their time there, waiting for each other"),
        (
            "in flight",
            f"a window of {size(figures.limit)}, {plan.places} places a bucket; the largest batch is at most "
            f"{size(figures.largest)}, {size(figures.wanted)} keep everybody busy",
        ),
        ("disk", f"{size(stored.disk.total)} at the start: held-out samples, prepared samples, head"),
    ]
    return Group(
        Text("Dry run: nothing was written.", style="bold"),
        facts(rows),
        *(Text(f"Note: {warning}", style="yellow") for warning in plan.warnings),
    )
