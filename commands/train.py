"""`dflash train`: a store of hidden states -> a drafter."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from dflash_tool.commands.options import load_config, option

_INPUT, _DRAFTER, _LOSS, _STEPS, _READ, _RUN = "Input", "Drafter", "Loss", "Optimizer steps", "Reading", "Run"


def train(
    store: Annotated[
        list[Path] | None, option(_INPUT, "A store that `dflash extract` finished; repeatable.", metavar="STORE")
    ] = None,
    weight: Annotated[
        list[float] | None,
        option(_INPUT, "Copies of a store's samples in an epoch: one a store, in order.", "1 each", metavar="X"),
    ] = None,
    follow: Annotated[
        bool | None, option(_INPUT, "Train from a store while `dflash extract` is writing it.", flag="--follow")
    ] = None,
    out: Annotated[Path | None, option(_INPUT, "The run's folder: new, or one to go on with.", metavar="RUN")] = None,
    val_fraction: Annotated[
        float | None, option(_INPUT, "Share of the conversations to hold out ...", "0.01", metavar="SHARE")
    ] = None,
    val_samples: Annotated[int | None, option(_INPUT, "... but at most so many.", "512", metavar="N")] = None,
    block_size: Annotated[
        int | None, option(_DRAFTER, "Slots of a block: the anchor and the drafts.", "16", metavar="B")
    ] = None,
    draft_layers: Annotated[int | None, option(_DRAFTER, "Layers of the drafter.", "5", metavar="N")] = None,
    aux_layers: Annotated[
        str | None,
        option(_DRAFTER, "Target layers it sees, of those in the store.", "all of them", metavar="1,9,17,..."),
    ] = None,
    mask_token_id: Annotated[
        int | None, option(_DRAFTER, "Token of the slots to draft.", "the store's", metavar="ID")
    ] = None,
    init_from: Annotated[
        Path | None,
        option(_DRAFTER, "Start from this drafter, and have its shape.", "random weights", metavar="FOLDER"),
    ] = None,
    anchors: Annotated[
        int | None, option(_LOSS, "Blocks a sample, at most, new ones each epoch.", "512", metavar="N")
    ] = None,
    loss: Annotated[
        Literal["decay", "dpace"] | None,
        option(_LOSS, "Weigh slots by position, or by the acceptance that hangs on them (D-PACE).", "decay"),
    ] = None,
    gamma: Annotated[
        float | None,
        option(_LOSS, "Decay of later slots' weights.", "7 for B = 16, 5 for 10, 4 for 8, else B / 2", metavar="X"),
    ] = None,
    lr: Annotated[float | None, option(_STEPS, "Highest learning rate.", "6e-4", metavar="X")] = None,
    warmup: Annotated[float | None, option(_STEPS, "Share of the steps that warm up.", "0.04", metavar="SHARE")] = None,
    weight_decay: Annotated[float | None, option(_STEPS, "AdamW's weight decay.", "0", metavar="X")] = None,
    clip: Annotated[float | None, option(_STEPS, "Largest gradient norm.", "1", metavar="X")] = None,
    epochs: Annotated[int | None, option(_STEPS, "Times over the data.", "6", metavar="N")] = None,
    max_steps: Annotated[int | None, option(_STEPS, "Stop after so many steps.", "never", metavar="N")] = None,
    batch_samples: Annotated[int | None, option(_STEPS, "Samples of one step.", "512", metavar="G")] = None,
    microbatch_tokens: Annotated[
        int | None,
        option(_STEPS, "Context tokens of one forward.", "4096 on CPU, what fits on CUDA", metavar="N"),
    ] = None,
    grad_checkpointing: Annotated[
        bool | None, option(_STEPS, "Recompute layers in the backward: less memory.", flag="--grad-checkpointing")
    ] = None,
    inflight_gib: Annotated[
        float | None,
        option(_READ, "Batches read ahead, at most.", "16 of the largest, if memory allows", metavar="GIB"),
    ] = None,
    loader_threads: Annotated[int | None, option(_READ, "Threads that read.", "2", metavar="N")] = None,
    verify_reads: Annotated[
        Literal["first", "always", "never"] | None,
        option(_READ, "When to hold rows against their hash.", "first"),
    ] = None,
    drafter_device: Annotated[
        list[str] | None,
        option(_RUN, "cpu, cuda, cuda:1, ...; repeatable.", "the first CUDA device, or the CPU", metavar="DEVICE"),
    ] = None,
    drafters: Annotated[int | None, option(_RUN, "Replicas on each drafter device.", "1", metavar="N")] = None,
    compile_: Annotated[bool | None, option(_RUN, "Compile parts of the drafter (CUDA).", flag="--compile")] = None,
    tensorboard: Annotated[
        bool | None, option(_RUN, "The metrics in RUN/tensorboard as well.", flag="--tensorboard")
    ] = None,
    seed: Annotated[int | None, option(_RUN, "Of weights, order, anchors and split.", "0", metavar="N")] = None,
    val_every: Annotated[int | None, option(_RUN, "Validate every so many steps.", "200", metavar="N")] = None,
    save_every: Annotated[int | None, option(_RUN, "Checkpoint every so many steps.", "200", metavar="N")] = None,
    log_every: Annotated[
        int | None, option(_RUN, "A row of metrics.jsonl every so many steps.", "10", metavar="N")
    ] = None,
    keep: Annotated[int | None, option(_RUN, "Checkpoints to keep, beside the best.", "2", metavar="N")] = None,
    config: Annotated[
        Path | None, option(_RUN, "YAML file with any of these settings; options win over it.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        bool, option(_RUN, "One JSON document on stdout; messages go to stderr.", flag="--json")
    ] = False,
) -> None:
    """Train a DFlash drafter from a store of hidden states.

    Every optimizer step mixes all lengths. Safe to stop and to kill: the same command goes on where it was. The
    drafter that engines load is RUN/checkpoints/best.

    Example: dflash train --store ./store --out ./run
    """
    flags: dict[str, Any] = dict(locals())
    for name in ("config", "as_json"):
        flags.pop(name)
    flags["compile"] = flags.pop("compile_")
    from dflash_tool.schemas.train import TrainConfig

    resolved = load_config(TrainConfig, config, flags)

    from dflash_tool import pipeline
    from dflash_tool.commands.train_tables import show_training, train_text
    from dflash_tool.telemetry import TrainTelemetry

    telemetry = TrainTelemetry()
    speaks = os.environ.get("RANK", "0") == "0"  # under torchrun one rank speaks for all
    with show_training(telemetry, Console(stderr=True, quiet=not speaks)):
        result = pipeline.train(resolved, telemetry)
    if not speaks:
        return
    if as_json:
        print(json.dumps(result.as_json(), indent=2))  # noqa: T201 - the one document on stdout
    else:
        Console().print(train_text(result))
