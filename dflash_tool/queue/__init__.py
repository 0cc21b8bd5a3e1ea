"""The bucketed hidden-state queue: the seam between target loops and what uses their output."""

from __future__ import annotations

from dflash_tool.queue.blocking import BucketedHSQueue, QueueClosed, QueueCounters
from dflash_tool.queue.policy import BucketPolicy, Item

__all__ = ["BucketPolicy", "BucketedHSQueue", "Item", "QueueClosed", "QueueCounters"]
