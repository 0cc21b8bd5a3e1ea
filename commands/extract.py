"""`dflash extract`: a file of chats -> a sharded hidden-state store."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from dflash_tool.commands.options import load_config, option

_INPUT, _TARGET, _SHAPE, _SHARDS, _RUN = "Input", "Target", "Batches and memory", "Shards", "Run"


def extract(
    target: Annotated[
        str | None, option(_INPUT, "The target LLM: a folder, or a name on the hub.", metavar="FOLDER|NAME")
    ] = None,
    data: Annotated[
        list[Path] | None,
        option(
            _INPUT,
            "JSON lines, a JSON array (both may be gzipped) or Parquet; a file or a quoted pattern; repeatable.",
            metavar="FILE",
        ),
    ] = None,
    out: Annotated[Path | None, option(_INPUT, "The store to write, or to go on with.", metavar="STORE")] = None,
    max_length: Annotated[
        int | None, option(_INPUT, "Longest sample in tokens.", "3072, or what the target allows", metavar="N")
    ] = None,
    overlength: Annotated[
        Literal["truncate", "skip"] | None, option(_INPUT, "What to do with longer samples.", "truncate")
    ] = None,
    turns: Annotated[
        Literal["each", "last"] | None,
        option(
            _INPUT,
            "Where the template renders earlier turns differently later on (Qwen3 drops their thinking): a sample for "
            "each assistant turn, or for the last one.",
            "each",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, option(_INPUT, "Jinja file to use instead of the tokenizer's template.", metavar="FILE")
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        option(_INPUT, "For the template, such as enable_thinking=false; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    strict: Annotated[
        bool | None, option(_INPUT, "Stop at the first bad row instead of skipping it.", flag="--strict")
    ] = None,
    layers: Annotated[
        str | None,
        option(
            _TARGET,
            "Decoder layers to store the output of, 0-based.",
            "5, spread over the target",
            metavar="1,9,17,...",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        option(
            _TARGET,
            "Compute in float32, bfloat16 or float16.",
            "auto: bfloat16 on CUDA, float32 on CPU",
            metavar="TYPE",
        ),
    ] = None,
    store_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        option(_TARGET, "Store bfloat16, float16 or float32.", "bfloat16", metavar="TYPE"),
    ] = None,
    final_hidden: Annotated[
        bool | None,
        option(_TARGET, "Store the last layer's output before the final norm as well.", flag="--final-hidden"),
    ] = None,
    target_device: Annotated[
        list[str] | None,
        option(_TARGET, "cpu, cuda, cuda:1, ...; repeatable.", "the first CUDA device, or the CPU", metavar="DEVICE"),
    ] = None,
    targets: Annotated[int | None, option(_TARGET, "Replicas on each device.", "1", metavar="N")] = None,
    mask_token_id: Annotated[
        int | None,
        option(_TARGET, "Mask token for the drafter.", "the tokenizer's, or an unused embedding row", metavar="ID"),
    ] = None,
    trust_remote_code: Annotated[
        bool | None, option(_TARGET, "Run code that comes with the target.", flag="--trust-remote-code")
    ] = None,
    buckets: Annotated[
        str | None,
        option(_SHAPE, "How many length buckets, or their upper edges, as in 128,512,2048.", "6", metavar="K|EDGES"),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        option(_SHAPE, "Tokens in one forward, padding included.", "2048 on CPU, 32768 on CUDA", metavar="N"),
    ] = None,
    inflight_gib: Annotated[
        float | None,
        option(_SHAPE, "Hidden states in flight, at most.", "a quarter of the free memory", metavar="GIB"),
    ] = None,
    hs_queue_depth: Annotated[
        int | None, option(_SHAPE, "Batches of one bucket in flight, at most.", "targets + 3", metavar="N")
    ] = None,
    shard_mib: Annotated[
        float | None, option(_SHARDS, "Commit a shard at this size ...", "1024", metavar="MIB")
    ] = None,
    commit_every: Annotated[
        float | None, option(_SHARDS, "... or at this age, whichever is first.", "120", metavar="SECONDS")
    ] = None,
    max_bad: Annotated[
        float | None,
        option(_SHARDS, "Stop when more than this share of samples has NaN or Inf states.", "0.01", metavar="SHARE"),
    ] = None,
    verify: Annotated[
        bool | None,
        option(_SHARDS, "Hash the shards that are there first; make damaged ones again.", flag="--verify"),
    ] = None,
    seed: Annotated[int | None, option(_RUN, "Decides the order of the samples.", "0", metavar="N")] = None,
    config: Annotated[
        Path | None, option(_RUN, "YAML file with any of these settings; options win over it.", metavar="FILE")
    ] = None,
    dry_run: Annotated[bool, option(_RUN, "Say what would be done; write nothing.", flag="--dry-run")] = False,
    as_json: Annotated[
        bool, option(_RUN, "One JSON document on stdout; messages go to stderr.", flag="--json")
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

    telemetry = ExtractTelemetry()
    speaks = os.environ.get("RANK", "0") == "0"  # under torchrun one rank speaks for all
    with show_progress(telemetry, Console(stderr=True, quiet=not speaks)):
        outcome = pipeline.plan(resolved, telemetry) if dry_run else pipeline.extract(resolved, telemetry)
    if not speaks:
        return
    if as_json:
        print(json.dumps(outcome.as_json(), indent=2))  # noqa: T201 - the one document on stdout
    elif isinstance(outcome, pipeline.ExtractResult):
        Console().print(result_text(outcome))
        Console().print(f"Look at it: dflash stats {outcome.store}", soft_wrap=True, markup=False, highlight=False)
    else:
        Console().print(plan_text(outcome))
