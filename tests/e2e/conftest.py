"""A finished store, made once, and copies of it to spoil."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .running import Store


@pytest.fixture(scope="session")
def finished(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Store:
    """A finished store of 60 samples and two layers; not to be touched."""
    from dflash_tool import pipeline
    from dflash_tool.schemas.config import ExtractConfig

    out = tmp_path_factory.mktemp("finished") / "store"
    target, data = random_target(), token_rows(60)
    pipeline.extract(ExtractConfig(target=str(target), data=(data,), out=out, layers=(1, 2)))
    return Store(["extract", "--target", target, "--data", data, "--layers", "1,2"], out)


@pytest.fixture
def copied(finished: Store, tmp_path: Path) -> Store:
    """A copy of it, to be changed."""
    out = tmp_path / "store"
    shutil.copytree(finished.out, out)
    return Store(finished.words, out)
