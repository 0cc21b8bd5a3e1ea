"""Runs that are really killed, and go on: each sample once, the same bits as an unbroken run."""

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_tool import pipeline
from dflash_tool.store.lock import LOCK
from dflash_tool.store.manifest import read_manifest
from dflash_tool.store.reader import HiddenStore
from tests.warm import Warm

from .running import bytes_under, contents, extract_config, extract_words, wait_until

KILLS = 5


def test_killed_at_random_moments(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, warm: Warm,
    dflash: Callable[..., object],
) -> None:  # fmt: skip
    target, data = random_target(), token_rows(2000, longest=250)
    unbroken, out = tmp_path / "unbroken", tmp_path / "killed"
    pipeline.extract(extract_config(target, data, unbroken))
    whole = bytes_under(unbroken)
    rng = random.Random(0)
    moments = sorted(rng.uniform(0.02, 0.9) for _ in range(KILLS))
    killed_with_progress = 0
    for moment in moments:
        run = warm.start(extract_words(target, data, out))
        wait_until(run, lambda moment=moment: bytes_under(out) >= moment * whole)
        run.send_signal(signal.SIGKILL)
        _, err = run.communicate()
        assert run.returncode == -signal.SIGKILL, err
        killed_with_progress += any((out / "index").glob("b*.parquet"))
    assert killed_with_progress >= 3
    assert not read_manifest(out).complete
    last = warm.start([*extract_words(target, data, out), "--json"]).end()
    assert json.loads(last)["held_samples"] > 0
    assert read_manifest(out).complete
    assert not (out / LOCK).exists()
    assert not list(out.rglob(".tmp-*"))
    expected = contents(unbroken)
    ours = contents(out)
    assert ours.keys() == expected.keys()
    assert ours == expected
    assert dflash("stats", out, "--verify").code == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_in_order(
    random_target: Callable[..., Path],
    token_rows: Callable[..., Path],
    tmp_path: Path,
    warm: Warm,
    signum: int,
    code: int,
) -> None:
    """Ctrl-C and SIGTERM commit the open shards, say how to go on, and leave nothing behind."""
    target, data, out = random_target(), token_rows(3000, longest=250), tmp_path / "store"
    words = extract_words(target, data, out, commit_every=1000, shard_mib=1000)
    run = warm.start(words)
    wait_until(run, lambda: bytes_under(out / "shards") >= 1_000_000)
    run.send_signal(signum)
    _, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    assert "Traceback" not in err
    assert "run the same command to go on" in err
    store = HiddenStore.open(out)
    assert 0 < store.committed.sum() < len(store.samples)
    assert f"{store.committed.sum():,} of {len(store.samples):,} samples are committed" in err
    assert not list(out.rglob(".tmp-*"))
    assert not (out / LOCK).exists()
    rows = int(np.flatnonzero(store.committed)[0])
    store.read(rows, verify=True)
