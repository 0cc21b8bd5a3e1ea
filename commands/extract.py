"""`dflash extract`: a file of chats -> a sharded hidden-state store."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dflash_tool.commands.options import load_config

_INPUT, _MODEL, _SHAPE, _RUN = "Input", "Target", "Batches and memory", "Run"


def extract(
    target: Annotated[
        str | None,
        typer.Option(help="Folder of the target LLM (config, safetensors, tokenizer).", rich_help_panel=_INPUT),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL file of chats or ready tokens; repeat for several.", rich_help_panel=_INPUT),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The store to write, or to go on with.", rich_help_panel=_INPUT)
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longest sample in tokens.  [default: 3072, or what the target allows]",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    overlength: Annotated[
        str | None,
        typer.Option(help="Longer samples: truncate or skip.  [default: truncate]", rich_help_panel=_INPUT),
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(
            help="Where a template renders earlier turns differently later on: a sample for each assistant turn, or "
            "for the last one.  [default: each]",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja file to use instead of the tokenizer's template.", rich_help_panel=_INPUT),
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        typer.Option(help="k=v for the template, such as enable_thinking=false; repeatable.", rich_help_panel=_INPUT),
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Stop at the first bad row instead of skipping it.", rich_help_panel=_INPUT),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Decoder layers to keep, 0-based, as in 1,9,17: the output of each.  [default: 5, spread]",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Compute in float32, bfloat16 or float16.  [default: auto: bfloat16 on CUDA, float32 on CPU]",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    store_dtype: Annotated[
        str | None,
        typer.Option(help="Store bfloat16, float16 or float32.  [default: bfloat16]", rich_help_panel=_MODEL),
    ] = None,
    target_device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...  [default: auto]", rich_help_panel=_MODEL)
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            help="Mask token for the drafter.  [default: the tokenizer's, or an unused row]",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option("--trust-remote-code", help="Run code that comes with the target.", rich_help_panel=_MODEL),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(
            help="How many length buckets, or their upper edges: 128,512,2048.  [default: 6]",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in one forward, padding included.  [default: 2048 on CPU, 32768 on CUDA]",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    inflight_gib: Annotated[
        float | None,
        typer.Option(
            help="Hidden states in flight, at most.  [default: a quarter of the free memory]",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    hs_queue_depth: Annotated[
        int | None,
        typer.Option(help="Batches of one bucket in flight, at most.  [default: 4]", rich_help_panel=_SHAPE),
    ] = None,
    shard_mib: Annotated[
        float | None, typer.Option(help="Commit a shard at this size.  [default: 1024]", rich_help_panel=_RUN)
    ] = None,
    commit_every: Annotated[
        float | None,
        typer.Option(help="... or after this many seconds.  [default: 120]", rich_help_panel=_RUN),
    ] = None,
    max_bad: Annotated[
        float | None,
        typer.Option(
            help="Stop when more than this share of samples has NaN or Inf states.  [default: 0.01]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify",
            help="Hash the shards that are there first; make damaged ones again.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Order of the samples.  [default: 0]", rich_help_panel=_RUN)] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with any of these settings; options win over it.", rich_help_panel=_RUN),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; write nothing.", rich_help_panel=_RUN)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON document on stdout; progress goes to stderr.", rich_help_panel=_RUN),
    ] = False,
) -> None:
    """Run the target over a file of chats and write its hidden states to a sharded store.

    Safe to stop and to kill: the same command goes on where it was.

    Example: dflash extract --target ./Qwen3-8B --data chats.jsonl --out ./store
    """
    flags: dict[str, Any] = dict(locals())
    for name in ("config", "dry_run", "as_json", "template_arg"):
        flags.pop(name)
    from dflash_tool.prompts import parse_template_args
    from dflash_tool.schemas.config import ExtractConfig

    flags["template_args"] = parse_template_args(template_arg or [])
    resolved = load_config(ExtractConfig, config, flags)

    from dflash_tool import pipeline
    from dflash_tool.commands.extract_tables import plan_text, result_text
    from dflash_tool.commands.panel import show_progress
    from dflash_tool.telemetry import ExtractTelemetry

    console, messages = Console(), Console(stderr=True)
    telemetry = ExtractTelemetry()
    with show_progress(telemetry, messages):
        outcome = pipeline.plan(resolved, telemetry) if dry_run else pipeline.extract(resolved, telemetry)
    if as_json:
        print(json.dumps(outcome.as_json(), indent=2))  # noqa: T201 - the one document on stdout
    elif isinstance(outcome, pipeline.ExtractResult):
        console.print(result_text(outcome))
    else:
        console.print(plan_text(outcome))
