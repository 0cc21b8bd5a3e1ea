"""The only files that wire parts together: `extraction` (plan, extract), `training` (train) and `live_run` (live)."""

from dflash_tool.pipeline.extraction import ExtractResult, extract, plan
from dflash_tool.pipeline.flow import Flow
from dflash_tool.pipeline.live_plan import LivePlan, plan_live
from dflash_tool.pipeline.live_run import LiveResult, LiveTelemetry, live
from dflash_tool.pipeline.training import TrainResult, train
from dflash_tool.planning import ExtractionPlan

__all__ = [
    "ExtractResult",
    "ExtractionPlan",
    "Flow",
    "LivePlan",
    "LiveResult",
    "LiveTelemetry",
    "TrainResult",
    "extract",
    "live",
    "plan",
    "plan_live",
    "train",
]
