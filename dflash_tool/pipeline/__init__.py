"""The only files that wire parts together: `extraction`, `training`, `live_run`, `exporting`, `evaluation`."""

from dflash_tool.pipeline.evaluation import EvalResult, Graded, evaluate
from dflash_tool.pipeline.exporting import ExportResult, check, export
from dflash_tool.pipeline.extraction import ExtractResult, extract, plan
from dflash_tool.pipeline.flow import Flow
from dflash_tool.pipeline.live_plan import LivePlan, plan_live
from dflash_tool.pipeline.live_run import LiveResult, LiveTelemetry, live
from dflash_tool.pipeline.training import TrainResult, train
from dflash_tool.planning import ExtractionPlan

__all__ = [
    "EvalResult",
    "ExportResult",
    "ExtractResult",
    "ExtractionPlan",
    "Flow",
    "Graded",
    "LivePlan",
    "LiveResult",
    "LiveTelemetry",
    "TrainResult",
    "check",
    "evaluate",
    "export",
    "extract",
    "live",
    "plan",
    "plan_live",
    "train",
]
