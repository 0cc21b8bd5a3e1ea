"""`dflash live`: a file of chats -> a drafter, the target beside it; nothing is stored but what is held out."""

import inspect
import json
import os
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from dflash_tool.commands.extract import extract
from dflash_tool.commands.options import load_config, option
from dflash_tool.commands.train import train

# Options of `train` that are about stores to read.
_OF_A_STORE = {"store", "weight", "follow", "loader_threads", "verify_reads"}
_PANELS = ["Input", "Target", "Drafter", "Loss", "Optimizer steps", "Batches and memory", "Shards", "Run"]
_PLACES = {"tee": -1, "config": 1, "dry_run": 2, "as_json": 3}  # in a panel; 0 is where the others stand


def live(**given: Any) -> None:
    """Train a DFlash drafter beside its target: hidden states go to it directly, and none are stored.

    The same steps as `extract` and `train` with these options. Safe to stop and to kill: the same command goes on from
    its newest checkpoint. The drafter that engines load is RUN/checkpoints/best.

    Example: dflash live --target ./Qwen3-8B --data chats.jsonl --out ./run
    """
    flags = dict(given)
    file, dry_run, as_json, template_arg = (
        flags.pop(name) for name in ("config", "dry_run", "as_json", "template_arg")
    )
    from dflash_tool.prompts import parse_template_args
    from dflash_tool.schemas.live import LiveConfig

    flags["template_args"] = parse_template_args(template_arg or [])
    flags["compile"] = flags.pop("compile_")
    resolved = load_config(LiveConfig, file, flags)

    from dflash_tool import pipeline
    from dflash_tool.commands.live_tables import live_text, plan_text, show_run

    telemetry = pipeline.LiveTelemetry()
    speaks = os.environ.get("RANK", "0") == "0"  # under torchrun one rank speaks for all
    with show_run(telemetry, Console(stderr=True, quiet=not speaks)):
        outcome = pipeline.plan_live(resolved, telemetry.extract) if dry_run else pipeline.live(resolved, telemetry)
    if not speaks:
        return
    if as_json:
        print(json.dumps(outcome.as_json(), indent=2))  # noqa: T201 - the one document on stdout
    elif isinstance(outcome, pipeline.LiveResult):
        Console().print(live_text(outcome))
    else:
        Console().print(plan_text(outcome))


def _own(
    out: Annotated[Path | None, option("Input", "The run's folder: new, or one to go on with.", metavar="RUN")] = None,
    tee: Annotated[
        Path | None,
        option(
            "Shards", "A store for what passes, too: `dflash train --store` can use it afterwards.", metavar="STORE"
        ),
    ] = None,
    layers: Annotated[
        str | None,
        option(
            "Target",
            "Decoder layers to capture the output of, 0-based.",
            "those of --aux-layers, or 5, spread over the target",
            metavar="1,9,17,...",
        ),
    ] = None,
    aux_layers: Annotated[
        str | None, option("Drafter", "Captured layers that it sees.", "all of them", metavar="1,9,17,...")
    ] = None,
    microbatch_tokens: Annotated[
        int | None,
        option(
            "Optimizer steps",
            "Context tokens of one batch, the target's and the drafter's.",
            "4096 on CPU, what fits on CUDA",
            metavar="N",
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        option(
            "Batches and memory",
            "Tokens in one forward where held-out samples are captured, padding included.",
            "2048 on CPU, 32768 on CUDA",
            metavar="N",
        ),
    ] = None,
    max_steps_ahead: Annotated[
        int | None,
        option("Batches and memory", "Steps that targets may be ahead of the drafters.", "8", metavar="N"),
    ] = None,
    hs_queue_depth: Annotated[
        int | None,
        option(
            "Batches and memory", "Batches of one bucket in flight, at most.", "2 (targets + drafters) + 2", metavar="N"
        ),
    ] = None,
    target_device: Annotated[
        list[str] | None,
        option("Target", "cpu, cuda:1, ...; repeatable; dealt over ranks.", "all CUDA but the last", metavar="DEVICE"),
    ] = None,
    drafter_device: Annotated[
        list[str] | None,
        option("Run", "cpu, cuda:1, ...; repeatable; dealt over ranks.", "the last CUDA device", metavar="DEVICE"),
    ] = None,
    seed: Annotated[int | None, option("Run", "Of weights, order, anchors and split.", "0", metavar="N")] = None,
) -> None:
    """Options that `live` has besides those of `extract` and `train`, or says otherwise."""


def _signature() -> inspect.Signature:
    """The options of `extract` and those of `train`, each once."""
    merged: dict[str, inspect.Parameter] = {}
    for command in (extract, train, _own):
        for name, parameter in inspect.signature(command).parameters.items():
            if command is _own or name not in merged:
                merged[name] = parameter
    options = [parameter for name, parameter in merged.items() if name not in _OF_A_STORE]
    return inspect.Signature(sorted(options, key=_place))


def _place(parameter: inspect.Parameter) -> tuple[int, int]:
    """Where an option stands on the page; a panel stands where its first option does."""
    panel = parameter.annotation.__metadata__[0].rich_help_panel
    return _PANELS.index(panel), _PLACES.get(parameter.name, 0)


live.__signature__ = _signature()  # type: ignore[attr-defined]
