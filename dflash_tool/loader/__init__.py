"""The loader: committed hidden states -> optimizer steps that mix all lengths, as tensors.

1. `split_validation`   sample ids -> training rows and validation rows; equal contents stay on one side
2. `anchor_counts`      loss masks -> valid anchors of each sample: what its blocks will cost
3. `epoch_plans`        training rows -> a `StepPlan` for each epoch
4. `MixingLoader`       plan -> `LoadedStep` -> `MixedBatch`, read ahead by threads inside a window of bytes, or
                        made by another `BatchSource`
5. `MixedBatch.to`      hidden states layer by layer -> the context `[B, S, n_aux * H]` that `fc` takes
"""

from dflash_tool.loader.batch import BatchInputs, MixedBatch
from dflash_tool.loader.mixing import MixingLoader
from dflash_tool.loader.plans import anchor_counts, epoch_plans
from dflash_tool.loader.prefetch import LoaderClosed, PlannedStep
from dflash_tool.loader.reader import VERIFY_READS, VerifyReads
from dflash_tool.loader.source import BatchSource, SourceOf
from dflash_tool.loader.step import LoadedStep, LoaderCounters
from dflash_tool.loader.validation import split_validation

__all__ = [
    "VERIFY_READS",
    "BatchInputs",
    "BatchSource",
    "LoadedStep",
    "LoaderClosed",
    "LoaderCounters",
    "MixedBatch",
    "MixingLoader",
    "PlannedStep",
    "SourceOf",
    "VerifyReads",
    "anchor_counts",
    "epoch_plans",
    "split_validation",
]
