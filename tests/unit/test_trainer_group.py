"""One step over drafters and ranks against one computed plainly in fp64; a drafter that fails; weights copied back."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from dflash_tool.errors import DflashError, StoreError
from dflash_tool.loader import MixedBatch
from dflash_tool.pipeline.train_run import check_together
from dflash_tool.ranks import Ranks
from dflash_tool.trainer.timing import bottleneck
from tests.warm import Warm

from .scale_kit import NO_ANCHOR, Step, batches, check_step, loop_of

EVERY = batches()
WAYS = {
    "one": [EVERY],
    "two": [EVERY[::2], EVERY[1::2]],
    "three, one without an anchor": [EVERY[:2], EVERY[2:NO_ANCHOR], EVERY[NO_ANCHOR:]],
    "three, one without work": [EVERY[:3], [], EVERY[3:]],
}


@pytest.mark.parametrize("clip", [0.05, 1e9])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_same_however_it_is_shared_out(way: str, clip: float) -> None:
    loop = loop_of(len(WAYS[way]), clip=clip)
    with loop.group:
        check_step(loop, WAYS[way], clip)


def test_a_step_over_two_gloo_ranks(tmp_path: Path, warm: Warm) -> None:
    warm.start([sys.executable, "-m", "tests.unit.scale_kit", str(tmp_path)], 2).end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_drafters_on_several_devices_keep_equal_weights() -> None:
    together, apart = (loop_of(3, clip=1.0, apart=apart) for apart in (False, True))
    ways = WAYS["three, one without an anchor"]
    with together.group, apart.group:
        for _ in range(3):
            together.step(Step(ways))
            apart.step(Step(ways))
    first, *others = [list(replica.model.parameters()) for replica in apart.group.replicas]
    for other in (*others, list(together.group.model.parameters())):
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_a_drafter_that_fails_stops_the_others() -> None:
    """The others wait for batches that only an abort ends; what is raised is the first error, once."""
    aborted, error = threading.Event(), DflashError("row 7 is damaged")
    waiting = threading.Barrier(3)
    given: list[BaseException] = []

    def fails() -> Iterator[MixedBatch]:
        yield EVERY[0]
        waiting.wait(60)
        raise error

    def waits() -> Iterator[MixedBatch]:
        waiting.wait(60)
        assert aborted.wait(60)
        raise RuntimeError("a consequence")
        yield EVERY[1]

    def abort(error: BaseException) -> None:
        given.append(error)
        aborted.set()

    loop = loop_of(3, clip=1.0)
    with loop.group, pytest.raises(DflashError, match="row 7") as raised:
        loop.step(Step([waits(), fails(), waits()], abort=abort))
    assert raised.value is error
    assert set(map(id, given)) == {id(error)}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drafter")]


def test_a_step_that_is_not_finite_changes_no_weight() -> None:
    """Also after steps that left momentum behind: what holds on CUDA, where nobody looks before `check`."""
    loop = loop_of(1, clip=1.0)
    with loop.group:
        loop.step(Step([EVERY]))
        before = [parameter.detach().clone() for parameter in loop.group.model.parameters()]
        loop.group.replicas[0].head.weight[0, 0] = float("nan")
        with pytest.raises(DflashError, match=r"NaN or Inf in step 1 .*rows 0, 1, 2"):
            loop.step(Step([EVERY]))
    assert all(torch.equal(one, two) for one, two in zip(before, loop.group.model.parameters(), strict=True))


@pytest.mark.parametrize(("other", "what"), [({"step": 3}, "step"), ({"samples_fingerprint": "b"}, "plan of steps")])
def test_ranks_that_would_begin_differently_are_refused(other: dict[str, object], what: str) -> None:
    """As where one machine doesn't see the run's folder, or has a store of its own."""
    store, stands = HashStore(), {"epoch": 0, "step": 0, "samples_fingerprint": "a"}
    store.set("begin/1", json.dumps(stands | other))
    with pytest.raises(StoreError, match=f"rank 1 begins with another {what} than rank 0"):
        check_together(Ranks(0, 2, store), Path("run"), stands)


def test_a_step_whose_samples_are_all_quarantined_has_no_gradient() -> None:
    """It is a step all the same, as the plan has it; samples without any anchor, though, are a defect."""
    loop = loop_of(1, clip=1.0)
    before = [parameter.detach().clone() for parameter in loop.group.model.parameters()]
    with loop.group:
        result = loop.step(Step([[]], rows=np.empty(0, np.int64)))
        assert (float(result.loss), float(result.grad_norm), result.blocks, loop.steps_done) == (0, 0, 0, 1)
        assert all(torch.equal(one, two) for one, two in zip(before, loop.group.model.parameters(), strict=True))
        with pytest.raises(DflashError, match="none of its 3 samples has an anchor"):
            loop.step(Step([EVERY[NO_ANCHOR:]]))


def test_the_bottleneck_is_named() -> None:
    assert "forward and backward" in bottleneck({"forward": 3.0, "backward": 4.0, "data": 5.0})
    assert "reading hidden states (58 % of the time)" in bottleneck({"forward": 2.0, "backward": 3.0, "data": 7.0})
    assert "slowest rank" in bottleneck({"forward": 1.0, "ranks": 2.0})
    assert bottleneck({}) == ""
