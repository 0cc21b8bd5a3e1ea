"""What `dflash train` shows while it runs and prints at its end."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_tool.commands.format import count, duration, facts, share, size, spark
from dflash_tool.commands.redraw import show_live
from dflash_tool.pipeline import TrainResult
from dflash_tool.telemetry import TrainSnapshot, TrainTelemetry


def show_training(telemetry: TrainTelemetry, console: Console) -> AbstractContextManager[None]:
    """Draw a training run while the body runs."""
    return show_live(lambda: train_panel(telemetry.snapshot()), lambda: plain_line(telemetry.snapshot()), console)


def plain_line(now: TrainSnapshot) -> str:
    """One line for a log."""
    if now.loss is None:
        return now.stage
    tau = f", walk tau {now.taus[-1][1]:.2f}" if now.taus else ""
    eta = f", {duration(now.eta_seconds)} to go" if now.eta_seconds is not None else ""
    return (
        f"step {count(now.step)}/{count(now.total_steps)}, loss {now.loss:.3f}{tau}, "
        f"{count(now.blocks)} blocks/s, waited {share(now.waited / max(now.seconds, 1e-9))} for data{eta}"
        + (f"; {now.trouble}" if now.trouble else "")
    )


def train_panel(now: TrainSnapshot) -> RenderableType:
    """The panel of one snapshot."""
    if now.total_steps == 0:
        return Panel(Text(now.stage), title="dflash train", title_align="left", border_style="cyan")
    title = f"dflash train · {now.stage}"
    return Panel(Group(train_bar(now), facts(train_rows(now))), title=title, title_align="left", border_style="cyan")


def train_bar(now: TrainSnapshot) -> RenderableType:
    """How far it is."""
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    to_go = f"{duration(now.eta_seconds)} to go" if now.eta_seconds is not None else "…"
    steps = f"{count(now.step)}/{count(now.total_steps)}"
    head.add_row(ProgressBar(total=max(now.total_steps, 1), completed=now.step), f"{steps} · {to_go}")
    return head


def train_rows(now: TrainSnapshot) -> list[tuple[str, str]]:
    """What a panel says of the drafters' side."""
    spent = sum(now.spent.values()) or 1.0
    rows = [
        ("loss", spark([value for _, value in now.losses]) + (f" {now.loss:.3f}" if now.loss is not None else "")),
        ("walk tau", spark([value for _, value in now.taus]) + (f" {now.taus[-1][1]:.2f}" if now.taus else "")),
        ("step mix", ", ".join(f"b{bucket} {samples}" for bucket, samples in sorted(now.buckets.items())) or "…"),
        ("rate", f"{count(now.tokens)} context tokens/s, {count(now.blocks)} blocks/s, lr {now.lr:.2e}"),
        (
            "time",
            ", ".join(
                f"{name} {share(seconds / spent, 0)}" for name, seconds in now.spent.items() if seconds >= 0.005 * spent
            )
            or "…",
        ),
        ("waited", f"{duration(now.waited)} for data ({share(now.waited / max(now.seconds, 1e-9))})"),
    ]
    if now.trouble:
        rows.append(("trouble", now.trouble))
    return rows


def train_text(result: TrainResult) -> RenderableType:
    """What came of it: walk tau before and after, beside what a bigram table yields."""
    before = f"{result.first['walk_tau']:.2f} before, " if result.first else ""
    last = result.last
    rows = [
        ("steps", f"{count(result.steps)} taken, {count(result.total_steps)} in all, in {duration(result.seconds)}"),
        *_drafters(result),
        ("waited", f"{duration(result.waited)} for data ({share(result.waited / max(result.seconds, 1e-9))})"),
    ]
    if result.bottleneck:
        rows.append(("held up by", result.bottleneck))
    if result.memory_bytes:
        rows.append(("memory", f"at most {size(result.memory_bytes)}"))
    if last:
        best = f", best {result.best_walk_tau:.2f}" if result.best_walk_tau is not None else ""
        rows += [
            ("walk tau", f"{before}{last['walk_tau']:.2f} after{best} (tokens a target forward, held-out answers)"),
            ("yardstick", f"{result.bigram_tau:.2f} with a bigram table of the training answers"),
            ("anchor tau", f"{last['anchor_tau']:.2f} over every valid anchor"),
            ("by slot", " ".join(share(value, 0).replace(" ", "") for value in last["accuracy_by_slot"])),
        ]
    return Group(
        Text.assemble("Trained: ", (str(result.drafter), "bold")),
        facts(rows),
        *_notes(result.notes),
    )


def _drafters(result: TrainResult) -> Iterator[tuple[str, str]]:
    """Where there are several, how many, and what they waited for each other."""
    if result.drafters > 1:
        ranks = f" on {result.ranks} ranks" if result.ranks > 1 else ""
        others = result.spent.get("drafters", 0.0), result.spent.get("ranks", 0.0)
        yield (
            "drafters",
            f"{result.drafters}{ranks}; each waited {duration(others[0])} for those beside it"
            + (f", {duration(others[1])} for other ranks" if ranks else ""),
        )


def _notes(notes: Sequence[str]) -> Iterator[Text]:
    for note in notes:
        yield Text(f"Note: {note}", style="yellow")
