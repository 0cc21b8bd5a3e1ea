"""What `dflash live` shows: before, while and after; and that its options are those of `extract` and `train`."""

import inspect
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from dflash_tool.commands import live_tables
from dflash_tool.commands.extract import extract
from dflash_tool.commands.live import _own, live
from dflash_tool.commands.train import train
from dflash_tool.pipeline import Flow, LiveResult, LiveTelemetry, TrainResult
from dflash_tool.pipeline.flow import TargetFlow
from dflash_tool.schemas.live import LiveConfig

FLOW = Flow(
    targets={"target 0 on cuda:0": TargetFlow(tokens=9000, padded_tokens=10_000, computing=6.0, waiting=4.0)},
    for_memory=3.0, for_places=0.0, for_steps=1.0, inflight=5_000_000, peak=7_000_000, limit=9_000_000, queued={2: 3},
)  # fmt: skip
TRAINED = TrainResult(
    run=Path("run"), steps=7, total_steps=7, drafter=Path("run/checkpoints/best"), drafters=1, ranks=1, first=None,
    last=None, best_walk_tau=None, bigram_tau=None, seconds=10.0, waited=1.0, spent={"data": 1.0}, memory_bytes=0,
    bottleneck="reading hidden states: more --loader-threads", notes=(),
)  # fmt: skip


def _printed(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_end_says_who_waited_for_whom() -> None:
    result = LiveResult(
        trained=TRAINED,
        store=Path("run/held-out"),
        flow=FLOW,
        bottleneck="drafters idle 10 %",
        quarantined=("a:1", "b:2"),
        devices="1 target on cuda:0, 1 drafter on cuda:1",
    )
    said = _printed(live_tables.live_text(result))
    for words in ("900 tokens/s", "waited 4.0 s (40.0 %)", "on cuda:0, 1 drafter on cuda:1",
                  "at most 7.0 MB", "bucket 2: 3", "memory 3.0 s",
                  "Drafters idle 10 %.", "2 samples with NaN or Inf states were left out: a:1, b:2"):  # fmt: skip
        assert words in said
    assert "--loader-threads" not in said
    nothing = _printed(live_tables.live_text(replace(result, flow=None, bottleneck="", quarantined=())))
    assert "tokens/s" not in nothing


def test_while_it_runs_both_sides_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = LiveTelemetry()
    telemetry.extract.stage("loading the target")
    assert "loading the target" in live_tables.plain_line(telemetry)
    assert "loading the target" in _printed(live_tables.live_panel(telemetry))
    monkeypatch.setattr(telemetry, "flow", lambda: FLOW)
    telemetry.train.start(step=0, total_steps=7)
    telemetry.train.update(step=3, loss=2.5)
    assert "loss 2.500" in live_tables.plain_line(telemetry)
    assert "in flight 5.0 MB of 9.0 MB" in live_tables.plain_line(telemetry)
    panel = _printed(live_tables.live_panel(telemetry))
    assert "3/7" in panel
    assert "target 0 on cuda:0" in panel


def test_every_setting_has_its_option() -> None:
    """Those of `extract` and `train` with the same words, where `live` doesn't say otherwise."""
    options = inspect.signature(live).parameters
    renamed = {"template_args": "template_arg", "compile": "compile_"}
    assert {renamed.get(name, name) for name in LiveConfig.model_fields} == {*options} - {
        "config",
        "dry_run",
        "as_json",
    }
    by_extract, by_train = inspect.signature(extract).parameters, inspect.signature(train).parameters
    for name in options.keys() - inspect.signature(_own).parameters.keys():
        assert options[name] == by_extract.get(name, by_train.get(name))
