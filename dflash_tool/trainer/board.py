"""TensorBoard, where it is asked for: the numbers of metrics.jsonl as scalars in RUN/tensorboard."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_tool.errors import ConfigError
from dflash_tool.trainer.metrics import Write

FOLDER = "tensorboard"


def check_board() -> None:
    """Raise ConfigError unless the tensorboard package is there."""
    try:
        import torch.utils.tensorboard  # noqa: F401, PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            "--tensorboard: the package tensorboard is not installed: pip install 'dflash-tool[tensorboard]', or leave "
            "the option out (metrics.jsonl has the same numbers)"
        ) from error


@contextmanager
def board(run: Path, *, after_step: int) -> Iterator[Write]:
    """A function that takes rows as metrics.jsonl does. Scalars of steps after `after_step` are hidden: taken again."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    with SummaryWriter(str(run / FOLDER), purge_step=after_step + 1) as writer:

        def write(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if isinstance(value, int | float) and name not in {"step", "total_steps", "epoch"}:
                    writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])

        yield write
