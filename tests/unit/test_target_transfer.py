"""Hidden states on their way: the right numbers whatever the devices do first, and nobody waits who needn't."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_tool.loader import MixedBatch
from dflash_tool.target import TargetModel, open_target
from dflash_tool.target.transfer import BySideStream, Here, OnHost, way

from .fake_cuda import Event, Machine, Stream, _raw

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
N, B, S, H = 3, 2, 4, 2


def _value(batch: int, layer: int) -> float:
    return 10.0 * batch + layer + 1


class Journey:
    """Batches from a target on cuda:0 to a consumer, some of them narrower than their memory."""

    def __init__(self, machine: Machine, to: torch.device | None, consumer: torch.device) -> None:
        self.machine, self.to, self.consumer = machine, to, consumer
        self.route = BySideStream(FIRST, to, machine)
        self.waiting: deque[tuple[int, Any, Any]] = deque()
        self.seen: dict[int, torch.Tensor] = {}
        self.on_host: dict[int, torch.Tensor] = {}

    def send(self, batch: int) -> None:
        states = self.route.empty((N, B, S, H), torch.float32)
        for layer in range(N):
            real = self.machine.empty((B, S - batch % 2, H), torch.float32, FIRST)
            aim, value = _raw(real), _value(batch, layer)
            self.machine.current(FIRST).do(lambda aim=aim, value=value: aim.fill_(value))
            self.route.copy(states[layer], real)
        self.waiting.append((batch, states, self.route.arrival(states)))

    def use(self, tee: bool) -> None:
        batch, states, arrival = self.waiting.popleft()
        if tee:
            self.on_host[batch] = arrival.fetch().clone()
        arrival.wait(self.consumer)
        if self.consumer.type == "cpu":
            self.seen[batch] = states.clone()
            return
        mine = states
        if self.to is None:
            mine = self.machine.empty(states.shape, states.dtype, self.consumer)
            self.machine.copy(mine, states)
        what = _raw(mine)
        self.machine.current(self.consumer).do(lambda: self.seen.setdefault(batch, what.clone()))
        arrival.used(self.consumer)
        if batch % 3:  # after an error nobody waits for the end of a use
            arrival.done()

    def arrived(self, tee: bool) -> bool:
        """Send twelve, three at most on their way; whether each comes out as it was."""
        for batch in range(12):
            self.send(batch)
            if len(self.waiting) > 2:
                self.use(tee)
        while self.waiting:
            self.use(tee)
        self.machine.current(self.consumer if self.consumer.type == "cuda" else FIRST).synchronize()
        return all(
            _is_whole(got[batch], batch) for got in (self.seen, *([self.on_host] if tee else [])) for batch in range(12)
        )


def _is_whole(got: torch.Tensor, batch: int) -> bool:
    width = S - batch % 2
    right = all(bool((got[layer, :, :width] == _value(batch, layer)).all()) for layer in range(N))
    return right and not got[:, :, width:].any()


def _run(machine: Machine, to: torch.device | None, consumer: torch.device, *, tee: bool = False) -> bool:
    return Journey(machine, to, consumer).arrived(tee)


WAYS = [(SECOND, SECOND), (FIRST, FIRST), (None, SECOND), (None, CPU)]


@pytest.mark.parametrize("tee", [False, True])
@pytest.mark.parametrize(("to", "consumer"), WAYS, ids=["peer", "same device", "page-locked", "to the CPU"])
def test_states_arrive_as_they_were(to: torch.device | None, consumer: torch.device, tee: bool) -> None:
    assert all(_run(Machine(seed), to, consumer, tee=tee) for seed in range(30))


@pytest.mark.parametrize(
    ("to", "consumer", "owner", "forgotten"),
    [
        (SECOND, SECOND, Stream, "wait_stream"),  # a layer is copied before it is computed
        (SECOND, SECOND, Stream, "wait_event"),  # or used before it is copied
        (FIRST, FIRST, Stream, "wait_event"),
        (None, SECOND, Stream, "wait_event"),
        (None, CPU, Event, "synchronize"),
        (SECOND, SECOND, Machine, "keep"),  # or its memory is handed out again too early
        (FIRST, FIRST, Machine, "keep"),
    ],
)
def test_a_forgotten_wait_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, to: torch.device | None, consumer: torch.device, owner: type, forgotten: str
) -> None:
    """The test above, tested: without the call some order of work gives wrong numbers."""
    real: Callable[..., None] = getattr(owner, forgotten)
    inside = {"copying": False}

    def forget(self: Any, *given: Any) -> None:
        if inside["copying"]:  # what torch does by itself stays
            real(self, *given)

    copy = Machine.copy

    def copying(self: Machine, into: torch.Tensor, values: torch.Tensor) -> None:
        inside["copying"] = True
        copy(self, into, values)
        inside["copying"] = False

    monkeypatch.setattr(Machine, "copy", copying)
    monkeypatch.setattr(owner, forgotten, forget)
    with monkeypatch.context() as patch:
        if owner is Event:  # the last wait is the test's own
            patch.setattr(Stream, "synchronize", lambda self: real(self.record_event()))
        assert not all(_run(Machine(seed), to, consumer) for seed in range(30))


@pytest.mark.parametrize("to", [SECOND, FIRST, None], ids=["peer", "same device", "page-locked"])
def test_samples_are_selected_after_the_last_part_has_arrived(to: torch.device | None) -> None:
    """A part with NaN waits for its own states; those of the parts after it may still be on their way."""
    for seed in range(30):
        machine = Machine(seed)
        route = BySideStream(FIRST, to, machine)
        states = route.empty((1, B, S, H), torch.float32)
        for place in range(B):
            real = machine.empty((1, S, H), torch.float32, FIRST)
            aim = _raw(real)
            machine.current(FIRST).do(lambda aim=aim, place=place: aim.fill_(place + 1.0))
            route.copy(states[0, place : place + 1], real)
        assert (route.select(states, [1], 2) == 2.0).all()


def test_a_peer_copy_waits_for_no_drafter() -> None:
    """The drafter's stream is busy for ever; states arrive all the same, and its later work doesn't pass them."""
    machine = Machine(0)
    route = BySideStream(FIRST, SECOND, machine)
    machine.current(SECOND).wait_event(Event(machine))
    states = route.empty((1, B, S, H), torch.float32)
    real = machine.empty((B, S, H), torch.float32, FIRST)
    machine.current(FIRST).do(lambda: real.fill_(3.0))
    route.copy(states[0], real)
    route.wait()
    assert (states == 3.0).all()


def test_the_memory_of_a_batch_is_given_back_after_its_use() -> None:
    """`MixedBatch` waits for its own use, for nothing after it, and before it says that it is done."""
    order: list[str] = []

    class Watched(Here):
        def wait(self, device: torch.device) -> None:
            order.append("wait")

        def used(self, device: torch.device) -> None:
            order.append("used")

        def done(self) -> None:
            order.append("done")

    states = torch.arange(N * B * S * H, dtype=torch.float32).reshape(N, B, S, H)
    nothing = np.zeros(B, np.int64)
    batch = MixedBatch(
        index_in_step=0, bucket=0, rows=nothing, sample_ids=np.zeros((B, 2), np.uint64), copies=nothing,
        lengths=torch.full((B,), S), input_ids=torch.zeros(B, S, dtype=torch.int64),
        loss_mask=torch.zeros(B, S, dtype=torch.uint8), states=states, arrival=Watched(states),
        on_release=lambda: order.append("released"),
    )  # fmt: skip
    context = batch.context()
    assert torch.equal(context, states.permute(1, 2, 0, 3).reshape(B, S, N * H))
    batch.release()
    batch.release()
    assert order == ["wait", "used", "done", "released"]


def test_on_the_cpu_states_are_written_where_they_are_used() -> None:
    route = way(CPU, CPU)
    assert isinstance(route, OnHost)
    assert route.in_place
    states = route.empty((N, B, S, H), torch.bfloat16)
    assert not states.is_pinned()
    values = torch.randn(B, S - 1, H)
    route.copy(states[1], values)
    assert torch.equal(states[1, :, : S - 1], values.bfloat16())
    assert not states[1, :, S - 1 :].any()
    arrival = route.arrival(states)
    arrival.wait(CPU)
    assert arrival.fetch() is states
    assert torch.equal(route.select(states, [1], 2), states[:, 1:2, :2])


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@on_cuda
def test_every_way_brings_the_same_states(random_target: Callable[..., Path]) -> None:
    """Straight to a device (of the target, or of another), by page-locked memory, and as `extract` captures rows."""
    device = torch.device("cuda", 0)
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    target = TargetModel.load(
        open_target(str(random_target())), layers=(1, 3), device=device, dtype=torch.bfloat16, store_dtype="bfloat16"
    )
    rng = np.random.default_rng(0)
    lengths = np.array([3, 17, 40, 40])
    ids = rng.integers(0, 95, (4, 40))
    rows = target.capture(ids, lengths).states
    ends = np.cumsum(lengths)
    for route in (BySideStream(device, device), BySideStream(device, None), way(device, last), way(device, CPU)):
        for _ in range(5):  # memory comes round again
            sent = target.capture_padded(ids, lengths, (3, 1), route)
            assert sent.finite.all()
            sent.arrival.wait(sent.states.device)
            got, fetched = sent.states.cpu(), sent.arrival.fetch()
            assert torch.equal(got, fetched)
            for number, layer in enumerate((3, 1)):
                for place, part in enumerate(np.split(rows[layer], ends[:-1])):
                    ours = got[number, place].view(torch.uint16).numpy()
                    np.testing.assert_array_equal(ours[: len(part)], part)
                    assert not ours[len(part) :].any()


@on_cuda
def test_a_spoiled_sample_is_left_out_on_a_device_too(random_target: Callable[..., Path]) -> None:
    device = torch.device("cuda", 0)
    target = TargetModel.load(
        open_target(str(random_target(tied=False))), layers=(1,), device=device, dtype=torch.float32,
        store_dtype="float32",
    )  # fmt: skip
    target.decoder.get_input_embeddings().weight[96] = torch.nan  # type: ignore[operator]
    ids = np.ones((3, 8), np.int64)
    ids[1, 2] = 96
    for route in (way(device, device), way(device, CPU)):
        sent = target.capture_padded(ids, np.array([4, 8, 6]), (1,), route)
        assert sent.finite.tolist() == [True, False, True]
        assert sent.arrival.fetch().shape == (1, 2, 6, 32)
