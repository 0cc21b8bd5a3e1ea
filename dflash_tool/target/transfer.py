"""How hidden states get from a target's device to where they are used, so that nobody waits who needn't.

    target's stream:  layer 1 ── layer 2 ── layer 3 ─ ...
                         └ event    └ event
    side stream:             copy 1     copy 2    ... ┬ event
    drafter's stream:                                 └ use ─ event ── the memory may be used again

A target on a CUDA device copies each layer while the next ones run, straight to the drafter's device where the two can
reach each other (`BySideStream`), into page-locked memory otherwise. Streams wait for each other's events; the host
waits for nothing but the last one, before it counts the memory as free. On the CPU a layer is written right where it is
used, and nobody has anything to wait for (`OnHost`).

Memory is torch's: its allocators hand a block out again once the streams that use it are through with it, which is what
`record_stream` tells them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Arrival(Protocol):
    """States that may still be on their way."""

    def wait(self, device: torch.device) -> None:
        """Let what this thread gives `device` to do from now on come after the arrival. A CPU waits itself."""

    def used(self, device: torch.device) -> None:
        """What this thread gave `device` to do so far reads the states."""

    def done(self) -> None:
        """Wait until every use is over."""

    def fetch(self) -> Tensor:
        """Return the states in host memory; waits until they are there."""


class Way(Protocol):
    """The way from one target's device to where one consumer takes its states. Sends from one thread at a time."""

    in_place: bool
    """What `empty` makes may be written directly; `copy` isn't needed."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory at the other end."""

    def copy(self, into: Tensor, values: Tensor) -> None:
        """Send `[B, S, H]`, whose memory may be given up at once, into a part of that memory `[B, S or more, H]`.

        What lies behind S becomes zero.
        """

    def wait(self) -> None:
        """Wait until everything sent so far is there."""

    def select(self, sent: Tensor, places: Sequence[int], width: int) -> Tensor:
        """Samples at these places of `[n, B, S, H]`, so wide; waits until everything sent so far is there."""

    def arrival(self, sent: Tensor) -> Arrival:
        """Of everything that was sent into this memory."""


def is_direct(source: torch.device, consumer: torch.device) -> bool:
    """Whether states stay on devices between these two."""
    if source.type == "cpu" or consumer.type == "cpu":
        return False
    return consumer == source or torch.cuda.can_device_access_peer(source, consumer)


def way(source: torch.device, consumer: torch.device) -> Way:
    """The shortest way from a target on `source` to a consumer on `consumer`."""
    if source.type == "cpu":
        return OnHost(pin=consumer.type == "cuda")
    return BySideStream(source, consumer if is_direct(source, consumer) else None)


class OnHost:
    """From a target on the CPU; `pin`: to page-locked memory, from which CUDA devices copy by themselves."""

    in_place = True

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Way`."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._pin)

    def copy(self, into: Tensor, values: Tensor) -> None:
        """See `Way`."""
        width = values.shape[1]
        into[:, :width].copy_(values)
        into[:, width:].zero_()

    def wait(self) -> None:
        """See `Way`."""

    def select(self, sent: Tensor, places: Sequence[int], width: int) -> Tensor:
        """See `Way`."""
        return sent[:, list(places), :width]

    def arrival(self, sent: Tensor) -> "Here":
        """See `Way`."""
        return Here(sent)


class Here:
    """States that are in host memory and complete."""

    def __init__(self, states: Tensor) -> None:
        self._states = states

    def wait(self, device: torch.device) -> None:
        """See `Arrival`."""

    def used(self, device: torch.device) -> None:
        """See `Arrival`."""

    def done(self) -> None:
        """See `Arrival`."""

    def fetch(self) -> Tensor:
        """See `Arrival`."""
        return self._states


class Cuda:
    """The few calls of torch.cuda that `BySideStream` makes; tests put streams of their own in their place."""

    def stream(self, device: torch.device) -> Any:
        """A new stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> Any:
        """The stream on which this thread's work for a device goes."""
        return torch.cuda.current_stream(device)

    @contextmanager
    def on(self, *streams: Any) -> Iterator[None]:
        """Let this thread's work for these streams' devices go on them."""
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """Memory of a device for its current stream; page-locked host memory for None."""
        where: dict[str, Any] = {"pin_memory": True} if device is None else {"device": device}
        return torch.empty(tuple(shape), dtype=dtype, **where)

    def copy(self, into: Tensor, values: Tensor) -> None:
        """On the current stream of the source's device; that of another device waits before and after."""
        into.copy_(values, non_blocking=True)

    def zero(self, tensor: Tensor) -> None:
        """Fill with zeros."""
        tensor.zero_()

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """The memory is not handed out again before this stream is through with what it has to do now."""
        tensor.record_stream(stream)


class BySideStream:
    """From a target on a CUDA device to device `to`; to page-locked host memory for None."""

    in_place = False

    def __init__(self, source: torch.device, to: torch.device | None, cuda: Cuda | None = None) -> None:
        self._source, self._to, self._cuda = source, to, cuda or Cuda()
        self._side = self._cuda.stream(source)
        # A copy between devices is done on the source's stream, and the other device's current stream waits for it:
        # that mustn't be the one that the drafter computes on.
        self._there = self._side if to in (None, source) else self._cuda.stream(to)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Way`."""
        with self._cuda.on(self._there, self._side):
            return self._cuda.empty(shape, dtype, self._to)

    def copy(self, into: Tensor, values: Tensor) -> None:
        """See `Way`. Each copy's memory lies in one piece: torch would put others through memory of its own."""
        width = values.shape[1]
        self._side.wait_stream(self._cuda.current(self._source))
        with self._cuda.on(self._there, self._side):
            if width == into.shape[1]:
                self._cuda.copy(into, values)
            else:
                for there, here in zip(into, values, strict=True):
                    self._cuda.copy(there[:width], here)
                    self._cuda.zero(there[width:])
        self._cuda.keep(values, self._side)

    def wait(self) -> None:
        """See `Way`."""
        self._there.synchronize()

    def select(self, sent: Tensor, places: Sequence[int], width: int) -> Tensor:
        """See `Way`. Host memory is read by this thread, so streams' order alone wouldn't do."""
        self.wait()
        with self._cuda.on(self._there, self._side):
            return sent[:, list(places), :width].contiguous()

    def arrival(self, sent: Tensor) -> "Transit":
        """See `Way`."""
        return Transit(sent, self._to, self._there.record_event(), self._cuda)


class Transit:
    """States on their way to device `to` (None: host memory), there once `ready` has passed."""

    def __init__(self, states: Tensor, to: torch.device | None, ready: Any, cuda: Cuda) -> None:
        self._states, self._to, self._ready, self._cuda = states, to, ready, cuda
        self._uses: list[Any] = []

    def wait(self, device: torch.device) -> None:
        """See `Arrival`."""
        if device.type == "cuda":
            self._cuda.current(device).wait_event(self._ready)
        else:
            self._ready.synchronize()

    def used(self, device: torch.device) -> None:
        """See `Arrival`."""
        if device.type == "cuda":
            stream = self._cuda.current(device)
            if self._to is not None:
                self._cuda.keep(self._states, stream)
            self._uses.append(stream.record_event())

    def done(self) -> None:
        """See `Arrival`."""
        for use in self._uses:
            use.synchronize()

    def fetch(self) -> Tensor:
        """See `Arrival`."""
        if self._to is None:
            self._ready.synchronize()
            return self._states
        stream = self._cuda.stream(self._to)
        stream.wait_event(self._ready)
        with self._cuda.on(stream):
            host = self._cuda.empty(self._states.shape, self._states.dtype, None)
            self._cuda.copy(host, self._states)
        self._cuda.keep(self._states, stream)
        stream.synchronize()
        return host
