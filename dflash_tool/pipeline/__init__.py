"""The only files that wire parts together: `extraction`, `training`, `exporting` (export, check), `evaluation`."""

from dflash_tool.pipeline.evaluation import EvalResult, Graded, evaluate
from dflash_tool.pipeline.exporting import ExportResult, check, export
from dflash_tool.pipeline.extraction import ExtractResult, extract, plan
from dflash_tool.pipeline.training import TrainResult, train
from dflash_tool.planning import ExtractionPlan

__all__ = [
    "EvalResult",
    "ExportResult",
    "ExtractResult",
    "ExtractionPlan",
    "Graded",
    "TrainResult",
    "check",
    "evaluate",
    "export",
    "extract",
    "plan",
    "train",
]
