"""`dflash eval`: whether a drafter speeds its target up, and by how much."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dflash_tool.commands.options import load_config, option

if TYPE_CHECKING:
    from dflash_tool.evaluate.measure import Progress as OnProgress

_WHAT, _HOW = "What", "How"


def eval_(
    drafter: Annotated[
        Path | None, option(_WHAT, "The drafter: a checkpoint, an export, or another's folder.", metavar="DIR")
    ] = None,
    store: Annotated[
        Path | None, option(_WHAT, "Grade it on a store's samples; no target needed.", metavar="STORE")
    ] = None,
    target: Annotated[str | None, option(_WHAT, "Generate with this target ...", metavar="FOLDER|NAME")] = None,
    data: Annotated[
        list[Path] | None,
        option(
            _WHAT, "... from the prompts in such a file, of any kind that extract takes; repeatable.", metavar="FILE"
        ),
    ] = None,
    limit: Annotated[
        int | None, option(_HOW, "At most so many.", "50 prompts, 512 samples of the store", metavar="N")
    ] = None,
    max_new_tokens: Annotated[int | None, option(_HOW, "Of one answer.", "256", metavar="N")] = None,
    temperature: Annotated[
        float | None, option(_HOW, "Above 0: sampled answers too, beside the greedy ones.", "0", metavar="T")
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        option(_HOW, "For the chat template, such as enable_thinking=false; repeatable.", "the store's", metavar="K=V"),
    ] = None,
    as_json: Annotated[
        bool, option(_HOW, "One JSON document on stdout; messages go to stderr.", flag="--json")
    ] = False,
) -> None:
    """Measure a drafter: tokens a target forward yields (tau), and the speed-up.

    With --store: anchor tau and walk tau over held-out samples, by bucket, slot
    and source, in seconds. Of a checkpoint, or an export of one, it knows which
    samples were held out; of another drafter it says which samples it took.

    With --target and --data: transformers' own DFlash generation and plain
    greedy decoding in turn, on the same prompts: tau, tokens a second, and
    whether the answers are equal, token for token. With --store too, prompts
    that the drafter was trained on are left out.

    Tau is measured in three ways that must agree: in generation, by a decoding
    loop of our own, and by walking the answers as training validates. It exits
    with 1 if two are more than 3 % apart, or if an answer is not the target's.

    Example: dflash eval --drafter ./run/checkpoints/best --store ./store

    Example: dflash eval --drafter ./out --target ./Qwen3-8B --data chats.jsonl
    """
    flags: dict[str, Any] = dict(locals())
    for name in ("as_json", "template_arg"):
        flags.pop(name)
    from dflash_tool.prompts import parse_template_args
    from dflash_tool.schemas.evaluate import EvalConfig

    flags["template_args"] = parse_template_args(template_arg or [])
    config = load_config(EvalConfig, None, flags)

    from dflash_tool import pipeline
    from dflash_tool.commands.eval_tables import eval_text

    with _progress(Console(stderr=True)) as on_progress:
        result = pipeline.evaluate(config, on_progress)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))  # noqa: T201 - the one document on stdout
    else:
        Console().print(eval_text(result))
    if result.failures:
        raise typer.Exit(1)


@contextmanager
def _progress(console: Console) -> Iterator["OnProgress"]:
    """A bar of prompts on a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), "prompts", TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("prompts", total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)
