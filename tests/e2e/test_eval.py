"""`eval` from end to end, with a random target and a drafter that learned its greedy answers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_tool import pipeline
from dflash_tool.drafter.acceptance import Yield
from dflash_tool.drafter.model import DFlashDraftModel
from dflash_tool.evaluate import measure
from dflash_tool.store.reader import HiddenStore
from dflash_tool.trainer.metrics import read_metrics

from .running import small_run

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's


@pytest.fixture(scope="module")
def chats(random_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 prompts of 5 tokens with the target's greedy answers, of three lengths, in two files: the pattern of both."""
    target = AutoModelForCausalLM.from_pretrained(random_target()).eval()
    prompts = torch.randint(0, 95, (60, 5), generator=torch.Generator().manual_seed(0))
    made = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False)
    folder = tmp_path_factory.mktemp("chats")
    rows = [row[: 20 + number % 3 * 12].tolist() for number, row in enumerate(made)]
    for name, part in (("some", rows[:30]), ("more", rows[30:])):
        lines = [json.dumps({"input_ids": row, "loss_mask": [0] * 5 + [1] * (len(row) - 5)}) for row in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder / "*.jsonl"


@pytest.fixture(scope="module")
def run(random_target: Callable[..., Path], chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(random_target(), chats, tmp_path_factory.mktemp("eval"), epochs=20, val_fraction=0.2, lr=1e-2)


@pytest.fixture
def words(run: Path, random_target: Callable[..., Path], chats: Path) -> list[object]:
    """What generation on held-out prompts needs."""
    inputs = ["--drafter", run / "checkpoints" / "best", "--store", run.parent / "store"]
    return ["eval", *inputs, "--target", random_target(), "--data", chats, "--max-new-tokens", 24]


def test_generation_walk_and_our_decode_agree(words: list[object], run: Path, dflash: Run) -> None:
    """The issue's figure in small: within 3 % of each other, greedy answers the target's own, no prompt trained on."""
    result = dflash(*words, "--temperature", 0.7, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    seen = document["generation"]
    assert document["failures"] == []
    greedy = seen["greedy"]
    assert greedy["tau"] == (greedy["new_tokens"] - seen["prompts"]) / greedy["target_forwards"]
    assert greedy["tau"] > 1.1
    assert seen["walk_tau"] == pytest.approx(greedy["tau"], rel=0.03)
    assert seen["our_decode_tau"] == pytest.approx(greedy["tau"], rel=0.03)
    by_slot = seen["accepted_by_slot"]
    assert by_slot == sorted(by_slot, reverse=True)
    assert 1 + sum(by_slot) >= seen["our_decode_tau"]  # the same but for what the answers' ends cut off
    assert 1 + sum(by_slot) == pytest.approx(seen["our_decode_tau"], rel=0.15)
    assert seen["equal_answers"] + sum(each["near_tie"] for each in seen["partings"]) == seen["prompts"]
    assert min(greedy["tokens_per_second"], greedy["plain_tokens_per_second"], greedy["speedup"]) > 0
    assert seen["sampled"]["tau"] >= 1
    assert seen["sampled"]["distinct_4grams"] > greedy["distinct_4grams"]

    store = HiddenStore.open(run.parent / "store")
    config = json.loads((run / "checkpoints" / "best" / "state.json").read_text())["config"]
    from dflash_tool.loader import split_validation

    _, held_out = split_validation(store.samples.ids, store.committed, seed=config["seed"], fraction=0.2)
    assert seen["prompts"] == len(held_out)
    assert (
        f"prompts left out: {len(store.samples) - len(held_out)} that the drafter was trained on" in document["notes"]
    )


def test_a_store_alone_gives_what_training_validated(run: Path, dflash: Run) -> None:
    best = run / "checkpoints" / "best"
    result = dflash("eval", "--drafter", best, "--store", run.parent / "store", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["generation"] is None
    graded, step = document["store"], json.loads((best / "state.json").read_text())["step"]
    (row,) = [row for row in read_metrics(run) if row["kind"] == "validation" and row["step"] == step]
    for name in ("walk_tau", "anchor_tau", "accuracy_by_slot"):
        assert graded[name] == pytest.approx(row[name])
    assert graded["by_bucket"].keys() == row["by_bucket"].keys()
    assert graded["held_out"]
    assert {Path(name).name for name in graded["by_source"]} == {"some.jsonl", "more.jsonl"}
    for groups in (graded["by_source"].values(), graded["by_bucket"].values()):
        accepted = sum(group["anchors"] * group["anchor_tau"] for group in groups)
        assert accepted / sum(group["anchors"] for group in groups) == pytest.approx(graded["anchor_tau"])
    few = json.loads(dflash("eval", "--drafter", best, "--store", run.parent / "store", "--json", "--limit", 3).out)
    assert few["store"]["samples"] == 3


def test_slots_accepted_add_up_to_anchor_tau(run: Path) -> None:
    from dflash_tool.schemas.evaluate import EvalConfig

    graded = pipeline.evaluate(EvalConfig(drafter=run / "checkpoints" / "best", store=run.parent / "store")).graded
    assert graded is not None
    anchors = sum(anchor.forwards for anchor, _ in graded.found.by_bucket.values())
    assert 1 + graded.found.reached.sum() / anchors == pytest.approx(graded.found.anchor_tau)
    assert (graded.found.reached <= graded.found.right).all()
    assert (graded.found.right <= graded.found.counted).all()


def test_it_says_which_samples_where_the_folder_does_not_tell(run: Path, tmp_path: Path, dflash: Run) -> None:
    store = run.parent / "store"
    pipeline.export(run, tmp_path / "ours")
    ours = json.loads(dflash("eval", "--drafter", tmp_path / "ours", "--store", store, "--json").out)["store"]
    assert (ours["held_out"], ours["which"]) == (True, "held out when it was trained")

    shutil.copytree(tmp_path / "ours", tmp_path / "foreign", ignore=shutil.ignore_patterns("training.json"))
    foreign = json.loads(dflash("eval", "--drafter", tmp_path / "foreign", "--store", store, "--json").out)["store"]
    assert not foreign["held_out"]
    assert "doesn't tell what it was trained on" in foreign["which"]
    assert foreign["samples"] > ours["samples"]

    record = json.loads((tmp_path / "ours" / "training.json").read_text())
    record["store"]["settings_fingerprint"] = "0" * 32
    (tmp_path / "ours" / "training.json").write_text(json.dumps(record))
    other = json.loads(dflash("eval", "--drafter", tmp_path / "ours", "--store", store, "--json").out)["store"]
    assert "trained on another store" in other["which"]

    record = json.loads((run / "checkpoints" / "best" / "state.json").read_text())
    record["config"]["val_fraction"] = 0.0
    shutil.copytree(run / "checkpoints" / "best", tmp_path / "whole")
    (tmp_path / "whole" / "state.json").write_text(json.dumps(record))
    whole = json.loads(dflash("eval", "--drafter", tmp_path / "whole", "--store", store, "--json").out)["store"]
    assert (whole["held_out"], whole["which"]) == (False, "NOT held out: its run trained on the whole store")


def test_what_people_see(words: list[object], dflash: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = dflash(*words, "--limit", 4, "--temperature", 0.5)
    assert result.code == 0, result.err
    text = " ".join(result.out.split())
    assert "held out when it was trained" in text
    assert "In generation: 4 prompts" in text
    assert "times as fast" in text
    assert "with a bigram table on the same answers" in text
    assert "4 of 4 answers equal plain greedy's" in text
    assert "Sampled at temperature 0.5" in text
    assert max(map(len, result.out.splitlines())) <= 80


def test_a_drafter_that_is_served_otherwise_than_trained_is_seen(
    words: list[object], dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In generation it doesn't see the context it was trained to see."""
    forward = DFlashDraftModel.forward
    monkeypatch.setattr(
        DFlashDraftModel, "forward",
        lambda self, noise_embeds, context_hidden_states, *args, **options:
            forward(self, noise_embeds, -context_hidden_states, *args, **options),
    )  # fmt: skip
    result = dflash(*words, "--json")
    assert result.code == 1
    document = json.loads(result.out)
    assert "apart, more than the 3%" in document["failures"][0]
    assert document["generation"]["equal_answers"] == document["generation"]["prompts"]  # it is lossless all the same


def test_an_answer_that_is_not_the_target_s_is_seen(
    words: list[object], dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_tool.evaluate.generation import Answer, Generation

    drafted = Generation.drafted

    def wrong(self: Generation, *args: Any) -> Answer:
        answer = drafted(self, *args)
        tokens = answer.tokens.clone()
        tokens[4] = (tokens[4] + 7) % 95
        return Answer(tokens, answer.forwards, answer.seconds)

    monkeypatch.setattr(Generation, "drafted", wrong)
    monkeypatch.setattr(measure, "walk_answer", lambda *args: Yield(1, 1))
    result = dflash(*words, "--limit", 3)
    assert result.code == 1
    text = " ".join(result.out.split())
    assert "0 of 3 answers equal plain greedy's" in text
    assert "token 4 is" in text
    assert "3 of 3 greedy answers are not the target's own, and no near-tie explains it" in text


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"--drafter": None}, 2, "--drafter is needed"),
        ({"--drafter": "nowhere"}, 1, "no drafter in nowhere"),
        ({"--drafter": "run"}, 1, "this is a run: its drafter is run/checkpoints/best"),
        ({"--target": None}, 2, "--target and --data go together"),
        ({"--data": None}, 2, "--target and --data go together"),
        ({"--target": None, "--data": None, "--store": None}, 2, "nothing to measure on"),
        ({"--target": "nowhere"}, 1, "no target at nowhere"),
        ({"--store": "nowhere"}, 1, "is no store"),
        ({"--data": "empty.jsonl"}, 1, "no rows in the data"),
        ({"--data": "nowhere.jsonl"}, 1, "nowhere.jsonl"),
        ({"--max-new-tokens": "253"}, 2, "--max-new-tokens 253: this target has positions for 256"),
        ({"--limit": "0"}, 2, "--limit"),
        ({"--temperature": "-1"}, 2, "--temperature"),
        ({"--template-arg": "x"}, 2, "--template-arg"),
    ],
)
def test_wrong_options(
    words: list[object], tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str | None], code: int, says: str,
) -> None:  # fmt: skip
    options = dict(zip(words[1::2], words[2::2], strict=True)) | changed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    result = dflash("eval", *(word for name, value in options.items() if value is not None for word in (name, value)))
    assert result.code == code, result.err
    assert says in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert result.out == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.jsonl", "run"]


def test_a_drafter_of_another_target_is_refused(
    words: list[object], run: Path, random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path,
    dflash: Run,
) -> None:  # fmt: skip
    target = random_target(layers=4)
    here = words.index("--target") + 1
    refused = dflash(*words[:here], target, *words[here + 1 :])
    assert refused.code == 1
    assert "number of target layers: the drafter says 6, the target 4" in " ".join(refused.err.split())
    other = random_target(tied=False)  # of the same sizes
    refused = dflash(*words[:here], other, *words[here + 1 :])
    assert refused.code == 1
    assert "--store is of another target than --target" in " ".join(refused.err.split())
    store = tmp_path / "store"
    made = dflash("extract", "--target", target, "--data", token_rows(20), "--out", store, "--layers", "1,2")
    assert made.code == 0
    refused = dflash("eval", "--drafter", run / "checkpoints" / "best", "--store", store)
    assert refused.code == 1
    assert "is no drafter for the target of" in " ".join(refused.err.split())


def test_a_store_without_its_layers_is_refused(
    run: Path, random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    store = tmp_path / "store"
    assert (
        dflash("extract", "--target", random_target(), "--data", token_rows(20), "--out", store, "--layers", 1).code
        == 0
    )
    refused = dflash("eval", "--drafter", run / "checkpoints" / "best", "--store", store)
    assert refused.code == 1
    assert "lacks layer 2, 3, which the drafter sees; it holds 1" in " ".join(refused.err.split())


def test_no_prompt_that_it_has_not_been_trained_on(words: list[object], run: Path, tmp_path: Path, dflash: Run) -> None:
    """Only training conversations in the data: refused, with the count."""
    store = HiddenStore.open(run.parent / "store")
    from dflash_tool.evaluate.held_out import choose_samples

    row = int(choose_samples(run / "checkpoints" / "best", store).trained[0])
    tokens, mask = store.samples.tokens(row), store.samples.mask(row)
    (tmp_path / "seen.jsonl").write_text(json.dumps({"input_ids": tokens.tolist(), "loss_mask": mask.tolist()}) + "\n")
    here = words.index("--data") + 1
    refused = dflash(*words[:here], tmp_path / "seen.jsonl", *words[here + 1 :])
    assert refused.code == 1
    assert "no prompt to generate from (1 were trained on, 0 leave no room" in " ".join(refused.err.split())
    assert np.array_equal(mask[:5], np.zeros(5))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "qwen3_moe", "llava", "bloom"])
def test_other_families(family: str, random_target: Callable[..., Path], tmp_path: Path, dflash: Run) -> None:
    """Scaled embeddings, learned positions, experts, a vision tower; Bloom has no positions to give to a drafter."""
    ids = np.random.default_rng(0).integers(0, 90, (20, 24))
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"input_ids": row, "loss_mask": [0] * 6 + [1] * 18}) + "\n" for row in ids.tolist())
    )
    target = random_target(family)
    drafter = small_run(target, data, tmp_path, max_steps=1) / "checkpoints" / "last"
    result = dflash(
        "eval", "--drafter", drafter, "--target", target, "--data", data, "--limit", 2, "--max-new-tokens", 12, "--json"
    )
    if family == "bloom":
        assert result.code == 1
        assert "transformers' DFlash generation can't run BloomForCausalLM" in result.err
        assert "Traceback" not in result.err
        return
    assert result.code == 0, result.err
    seen = json.loads(result.out)["generation"]
    assert seen["greedy"]["new_tokens"] > 2
    assert seen["walk_tau"] == pytest.approx(seen["greedy"]["tau"], rel=0.03)
