"""What `dflash eval` prints: the store's grades, generation's figures, and what does not add up."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_tool.commands.format import bar, count, facts, share
from dflash_tool.drafter.acceptance import Yield
from dflash_tool.evaluate.measure import Measured, Spoken
from dflash_tool.pipeline import EvalResult, Graded

Int64s = NDArray[np.int64]
_BAR_CELLS = 24
_PARTINGS = 5


def eval_text(result: EvalResult) -> RenderableType:
    """Everything, for a terminal of 80 columns or more."""
    settings = result.settings
    layers = ", ".join(map(str, settings.target_layer_ids))
    parts: list[RenderableType] = [
        Text.assemble(
            (str(result.config.drafter), "bold"),
            f"  {settings.num_layers} layers, blocks of {settings.block_size}, sees layers {layers}",
        )
    ]
    if result.graded:
        parts += ["", *_graded(result.graded, str(result.config.store))]
    if result.measured:
        parts += ["", *_measured(result.measured, result.config.max_new_tokens, settings.block_size - 1)]
    parts += [Text(f"Note: {note}", style="yellow") for note in result.notes]
    parts += [Text(f"Wrong: {failure}", style="bold red") for failure in result.failures]
    return Group(*parts)


def _graded(graded: Graded, store: str) -> Iterator[RenderableType]:
    found = graded.found
    yield Text.assemble(
        ("From the store", "bold"), f" {store}: {count(len(graded.chosen.rows))} samples, {graded.chosen.words}"
    )
    yield facts(
        [
            ("walk tau", f"{found.walk_tau:.2f} tokens a target forward; {graded.bigram.tau:.2f} with a bigram table"),
            ("anchor tau", f"{found.anchor_tau:.2f}, the mean over every position of the answers"),
        ]
    )
    yield ""
    rows = []
    for bucket, (anchor, walk) in sorted(found.by_bucket.items()):
        lower = graded.edges[bucket - 1] + 1 if bucket else 1
        rows.append((f"{bucket}  ({lower}-{graded.edges[bucket]} tokens)", anchor, walk))
    yield _taus("bucket", rows)
    if len(found.by_source) > 1:
        yield ""
        yield _taus("source", [(Path(name).name, *pair) for name, pair in sorted(found.by_source.items())])
    yield ""
    yield _slots(found.right, found.reached, found.counted)


def _taus(name: str, rows: Sequence[tuple[str, Yield, Yield]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(name)
    for title in ("positions", "anchor tau", "walk tau"):
        table.add_column(title, justify="right", no_wrap=True)
    for label, anchor, walk in rows:
        table.add_row(label, count(anchor.forwards), f"{anchor.tau:.2f}", f"{walk.tau:.2f}")
    return table


def _slots(right: Int64s, reached: Int64s, counted: Int64s) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("slot", "right", "accepted"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for slot in range(len(right)):
        of = max(int(counted[slot]), 1)
        table.add_row(
            str(slot + 1), share(right[slot] / of), share(reached[slot] / of),
            Text(bar(reached[slot] / of, _BAR_CELLS), style="cyan"),
        )  # fmt: skip
    return table


def _measured(measured: Measured, max_new_tokens: int, slots: int) -> Iterator[RenderableType]:
    greedy = measured.greedy
    cut = f", {count(measured.cut)} cut at {count(max_new_tokens)}" if measured.cut else ""
    yield Text.assemble(
        ("In generation", "bold"), f": {count(measured.prompts)} prompts, {count(greedy.rate.tokens)} new tokens{cut}"
    )
    equal = measured.prompts - len(measured.partings)
    ties = sum(each.near_tie for each in measured.partings)
    lossless = f"{count(equal)} of {count(measured.prompts)} answers equal plain greedy's, token for token"
    if ties:
        lossless += f"; {count(ties)} part at a near-tie"
    rows = [
        ("tau", f"{greedy.yields.tau:.3f} in transformers' generation, {measured.ours.tau:.3f} in our own loop"),
        ("walk tau", f"{measured.walked.tau:.3f} over the same answers"),
    ]
    if measured.accepted:
        by_slot = " ".join(share(each, 0).replace(" ", "") for each in measured.accepted_by_slot(slots))
        rows.append(("by slot", f"{by_slot} accepted, in our own loop"))
    if measured.bigram is not None:
        rows.append(("yardstick", f"{measured.bigram.tau:.3f} with a bigram table on the same answers"))
    rows += [("tokens/s", _rates(greedy)), ("lossless", lossless), ("4-grams", _distinct(greedy))]
    yield facts(rows)
    for each in measured.partings[:_PARTINGS]:
        kind = "a near-tie" if each.near_tie else "no near-tie"
        yield Text(
            f"  {each.source}: token {each.position} is {each.plain} plain, {each.drafted} drafted; their logits are "
            f"{each.gap:.2g} apart, the largest is {each.largest:.3g}: {kind}"
        )
    if len(measured.partings) > _PARTINGS:
        yield Text(f"  and {len(measured.partings) - _PARTINGS} more (--json lists them)")
    if measured.sampled is not None:
        sampled = measured.sampled
        yield ""
        yield Text.assemble(
            ("Sampled", "bold"), f" at temperature {measured.temperature:g}: {count(sampled.rate.tokens)} new tokens"
        )
        yield facts(
            [
                ("tau", f"{sampled.yields.tau:.3f} in transformers' generation"),
                ("tokens/s", _rates(sampled)),
                ("4-grams", _distinct(sampled)),
            ]
        )


def _rates(spoken: Spoken) -> str:
    return (
        f"{spoken.rate.value:,.0f} with the drafter, {spoken.plain_rate.value:,.0f} without: "
        f"{spoken.speedup:.2f} times as fast"
    )


def _distinct(spoken: Spoken) -> str:
    return f"{share(spoken.distinct)} distinct in their answer: loops bring this down, and tau up"
