"""Training: steps of microbatches -> a drafter.

1. `replica.Replica`           a drafter's share of a step -> the sum of its microbatches' gradients
2. `group.DrafterGroup`        the drafters of this process, a thread each -> one sum
3. `reduce.GradientSum`        that, summed over ranks
4. `loop.DrafterTrainLoop`     one optimizer step: the sum divided once, clipped, applied, on every rank alike
5. `validate.Validator`        held-out samples -> loss, accuracy by slot, anchor tau, walk tau
6. `checkpoint.Checkpoints`    atomic, resumable to the bit, each with a servable drafter in it
7. `metrics.MetricsLog`        metrics.jsonl
8. `record`, `card`            what a run tells of its drafter: training.json and the model card of an export
"""

from dflash_tool.trainer.checkpoint import Checkpoint, Checkpoints
from dflash_tool.trainer.group import DrafterGroup, TrainStep
from dflash_tool.trainer.loop import DrafterTrainLoop, StepResult
from dflash_tool.trainer.metrics import MetricsLog
from dflash_tool.trainer.reduce import GradientSum
from dflash_tool.trainer.replica import Replica
from dflash_tool.trainer.validate import Validation, Validator

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "DrafterGroup",
    "DrafterTrainLoop",
    "GradientSum",
    "MetricsLog",
    "Replica",
    "StepResult",
    "TrainStep",
    "Validation",
    "Validator",
]
