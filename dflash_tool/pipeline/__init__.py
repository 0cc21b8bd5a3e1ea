"""The only files that wire parts together: `extraction` (plan, extract) and `training` (train)."""

from dflash_tool.pipeline.extraction import ExtractResult, extract, plan
from dflash_tool.pipeline.training import TrainResult, train
from dflash_tool.planning import ExtractionPlan

__all__ = ["ExtractResult", "ExtractionPlan", "TrainResult", "extract", "plan", "train"]
