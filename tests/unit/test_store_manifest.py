"""The manifest comes back as written; damage, other versions and other settings are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_tool.errors import StoreError
from dflash_tool.schemas.manifest import SETTINGS, DataFile, Manifest
from dflash_tool.store.manifest import (
    _document,
    check_same_settings,
    differences,
    read_manifest,
    settings_fingerprint,
    write_manifest,
)
from tests.store_kit import make_manifest, write_samples


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    made = make_manifest(write_samples(tmp_path, [3, 9], (16,)), (16,), (0, 2), 8, "bfloat16")
    write_manifest(tmp_path, made)
    return made


def test_it_comes_back(tmp_path: Path, manifest: Manifest) -> None:
    assert read_manifest(tmp_path) == manifest
    changed = manifest.model_copy(update={"complete": True, "template_args": {"á": [1, None, 0.5]}})
    write_manifest(tmp_path, changed)
    assert read_manifest(tmp_path) == changed
    assert not list(tmp_path.glob(".tmp-*"))


def test_every_setting_is_a_field(manifest: Manifest) -> None:
    assert differences(manifest, manifest) == []
    assert len(SETTINGS) == len({name.partition(".")[0] for name in SETTINGS}) + 2  # three of the target


def test_other_settings_are_refused_with_both_values(tmp_path: Path, manifest: Manifest) -> None:
    target = manifest.target.model_copy(update={"weights_fingerprint": "abc"})
    new = manifest.model_copy(update={"seed": 5, "target": target, "template_args": {"thinking": True}})
    assert [difference.name for difference in differences(manifest, new)] == [
        "target.weights_fingerprint",
        "template_args",
        "seed",
    ]
    with pytest.raises(StoreError) as caught:
        check_same_settings(tmp_path, manifest, new)
    text = str(caught.value)
    assert "--seed: the store has 0, this run 5" in text
    assert '--target: target.weights_fingerprint: the store has "0", this run "abc"' in text
    assert "--template-arg: template_args.thinking: the store has null, this run true" in text
    assert "choose another --out" in text
    check_same_settings(tmp_path, manifest, manifest.model_copy(update={"complete": True, "created": "now"}))


def test_of_the_data_only_the_changed_file_is_shown(tmp_path: Path, manifest: Manifest) -> None:
    files = [DataFile(path=f"{name}.jsonl", bytes=1, xxh3=name) for name in "abc"]
    old = manifest.model_copy(update={"data": (files[0], files[1])})
    with pytest.raises(StoreError) as caught:
        check_same_settings(tmp_path, old, manifest.model_copy(update={"data": (files[0], files[2])}))
    assert "b.jsonl" in str(caught.value)
    assert "a.jsonl" not in str(caught.value)


def test_the_fingerprint_is_of_the_settings_alone(manifest: Manifest) -> None:
    same = manifest.model_copy(update={"complete": True, "quarantined": ("00",)})
    assert settings_fingerprint(same) == settings_fingerprint(manifest)
    assert settings_fingerprint(manifest.model_copy(update={"seed": 1})) != settings_fingerprint(manifest)


def rewritten(root: Path, **changes: Any) -> None:
    """Put other values into the document with a checksum that fits."""
    path = root / "manifest.json"
    fields = json.loads(path.read_text()) | changes
    fields.pop("xxh3")
    path.write_bytes(_document(fields))


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is no store: it has no manifest\.json; give a folder"):
        read_manifest(tmp_path)


def test_another_version_is_named(tmp_path: Path, manifest: Manifest) -> None:
    rewritten(tmp_path, format_version=2)
    with pytest.raises(StoreError, match="of format version 2, this dflash-tool reads 1"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_ids": ["../../etc"]}, "layer_ids.0"),
        ({"layer_ids": [-1]}, "layer_ids.0"),
        ({"store_dtype": "object"}, "store_dtype"),
        ({"edges": []}, "edges"),
        ({"surprise": 1}, "surprise"),
        ({"target": None}, "target"),
    ],
)
def test_hostile_values_are_refused(tmp_path: Path, manifest: Manifest, changes: dict[str, Any], named: str) -> None:
    rewritten(tmp_path, **changes)
    with pytest.raises(StoreError, match=f"damaged: {named}: "):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"format": "other"}', b'{"a": 1e999}'],
)
def test_other_content_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"manifest\.json is (damaged: it isn't JSON|no manifest of ours)"):
        read_manifest(tmp_path)


def test_a_changed_number_is_damage(tmp_path: Path, manifest: Manifest) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(StoreError, match="isn't as it was written, by the checksum"):
        read_manifest(tmp_path)


def test_a_link_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").symlink_to(tmp_path / "manifest.json")
    with pytest.raises(StoreError, match="holds no links"):
        read_manifest(tmp_path / "other")
