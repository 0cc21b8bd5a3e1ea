"""Training: steps of microbatches -> a drafter.

1. `loop.DrafterTrainLoop`     one optimizer step: gradients of its microbatches, summed, divided once, clipped, applied
2. `validate.Validator`        held-out samples -> loss, accuracy by slot, anchor tau, walk tau
3. `checkpoint.Checkpoints`    atomic, resumable to the bit, each with a servable drafter in it
4. `metrics.MetricsLog`        metrics.jsonl
5. `record`, `card`            what a run tells of its drafter: training.json and the model card of an export
"""

from dflash_tool.trainer.checkpoint import Checkpoint, Checkpoints
from dflash_tool.trainer.loop import DrafterTrainLoop, StepResult
from dflash_tool.trainer.metrics import MetricsLog
from dflash_tool.trainer.validate import Validation, Validator

__all__ = ["Checkpoint", "Checkpoints", "DrafterTrainLoop", "MetricsLog", "StepResult", "Validation", "Validator"]
