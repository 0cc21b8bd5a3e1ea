"""Runs that are really killed, and go on: each sample once, the same bits as an unbroken run."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_tool.store.lock import LOCK
from dflash_tool.store.manifest import read_manifest
from dflash_tool.store.reader import HiddenStore

KILLS = 5
_ENV = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _words(target: Path, data: Path, out: Path) -> list[str]:
    options = {
        "--target": target, "--data": data, "--out": out, "--batch-tokens": 512, "--inflight-gib": 0.01,
        "--shard-mib": 0.4, "--commit-every": 0.3,
    }  # fmt: skip
    return [sys.executable, "-m", "dflash_tool", "extract", *(str(part) for pair in options.items() for part in pair)]


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are renamed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118
    return total


def _wait_until(run: "subprocess.Popen[Any]", reached: Callable[[], bool]) -> None:
    """Look again and again until the run has come far enough, or has ended."""
    while run.poll() is None and not reached():
        with suppress(subprocess.TimeoutExpired):
            run.wait(0.01)


def _contents(out: Path) -> dict[bytes, bytes]:
    """Sample id -> the bytes of all its layers, hashes checked."""
    store = HiddenStore.open(out)
    assert store.committed.all()
    assert len(store.index) == len(store.samples)  # each exactly once
    return {
        store.samples.sample_id(row): b"".join(v.tobytes() for v in store.read(row, verify=True).values())
        for row in range(len(store.samples))
    }


def test_killed_at_random_moments(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Callable[..., object]
) -> None:
    target, data = random_target(), token_rows(3000, longest=250)
    unbroken, out = tmp_path / "unbroken", tmp_path / "killed"
    subprocess.run(_words(target, data, unbroken), env=_ENV, check=True, capture_output=True)
    whole = _bytes_under(unbroken)
    rng = random.Random(0)
    moments = sorted(rng.uniform(0.02, 0.9) for _ in range(KILLS))
    killed_with_progress = 0
    for moment in moments:
        run = subprocess.Popen(_words(target, data, out), env=_ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _wait_until(run, lambda moment=moment: _bytes_under(out) >= moment * whole)
        run.send_signal(signal.SIGKILL)
        _, err = run.communicate()
        assert run.returncode == -signal.SIGKILL, err.decode()
        killed_with_progress += any((out / "index").glob("b*.parquet"))
    assert killed_with_progress >= 3
    assert not read_manifest(out).complete
    last = subprocess.run([*_words(target, data, out), "--json"], env=_ENV, check=True, capture_output=True)
    assert json.loads(last.stdout)["held_samples"] > 0
    assert read_manifest(out).complete
    assert not (out / LOCK).exists()
    assert not list(out.rglob(".tmp-*"))
    expected = _contents(unbroken)
    ours = _contents(out)
    assert ours.keys() == expected.keys()
    assert ours == expected
    assert dflash("stats", out, "--verify").code == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_in_order(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, signum: int, code: int
) -> None:
    """Ctrl-C and SIGTERM commit the open shards, say how to go on, and leave nothing behind."""
    target, data, out = random_target(), token_rows(3000, longest=250), tmp_path / "store"
    words = _words(target, data, out)
    words[words.index("--commit-every") + 1] = "1000"
    words[words.index("--shard-mib") + 1] = "1000"
    run = subprocess.Popen(words, env=_ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _wait_until(run, lambda: _bytes_under(out / "shards") >= 1_000_000)
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
