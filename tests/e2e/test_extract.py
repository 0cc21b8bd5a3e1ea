"""`extract` from end to end on small targets: what is stored, what is said, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
import zarr
from transformers import AutoModelForCausalLM

from dflash_tool import pipeline
from dflash_tool.errors import DflashError
from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.store.lock import RunLock
from dflash_tool.store.manifest import read_manifest
from dflash_tool.store.reader import HiddenStore
from dflash_tool.target import write_head

from .running import contents

Run = Callable[..., "CommandResult"]  # noqa: F821 - conftest's
SMALL = ("--batch-tokens", 256, "--inflight-gib", 0.1)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("store_dtype", ["float32", "bfloat16", "float16"])
def test_every_stored_layer_equals_a_batch_of_one(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, family: str, store_dtype: str
) -> None:
    folder = random_target(family)
    pipeline.extract(
        ExtractConfig(
            target=str(folder),
            data=(token_rows(60),),
            out=tmp_path / "store",
            layers=(0, 2, 4),
            batch_tokens=256,
            store_dtype=store_dtype,
            target_device="cpu",
        )
    )
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    store = HiddenStore.open(tmp_path / "store")
    assert store.committed.all()
    for row in range(len(store.samples)):
        stored = store.read(row, verify=True)
        with torch.no_grad():
            ids = torch.from_numpy(store.samples.tokens(row).astype(np.int64))[None]
            expected = whole(ids, output_hidden_states=True).hidden_states
        for layer in (0, 2, 4):
            exact = expected[layer + 1][0]
            if store_dtype == "float32":
                scale = exact.abs().max().item()
                np.testing.assert_allclose(stored[layer], exact.numpy(), rtol=1e-5, atol=1e-5 * scale)
            else:
                dtype = torch.bfloat16 if store_dtype == "bfloat16" else torch.float16
                ours = torch.from_numpy(stored[layer]).view(dtype).float()
                step = 2.0**-8 if store_dtype == "bfloat16" else 2.0**-11  # half a unit in the last place
                assert bool(((ours - exact).abs() <= exact.abs() * step * 1.01 + 1e-5).all())


def test_plain_zarr_reads_what_our_reader_gives(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    out = tmp_path / "store"
    dflash("extract", "--target", random_target(), "--data", token_rows(40), "--out", out, "--layers", "1,3", *SMALL)
    store = HiddenStore.open(out)
    seen = 0
    for place in range(len(store.index)):
        name = store.index.shards[store.index.shard[place]]
        start, length = int(store.index.row_start[place]), int(store.index.length[place])
        group = zarr.open_group(out / "shards" / f"{name}.zarr", mode="r")
        for layer in (1, 3):
            array = group[f"hidden/{layer}"]
            assert array.attrs["torch_dtype"] == "bfloat16"
            ours = store.read(store.index.sample_ids[place].as_py())[layer]
            np.testing.assert_array_equal(array[start : start + length], ours)
        seen += length
    assert seen == read_manifest(out).tokens


def test_dry_run_says_what_then_happens(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    out = tmp_path / "store"
    words = ("extract", "--target", random_target(), "--data", token_rows(2000), "--out", out, *SMALL, "--json")
    said = dflash(*words, "--dry-run")
    assert said.code == 0
    assert not out.exists()
    plan = json.loads(said.out)
    done = dflash(*words)
    assert done.code == 0
    result = json.loads(done.out)
    stats = json.loads(dflash("stats", out, "--json").out)
    assert plan["samples"] == result["samples"] == stats["samples"] == 2000
    assert plan["tokens"] == stats["tokens"] == result["run"]["real_tokens"]
    assert plan["padded_tokens"] == result["run"]["padded_tokens"]
    assert [(b["samples"], b["tokens"], b["upper"]) for b in plan["buckets"]] == [
        (b["samples"], b["tokens"], b["upper"]) for b in stats["buckets"]
    ]
    on_disk = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert abs(plan["disk_bytes"]["total"] / on_disk - 1) < 0.01
    assert result["run"]["peak_inflight_bytes"] <= plan["peak_inflight_bytes"] <= plan["inflight_limit_bytes"]


def test_shards_are_committed_at_their_age(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    """While the run goes on, not only at its end: with next to no age, each batch is a shard."""
    out = tmp_path / "store"
    words = ("extract", "--target", random_target(), "--data", token_rows(60), "--out", out, "--layers", 1, *SMALL)
    batches = json.loads(dflash(*words, "--dry-run", "--json").out)["batches"]
    assert dflash(*words, "--commit-every", 1e-9).code == 0
    assert json.loads(dflash("stats", out, "--json").out)["shards"] == batches > 6


def test_a_run_that_lost_its_lock_stops(
    random_target: Callable[..., Path],
    token_rows: Callable[..., Path],
    tmp_path: Path,
    dflash: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "store"
    words = ("extract", "--target", random_target(), "--data", token_rows(60), "--out", out, "--layers", 1, *SMALL)
    acquire = RunLock.acquire
    with monkeypatch.context() as patched:
        patched.setattr(RunLock, "acquire", lambda lock: (acquire(lock), setattr(lock, "lost", True)))
        stopped = dflash(*words)
    assert stopped.code == 1
    assert "of this run is gone or has been taken over" in stopped.err
    assert 0 < HiddenStore.open(out).committed.sum() < 60
    assert dflash(*words).code == 0
    assert read_manifest(out).complete


def test_shards_hold_no_padding(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    out = tmp_path / "store"
    rows = token_rows(1500)
    dflash("extract", "--target", random_target(), "--data", rows, "--out", out, *SMALL, "--shard-mib", 0.5)
    stats = json.loads(dflash("stats", out, "--json").out)
    manifest = read_manifest(out)
    assert stats["shards"] > len(manifest.edges)
    real = manifest.tokens * manifest.row_bytes
    on_disk = sum(file.stat().st_size for file in (out / "shards").rglob("*") if file.is_file())
    assert on_disk <= real * 1.005 + 63 * manifest.row_bytes * stats["shards"]
    assert stats["shard_bytes"] == on_disk == real + stats["overhead_bytes"]


def test_head_lets_a_drafter_train_without_the_target(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    folder, out = random_target(), tmp_path / "store"
    dflash("extract", "--target", folder, "--data", token_rows(5), "--out", out, *SMALL)
    from transformers import AutoTokenizer

    from dflash_tool.target import open_target

    write_head(AutoModelForCausalLM.from_pretrained(folder), open_target(str(folder)), tmp_path / "head")
    for name in ("head.safetensors", "config.json"):
        assert (out / "head" / name).read_bytes() == (tmp_path / "head" / name).read_bytes()
    assert AutoTokenizer.from_pretrained(out / "head").get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()


def test_settings_from_a_file_and_from_options(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    """Options win over the file; what was decided lies in the store and gives the same store again."""
    out, again = tmp_path / "store", tmp_path / "again"
    settings = {"target": str(random_target()), "data": str(token_rows(30)), "layers": [1, 2], "batch-tokens": 256}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert dflash("extract", "--config", tmp_path / "run.yaml", "--out", out, "--layers", "3").code == 0
    assert read_manifest(out).layer_ids == (3,)
    saved = yaml.safe_load((out / "extract.yaml").read_text())
    assert saved["layers"] == [3]
    assert saved["batch_tokens"] == 256
    assert dflash("extract", "--config", out / "extract.yaml", "--out", again).code == 0
    first, second = HiddenStore.open(out), HiddenStore.open(again)
    for row in range(30):
        np.testing.assert_array_equal(first.read(row)[3], second.read(row)[3])


def test_quarantine_names_samples_and_stops_beyond_the_limit(
    random_target: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    """A target whose layer overflows for one token: that sample is set aside, everything else is stored."""
    folder = tmp_path / "target"
    model = AutoModelForCausalLM.from_pretrained(random_target(tied=False))
    model.get_input_embeddings().weight.data[7] = float("inf")
    model.save_pretrained(folder)
    for file in random_target().glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    rows = [{"input_ids": [1, 2, 3 + n % 3, 4], "loss_mask": [0, 1, 1, 1]} for n in range(9)]
    rows.append({"input_ids": [1, 7, 3], "loss_mask": [1, 1, 1]})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("extract", "--target", folder, "--data", data, *SMALL)
    stopped = dflash(*words, "--out", tmp_path / "one")
    assert stopped.code == 1
    assert f"{data}:10" in stopped.err
    assert "--max-bad" in stopped.err
    out = tmp_path / "two"
    assert dflash(*words, "--out", out, "--max-bad", 0.1).code == 0
    store = HiddenStore.open(out)
    assert store.committed.sum() == 9
    bad = store.samples.sample_id(int(np.flatnonzero(~store.committed)[0]))
    assert store.manifest.quarantined == (bad.hex(),)
    assert dflash("stats", out, "--verify").code == 0
    assert "Nothing to do" in dflash(*words, "--out", out, "--max-bad", 0.1).out


def test_json_is_one_document_and_nothing_else(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    words = ("extract", "--target", random_target(), "--data", token_rows(5), "--out", tmp_path / "store", *SMALL)
    done = dflash(*words, "--json")
    assert json.loads(done.out)["run"]["samples"] == 5
    again = dflash(*words, "--json")
    assert json.loads(again.out)["run"] is None
    assert json.loads(dflash("stats", tmp_path / "store", "--verify", "--json").out)["damage"] == []


def test_several_targets_give_the_same_store(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    """Three replicas share the batches; each batch gives the same rows whoever runs it (one torch thread each)."""
    words = ("extract", "--target", random_target(), "--data", token_rows(300), *SMALL, "--json")
    one = json.loads(dflash(*words, "--out", tmp_path / "one").out)
    three = json.loads(dflash(*words, "--out", tmp_path / "three", "--targets", 3).out)
    assert len(one["run"]["targets"]) == 1
    assert len(three["run"]["targets"]) == 3
    assert sum(three["run"]["targets"].values()) == one["run"]["real_tokens"]
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    named = ("--target-device", "cpu", "--target-device", "cpu", "--out", tmp_path / "named")
    assert len(json.loads(dflash(*words, *named).out)["run"]["targets"]) == 2
    assert contents(tmp_path / "one") == contents(tmp_path / "named")


def test_final_hidden_is_the_last_layer_before_the_norm(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run
) -> None:
    folder, out = random_target(), tmp_path / "store"
    words = ("extract", "--target", folder, "--data", token_rows(20), "--out", out, "--layers", "1", *SMALL)
    assert dflash(*words, "--final-hidden", "--store-dtype", "float32").code == 0
    store = HiddenStore.open(out)
    assert store.layers == (1, "final")
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    for row in range(20):
        final = torch.from_numpy(store.read(row)["final"])
        ids = torch.from_numpy(store.samples.tokens(row).astype(np.int64))[None]
        with torch.no_grad():
            expected = whole(ids, output_hidden_states=True).hidden_states[-1][0]
            normed = whole.model.norm(final)
        torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-5)
    assert dflash("stats", out, "--verify").code == 0
    refused = dflash(*words, "--store-dtype", "float32")
    assert refused.code == 1
    assert "--final-hidden" in refused.err


def test_a_target_that_fails_stops_everybody_with_the_first_error(
    random_target: Callable[..., Path], token_rows: Callable[..., Path], tmp_path: Path, dflash: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from dflash_tool.errors import TargetError
    from dflash_tool.target import TargetModel

    out, captured, capture = tmp_path / "store", 0, TargetModel.capture

    def fail_later(self: TargetModel, *args: object) -> object:
        nonlocal captured
        captured += 1
        if captured == 5:
            raise TargetError("the device is gone")
        return capture(self, *args)

    words = ("extract", "--target", random_target(), "--data", token_rows(300), "--out", out, "--targets", 2, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(TargetModel, "capture", fail_later)
        stopped = dflash(*words)
    assert stopped.code == 1
    assert stopped.err.count("the device is gone") == 1
    assert "Traceback" not in stopped.err
    assert dflash(*words).code == 0
    assert HiddenStore.open(out).committed.all()
    assert dflash("stats", out, "--verify").code == 0


def test_prepared_samples_are_reused_until_something_changes(
    random_target: Callable[..., Path], data: Path, tmp_path: Path, dflash: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any shard is committed: the same inputs are not read again; other content, template or length are."""
    from dflash_tool import lifecycle

    prepared: list[object] = []
    prepare = lifecycle.prepare_samples

    def count(*args: object) -> object:
        prepared.append(args)
        return prepare(*args)

    def stop(*_args: object, **_named: object) -> None:
        raise DflashError("stopped before the first shard")

    monkeypatch.setattr(lifecycle, "prepare_samples", count)
    monkeypatch.setattr("dflash_tool.pipeline.extraction.load_targets", stop)
    rows = tmp_path / "chats.jsonl"
    rows.write_text((data / "openai.jsonl").read_text())
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    words = [
        "extract",
        "--target",
        random_target(),
        "--data",
        rows,
        "--out",
        tmp_path / "store",
        "--chat-template",
        template,
    ]

    def run(*more: object) -> int:
        assert "stopped before the first shard" in dflash(*words, *more).err
        return len(prepared)

    assert run() == 1
    assert run() == 1
    assert run("--seed", 3) == 1
    assert run("--buckets", 2) == 2  # the edges stand in samples.arrow
    assert run("--buckets", 2) == 2
    assert run("--buckets", 2, "--max-length", 40) == 3
    template.write_text(template.read_text() + "{# another one #}")
    assert run("--buckets", 2, "--max-length", 40) == 4
    rows.write_text(rows.read_text().replace("rivers", "lakes"))
    assert run("--buckets", 2, "--max-length", 40) == 5
