"""`dflash export`: a trained drafter as the folder that engines load; `--check` looks any such folder over."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from dflash_tool.commands.format import count, facts, size
from dflash_tool.commands.options import option
from dflash_tool.errors import ConfigError

_WRITE, _LOOK = "Write", "Look over"


def export(
    source: Annotated[
        Path | None,
        typer.Argument(
            help="A run of `dflash train` (its best checkpoint is taken), or one of its checkpoints.",
            metavar="RUN|CHECKPOINT",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, option(_WRITE, "The folder to write; it must not exist.", metavar="DIR")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, option(_WRITE, "Of the weights.", "as trained, float32")
    ] = None,
    check: Annotated[
        Path | None,
        option(_LOOK, "Only look a drafter's folder over, whoever wrote it; exit 1 if it is off.", metavar="DIR"),
    ] = None,
    target: Annotated[str | None, option(_LOOK, "Also whether it fits this target.", metavar="FOLDER|NAME")] = None,
    as_json: Annotated[
        bool, option(_LOOK, "One JSON document on stdout; messages go to stderr.", flag="--json")
    ] = False,
) -> None:
    """Write a trained drafter as the folder that transformers, vLLM and SGLang load.

    In it are config.json and model.safetensors (z-lab's layout, from the config
    that was trained), README.md, a model card with the measured tau, and
    training.json, all settings and the fingerprints of the data. Before it says
    done, it reads the files again and compares what they compute with a second,
    plain implementation.

    --check looks any folder over: keys, tensor names and shapes, layer ids,
    rope, mask token, and what it computes.

    Example: dflash export ./run --out ./drafter --dtype bfloat16

    Example: dflash export --check ./drafter --target ./Qwen3-8B
    """
    if check is None:
        if target is not None:
            raise ConfigError("--target goes with --check: an export takes everything from its checkpoint")
        if source is None or out is None:
            raise ConfigError("give a run or a checkpoint and --out DIR, or --check DIR")
        _write(source, out, dtype, as_json)
        return
    if source is not None or out is not None or dtype is not None:
        raise ConfigError("--check only looks: leave RUN, --out and --dtype out, or leave --check out to write")
    from dflash_tool import pipeline

    found = pipeline.check(check, target)
    if as_json:
        print(json.dumps({"drafter": str(check), "target": target, "off": found}, indent=2))  # noqa: T201
    elif found:
        Console().print(Text(f"{check} is off:", style="bold red"))
        for line in found:
            Console().print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
    else:
        fits = f", and fits {target}" if target else ""
        Console().print(f"{check} is what engines expect{fits}.", soft_wrap=True, markup=False, highlight=False)
    if found:
        raise typer.Exit(1)


def _write(source: Path, out: Path, dtype: str | None, as_json: bool) -> None:
    import torch

    from dflash_tool import pipeline

    result = pipeline.export(source, out, dtype=getattr(torch, dtype) if dtype else None)
    if as_json:
        document = {name: str(value) if isinstance(value, Path) else value for name, value in vars(result).items()}
        print(json.dumps(document, indent=2))  # noqa: T201 - the one document on stdout
        return
    tau = f"{result.walk_tau:.2f} on held-out answers" if result.walk_tau is not None else "not measured at this step"
    rows = [
        ("from", f"{result.checkpoint} (step {count(result.step)})"),
        ("holds", f"{result.tensors} tensors, {count(result.parameters)} parameters in {result.dtype}, "
         f"{size(result.nbytes)}"),
        ("checked", "read again, and computed alike by a second implementation"),
        ("walk tau", tau),
    ]  # fmt: skip
    console = Console()
    console.print(Text.assemble("Exported: ", (str(result.out), "bold")), facts(rows))
    for note in result.notes:
        console.print(Text(f"Note: {note}", style="yellow"))
    measure = f"dflash eval --drafter {result.out} --target TARGET --data FILE"
    console.print(f"Measure it: {measure}", soft_wrap=True, markup=False, highlight=False)
