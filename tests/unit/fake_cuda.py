"""Devices that do nothing until they must, in any order that streams and events leave open, and reuse memory at once.

Work given to a stream is kept. Whoever waits for an event lets streams work, one piece at a time, chosen at random,
until that event has passed. A missing wait, or memory given up too early, so comes out as wrong numbers.
"""

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_tool.target.transfer import Cuda


class Event:
    def __init__(self, machine: "Machine") -> None:
        self.machine, self.passed = machine, False

    def synchronize(self) -> None:
        self.machine.run_until(lambda: self.passed)


@dataclass(eq=False)
class Stream:
    machine: "Machine"
    device: torch.device
    work: deque[tuple[Event | None, Callable[[], object]]] = field(default_factory=deque)

    def do(self, piece: Callable[[], object]) -> None:
        self.work.append((None, piece))

    def wait_event(self, event: Event) -> None:
        self.work.append((event, lambda: None))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event(self.machine)
        self.do(lambda: setattr(event, "passed", True))
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


@dataclass(eq=False)
class Block:
    """Memory of a stream, which may have it again as soon as its owner is gone and all users of it are through.

    As in torch's allocators: a copy is a user of page-locked memory by itself, memory of a device is told its users.
    """

    memory: Tensor
    stream: Stream
    owner: weakref.ref[Tensor] | None = None
    users: list[Stream] = field(default_factory=list)
    uses: list[Event] | None = None

    def give_up(self) -> None:
        self.uses = [stream.record_event() for stream in self.users]

    def free(self) -> bool:
        return self.uses is not None and all(use.passed for use in self.uses)


class Machine(Cuda):
    """A few devices. `seed`: of the order in which work gets done."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.currents: dict[torch.device, Stream] = {}
        self.blocks: list[Block] = []

    # What `BySideStream` asks for.

    def stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    def current(self, device: torch.device) -> Stream:
        if device not in self.currents:
            self.currents[device] = self.stream(device)
        return self.currents[device]

    @contextmanager
    def on(self, *streams: Stream) -> Iterator[None]:
        before = dict(self.currents)
        self.currents |= {stream.device: stream for stream in streams}
        yield
        self.currents = before

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
        self.look()
        stream = self.current(device or torch.device("cpu"))
        size = torch.Size(shape).numel()
        fits = [b for b in self.blocks if b.stream is stream and b.memory.numel() >= size and b.free()]
        block = fits[0] if fits else Block(torch.full((size,), torch.nan, dtype=dtype), stream)
        if not fits:
            self.blocks.append(block)
        made = block.memory.flatten()[:size].view(tuple(shape))
        block.users, block.uses = [], None
        block.owner = weakref.ref(made, lambda _: block.give_up())
        return made

    def copy(self, into: Tensor, values: Tensor) -> None:
        """On the source device's stream; the other device's current stream waits before and after, as torch does it."""
        self.look()
        source, there = self._stream_of(values), self._stream_of(into)
        if there is not None and source is not None and there.device != source.device:
            source.wait_stream(there)
        stream = source or there
        assert stream is not None
        # Work on raw memory, which doesn't keep a tensor alive.
        aim, what = _raw(into), _raw(values)
        stream.do(lambda: aim.copy_(what))
        if there is not None and there is not stream and there.device != stream.device:
            there.wait_stream(stream)
        self._pinned_use(into, stream)
        self._pinned_use(values, stream)

    def zero(self, tensor: Tensor) -> None:
        stream, aim = self._stream_of(tensor), _raw(tensor)
        aim.zero_() if stream is None else stream.do(aim.zero_)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        self._block(tensor).users.append(stream)

    # The rest of the machine.

    def look(self) -> None:
        """Let some streams work a little, or none."""
        for _ in range(self.random.choice((0, 0, 1, 5))):
            if not self._step():
                return

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self._step(), "a wait that never ends"

    def _step(self) -> bool:
        ready = [s for s in self.streams if s.work and (s.work[0][0] is None or s.work[0][0].passed)]
        if not ready:
            return False
        self.random.choice(ready).work.popleft()[1]()
        return True

    def _block(self, tensor: Tensor) -> Block:
        start = tensor.untyped_storage().data_ptr()
        return next(block for block in self.blocks if block.memory.untyped_storage().data_ptr() == start)

    def _stream_of(self, tensor: Tensor) -> Stream | None:
        device = self._block(tensor).stream.device
        return self.current(device) if device.type == "cuda" else None

    def _pinned_use(self, tensor: Tensor, stream: Stream) -> None:
        block = self._block(tensor)
        if block.stream.device.type == "cpu":
            block.users.append(stream)


def _raw(tensor: Tensor) -> Tensor:
    """The same memory as another object, which keeps no owner alive."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
