"""A finished store, made once, and copies of it to spoil; stores of other targets and sizes, each made once."""

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


@pytest.fixture(scope="session")
def extract(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Make a store of so many samples, layers 1 and 3 unless it says otherwise."""
    from dflash_tool import pipeline
    from dflash_tool.schemas.config import ExtractConfig

    made: dict[str, Path] = {}

    def make(samples: int = 100, *, family: str = "qwen3", seed: int = 0, **changed: object) -> Path:
        key = f"{samples} {family} {seed} {changed}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("extracted") / "store"
            data = token_rows(samples, seed=seed)
            options = {"layers": (1, 3), "buckets": 3, **changed}
            pipeline.extract(
                ExtractConfig(target=str(random_target(family)), data=(data,), out=made[key], **options)  # type: ignore[arg-type]
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def store(extract: Callable[..., Path]) -> Path:
    """100 samples of uneven lengths, layers 1 and 3: 6 steps of 16 an epoch; not to be touched."""
    return extract(100)
