"""`train` from several stores: what is refused, who is held out, and going on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_tool.store.reader import HiddenStore

from .train_kit import opened, rows_of, words_of

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
Extract = Callable[..., Path]


def test_duplicates_across_stores_are_on_one_side(extract: Extract, tmp_path: Path) -> None:
    a = extract()
    shutil.copytree(a, tmp_path / "copy")
    run = opened([a, extract(60, seed=1), tmp_path / "copy"], tmp_path / "run", weight=(1, 1.5, 2), epochs=1)
    ids = run.store.samples.ids
    contents = ids.copy()
    contents[:, 1] &= np.uint64(0xFFFFFFFF)
    sides = [{tuple(words) for words in contents[rows].tolist()} for rows in (run.train_rows, run.val_rows)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == len(run.val_rows) > 1
    seen = [int(row) for step in run.loader for batch in step for row in batch.rows]
    assert sorted(seen) == run.train_rows.tolist()


def test_a_weight_of_one_is_no_weight(extract: Extract, tmp_path: Path) -> None:
    plain, one, two = (
        opened([extract()], tmp_path / "run", **weight) for weight in ({}, {"weight": 1}, {"weight": (2,)})
    )
    assert plain.config == one.config
    assert plain.loader.state_dict() == one.loader.state_dict()
    assert plain.store.fingerprint == one.store.fingerprint != two.store.fingerprint
    assert len(two.train_rows) == 2 * len(plain.train_rows)


@pytest.mark.parametrize(
    ("other", "flags", "says"),
    [
        ({"family": "llama"}, [], ["target of", "a drafter serves one target"]),
        ({"store_dtype": "float32"}, [], ["store dtype of", "is bfloat16", "float32", "--store-dtype"]),
        ({"layers": (1, 2)}, [], ["--aux-layers is needed", "holds layers 1, 3", "1, 2", "of both: 1"]),
        ({"layers": (1, 2)}, ["--aux-layers", "1,3"], ["lacks layer 3", "it holds 1, 2"]),
        ({"mask_token_id": 94}, [], ["--mask-token-id is needed", "is 96", "94"]),
        ({}, ["--weight", 1], ["--weight: got 1 (1.0) for 2 stores", "one for each --store"]),
        ({}, ["--weight", 1, "--weight", -1], ["--weight: got -1.0", "greater than or equal to 0"]),
        ({}, ["--weight", 1, "--weight", "nan"], ["--weight: got nan", "finite"]),
        ({}, ["--weight", 0, "--weight", 0], ["--weight: got 0.0, 0.0", "above 0"]),
        (None, [], ["are the same store", "--weight 2"]),
    ],
)
def test_stores_that_do_not_fit_together(
    extract: Extract, tmp_path: Path, dflash: Run, other: dict[str, Any] | None, flags: list[object], says: list[str]
) -> None:
    a = extract()
    (tmp_path / "link").symlink_to(a)
    b = tmp_path / "link" if other is None else extract(**{"samples": 60, "seed": 1} | other)
    refused = dflash(*words_of([a, b], tmp_path / "run", *flags))
    said = " ".join(refused.err.split())
    assert refused.code == 2, said
    for part in says:
        assert part in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_its_own_stores_and_weights(extract: Extract, tmp_path: Path, dflash: Run) -> None:
    stores, out = [extract(), extract(60, seed=1)], tmp_path / "run"
    weights = ["--weight", 0.5, "--weight", 2]
    first = dflash(*words_of(stores, out, *weights, epochs=1))
    assert first.code == 0, first.err
    assert all(samples <= 16 for _, samples, _ in rows_of(out))
    again = dflash(*words_of(stores, out, *weights, "--json", epochs=1))
    assert json.loads(again.out)["steps"] == 0
    other = dflash(*words_of(stores, out, epochs=1))
    assert other.code == 2
    assert "--weight: the run has [0.5, 2.0], now [1.0, 1.0]" in " ".join(other.err.split())
    settings = (out / "train.yaml").read_bytes()
    turned = dflash(*words_of(stores[::-1], out, "--weight", 0.5, "--weight", 2, epochs=1))
    assert turned.code == 2
    assert "is of other stores" in " ".join(turned.err.split())
    assert (out / "train.yaml").read_bytes() == settings  # what is refused leaves the run alone


def test_eval_knows_what_a_run_on_several_stores_held_out(extract: Extract, tmp_path: Path, dflash: Run) -> None:
    from dflash_tool.evaluate.held_out import choose_samples

    stores = [extract(), extract(60, seed=1)]
    assert dflash(*words_of(stores, tmp_path / "run", "--weight", 0.5, "--weight", 2, epochs=1)).code == 0
    run = opened(stores, tmp_path / "run", weight=(0.5, 2), epochs=1)
    for place, root in enumerate(stores):
        chosen = choose_samples(tmp_path / "run" / "checkpoints" / "best", HiddenStore.open(root))
        mine, row_of = run.store.samples.store == place, run.store.samples.row
        assert chosen.known
        assert set(chosen.rows) == set(row_of[[row for row in run.val_rows if mine[row]]])
        assert set(chosen.trained) == set(row_of[[row for row in run.train_rows if mine[row]]])
    assert dflash(*words_of(stores[:1], tmp_path / "twice", "--weight", 2, epochs=1)).code == 0
    seen = dflash("eval", "--drafter", tmp_path / "twice" / "checkpoints" / "best", "--store", stores[0], "--json")
    assert json.loads(seen.out)["store"]["which"] == "held out when it was trained"
    other = choose_samples(tmp_path / "twice" / "checkpoints" / "best", HiddenStore.open(stores[1]))
    assert "trained on another store" in other.words


def test_a_store_that_lost_samples_is_refused(extract: Extract, tmp_path: Path, dflash: Run) -> None:
    store = tmp_path / "store"
    shutil.copytree(extract(), store)
    lost = min((store / "index").iterdir())
    lost.unlink()
    result = dflash(*words_of([store], tmp_path / "run"))
    assert result.code == 1
    assert "has lost" in " ".join(result.err.split())
