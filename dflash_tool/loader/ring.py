"""The loader's memory: one block of bytes, handed out round and round, bounded by an `InflightWindow`.

Batches are taken in plan order, so each region starts where the last one ended; where the rest up to the end of
the block is too short, it is skipped and charged to that batch. Regions return to the window in the order they
were taken (one given back early waits for the older ones), so the bytes charged are exactly those between the
oldest and the newest region, and a region that the window grants is free. Nothing is ever allocated again.

A region that with its skipped bytes would exceed the block is charged the whole block: then it is alone, and
starts at 0. Hence anything up to the size of the block can be had, and a window of one batch works.
"""

import sys
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_tool.window import InflightWindow

ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True, eq=False)
class Region:
    """`memory` [nbytes] uint8, and what the window was charged for it."""

    memory: NDArray[np.uint8]
    bucket: int
    charge: int
    given_back: bool = False


def ring_memory(limit_bytes: int, *, pin: bool) -> NDArray[np.uint8]:
    """`limit_bytes` (rounded down to `ALIGNMENT`) bytes for a ring, page-locked at once if `pin`.

    Otherwise what is never used is never really there.
    """
    size = limit_bytes // ALIGNMENT * ALIGNMENT
    if pin:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return np.empty(size, np.uint8)  # numpy, unlike torch, asks for huge pages


class Ring:
    """Hands out `memory`, which `ring_memory` made. One thread at a time may `take`, any may `give_back`.

    Raises:
        ConfigError: there is no memory.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.window = InflightWindow(memory.nbytes, places=sys.maxsize)
        self._memory = memory
        self._head = 0
        self._taken: deque[Region] = deque()
        self._lock = threading.Lock()

    def take(self, bucket: int, nbytes: int) -> Region:
        """Wait for `nbytes` bytes; their content is whatever was there.

        Raises:
            ConfigError: the ring is smaller than that.
            WindowClosed: the window is closed, before or during the wait.
            BaseException: what the window was aborted with.
        """
        limit, size = self.window.limit_bytes, aligned(nbytes)
        start = self._head if self._head + size <= limit else 0
        skipped = 0 if start else (limit - self._head) % limit
        charge = size if size > limit else min(size + skipped, limit)
        self.window.acquire(bucket, charge)
        self._head = start + size
        region = Region(self._memory[start : start + nbytes], bucket, charge)
        with self._lock:
            self._taken.append(region)
        return region

    def give_back(self, region: Region) -> None:
        """Let the memory be used again. Once for each region."""
        with self._lock:
            region.given_back = True
            while self._taken and self._taken[0].given_back:
                oldest = self._taken.popleft()
                self.window.release(oldest.bucket, oldest.charge)
