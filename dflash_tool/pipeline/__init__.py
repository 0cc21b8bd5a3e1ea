"""The only files that wire parts together: `extraction` (plan, extract), `training`, `exporting` (export, check)."""

from dflash_tool.pipeline.exporting import ExportResult, check, export
from dflash_tool.pipeline.extraction import ExtractResult, extract, plan
from dflash_tool.pipeline.training import TrainResult, train
from dflash_tool.planning import ExtractionPlan

__all__ = [
    "ExportResult",
    "ExtractResult",
    "ExtractionPlan",
    "TrainResult",
    "check",
    "export",
    "extract",
    "plan",
    "train",
]
