"""Who gets which device: on one machine, and in each cell under torchrun."""

from typing import Any

import pytest
import torch

from dflash_tool.errors import ConfigError
from dflash_tool.pipeline import live_devices
from dflash_tool.pipeline.live_devices import Cell, deal, devices_of, own_devices, window_limit
from dflash_tool.schemas.live import LiveConfig

AUTO = ("auto",)


def _cuda(*numbers: int) -> tuple[str, ...]:
    return tuple(f"cuda:{number}" for number in numbers)


@pytest.mark.parametrize(
    ("targets", "drafters", "count", "expected"),
    [
        (AUTO, AUTO, 0, (("cpu",), ("cpu",))),
        (AUTO, AUTO, 1, (_cuda(0), _cuda(0))),
        (AUTO, AUTO, 2, (_cuda(0), _cuda(1))),
        (AUTO, AUTO, 8, (_cuda(0, 1, 2, 3, 4, 5, 6), _cuda(7))),
        (_cuda(2), AUTO, 8, (_cuda(2), _cuda(7))),
        (_cuda(0, 1, 2, 3), AUTO, 4, (_cuda(0, 1, 2, 3), _cuda(3))),
        (AUTO, _cuda(0, 5), 8, (_cuda(1, 2, 3, 4, 6, 7), _cuda(0, 5))),
        (AUTO, ("cuda",), 2, (_cuda(1), ("cuda",))),
        (AUTO, _cuda(0, 1), 2, (_cuda(0, 1), _cuda(0, 1))),
        (AUTO, ("cpu",), 2, (_cuda(0, 1), ("cpu",))),
        (("cpu",), AUTO, 2, (("cpu",), _cuda(1))),
        (("cpu",), AUTO, 0, (("cpu",), ("cpu",))),
        (_cuda(3), _cuda(1, 2), 8, (_cuda(3), _cuda(1, 2))),
    ],
)
def test_one_process(targets: Any, drafters: Any, count: int, expected: Any) -> None:
    assert deal(targets, drafters, count=count) == Cell(targets=expected[0], drafters=expected[1])


@pytest.mark.parametrize(
    ("targets", "drafters", "count", "world", "expected"),
    [
        (AUTO, AUTO, 8, 2, [(_cuda(0, 1, 2), _cuda(3)), (_cuda(4, 5, 6), _cuda(7))]),
        (AUTO, AUTO, 5, 2, [(_cuda(0), _cuda(1)), (_cuda(2, 3), _cuda(4))]),
        (AUTO, AUTO, 2, 2, [(_cuda(0), _cuda(0)), (_cuda(1), _cuda(1))]),
        (AUTO, AUTO, 0, 2, [(("cpu",), ("cpu",))] * 2),
        (_cuda(0, 1, 2, 3), _cuda(4, 5), 6, 2, [(_cuda(0, 1), _cuda(4)), (_cuda(2, 3), _cuda(5))]),
        (_cuda(0, 1), AUTO, 6, 2, [(_cuda(0), _cuda(3)), (_cuda(1), _cuda(5))]),
        (AUTO, _cuda(0, 1), 6, 2, [(_cuda(2, 3), _cuda(0)), (_cuda(4, 5), _cuda(1))]),
        (AUTO, _cuda(0, 1), 3, 2, [(_cuda(0), _cuda(0)), (_cuda(2), _cuda(1))]),
        (("cpu",), _cuda(0, 1), 2, 2, [(("cpu",), _cuda(0)), (("cpu",), _cuda(1))]),
    ],
)
def test_cells(targets: Any, drafters: Any, count: int, world: int, expected: Any) -> None:
    cells = [deal(targets, drafters, count=count, rank=rank, world=world) for rank in range(world)]
    assert cells == [Cell(targets=t, drafters=d) for t, d in expected]


def test_no_device_drafts_in_two_cells() -> None:
    """Every device is used, and by one cell; NCCL refuses two ranks on one."""
    for count in range(1, 20):
        for world in range(1, count + 1):
            cells = [deal(AUTO, AUTO, count=count, rank=rank, world=world) for rank in range(world)]
            used = [set(cell.targets) | set(cell.drafters) for cell in cells]
            assert sum(map(len, used)) == count == len(set().union(*used))
            assert all(len(cell.drafters) == 1 for cell in cells)


@pytest.mark.parametrize(
    ("targets", "drafters", "count", "world", "says"),
    [
        (_cuda(0, 1, 2), AUTO, 4, 2, r"--target-device: 3 devices can't be dealt evenly over the 2 processes"),
        (AUTO, _cuda(0), 4, 2, r"--drafter-device: 1 devices? can't be dealt evenly"),
        (("cpu",), AUTO, 1, 2, r"2 processes on a machine with 1 CUDA device: start at most 1"),
        (AUTO, AUTO, 2, 3, r"3 processes on a machine with 2 CUDA devices: start at most 2"),
    ],
)
def test_what_cannot_be_dealt_is_refused(targets: Any, drafters: Any, count: int, world: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        deal(targets, drafters, count=count, world=world)


def _config(**given: Any) -> LiveConfig:
    return LiveConfig.model_validate({"target": "t", "data": ["d"], "out": "o", **given})


def test_a_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment says of the machine reaches the config, and the words in the panel."""
    monkeypatch.setattr(live_devices, "resolve_device", lambda name, option: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = own_devices(_config(targets=2))
    assert config.target_device == _cuda(4, 5, 6)
    assert devices_of(config) == "rank 3: 6 targets on cuda:4, cuda:5, cuda:6, 1 drafter on cuda:7"


def test_the_window_is_as_large_as_the_fullest_place_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """States lie with the drafters they go to directly, and in host memory where one can't be reached."""
    free = {"cuda:1": 4000, "cuda:2": 2000}
    monkeypatch.setattr(live_devices, "resolve_device", lambda name, option: torch.device(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 9999))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda source, to: (source.index, to.index) != (0, 2))

    class Resolved:
        devices = (torch.device("cuda:0"), torch.device("cuda:1"))
        inflight_limit = 700

    def limit(resolved: Any, **given: Any) -> int:
        return window_limit(resolved, _config(**given))

    assert limit(Resolved, drafter_device=_cuda(1)) == 1000
    assert limit(Resolved, drafter_device=_cuda(1, 2)) == 500
    assert limit(Resolved, drafter_device=("cpu",)) == 700
    Resolved.inflight_limit = 300
    assert limit(Resolved, drafter_device=_cuda(1, 2)) == 300  # cuda:0 can't reach cuda:2
    assert limit(Resolved, drafter_device=_cuda(1), inflight_gib=2.0) == 300  # as asked for
