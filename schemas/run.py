"""What a run's folder holds, by name, and the parts of a step whose seconds its metrics tell."""

TRAIN_SETTINGS = "train.yaml"
LIVE_SETTINGS = "live.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
STATE = "state.json"
"""Of a checkpoint."""

STEP_PARTS = ("data", "forward", "backward", "drafters", "ranks", "reduce", "optimizer", "device")
"""See `trainer.timing`."""
