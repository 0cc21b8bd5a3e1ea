"""`manifest.json`: read, written, and compared with the settings of a later run.

The document carries its own checksum (`xxh3`, over the canonical JSON of the rest), so that a flipped bit in
a number isn't taken for another setting. It is one for machines: who changes it by hand makes it unreadable.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from pydantic import ValidationError

from dflash_tool.errors import StoreError
from dflash_tool.schemas.manifest import FORMAT_VERSION, SETTINGS, Manifest
from dflash_tool.store.files import disk_errors, read_regular, replace_file
from dflash_tool.store.layout import MANIFEST

_LIMIT_BYTES = 1 << 30
_CHECKSUM = "xxh3"


class DamagedManifestError(StoreError):
    """`manifest.json` isn't as it was written; `extract` with the same settings makes it again."""


class Difference(NamedTuple):
    """One setting that differs: its name in the manifest, the option that sets it, both values."""

    name: str
    option: str
    old: Any
    new: Any


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write `manifest.json` atomically and durably."""
    with disk_errors(root / MANIFEST, "write"):
        replace_file(root / MANIFEST, _document(manifest.model_dump(mode="json")))


def read_manifest(root: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises `StoreError` if it is missing, damaged, of another format version, or not a manifest.
    """
    path = root / MANIFEST
    try:
        with disk_errors(path, "read"):
            data = read_regular(path, _LIMIT_BYTES)
    except StoreError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            raise StoreError(f"{root} is no store but a file; give the folder that extract made") from None
        if isinstance(error.__cause__, FileNotFoundError):
            text = f"{root} is no store: it has no {MANIFEST}; give a folder that extract made"
            raise StoreError(text) from None
        raise
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it isn't JSON ({error})") from error
    if not isinstance(fields, dict) or fields.get("format") != "dflash-store":
        raise StoreError(f'{path} is no manifest of ours: it has no "format": "dflash-store"')
    if fields.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{path} is of format version {fields.get('format_version')!r:.40}, this dflash-tool reads "
            f"{FORMAT_VERSION}: read it with the version that wrote it, or extract again"
        )
    fields.pop(_CHECKSUM, None)
    if data != _document(fields):
        raise _damaged(path, "it isn't as it was written, by the checksum in it")
    try:
        return Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"{where}: {first['msg']}") from error


def differences(old: Manifest, new: Manifest) -> list[Difference]:
    """The settings (see `SETTINGS`) that are not equal, in the order of `SETTINGS`."""
    return [
        Difference(name, option, _setting(old, name), _setting(new, name))
        for name, option in SETTINGS.items()
        if _comparable(old, name) != _comparable(new, name)
    ]


def check_same_settings(root: Path, old: Manifest, new: Manifest) -> None:
    """Raise `StoreError` with the values side by side if `new` can't go on with the store that `old` made."""
    lines = [
        f"  {_said(difference.option, name)}: the store has {was}, this run {now}"
        for difference in differences(old, new)
        for name, was, now in _leaves(difference)
    ]
    if not lines:
        return
    raise StoreError(
        f"the store {root} was made with other settings:\n"
        + "\n".join(lines)
        + "\nrun again with the settings of the store, or choose another --out"
    )


def settings_fingerprint(manifest: Manifest) -> str:
    """XXH3-128 (hex) of all settings: shards keep it, so that one from another store is told apart."""
    return _checksum({name: _comparable(manifest, name) for name in SETTINGS})


def _comparable(manifest: Manifest, name: str) -> Any:
    """A setting as it is compared: of data files what they hold, wherever they lie."""
    if name == "data":
        return [{"bytes": file.bytes, "xxh3": file.xxh3} for file in manifest.data]
    return _setting(manifest, name)


def _setting(manifest: Manifest, name: str) -> Any:
    value: Any = manifest.model_dump(mode="json")
    for part in name.split("."):
        value = value[part]
    return value


def _leaves(difference: Difference) -> Iterator[tuple[str, str, str]]:
    """A setting that holds several values, down to those that differ; each as (name, old, new)."""
    old, new = difference.old, difference.new
    pairs: list[tuple[str, Any, Any]] = [(difference.name, old, new)]
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{difference.name}.{key}", old.get(key), new.get(key)) for key in sorted({*old, *new})]
    elif difference.name == "data" and len(old) == len(new):
        pairs = [("data", a, b) for a, b in zip(old, new, strict=True)]
    for name, was, now in pairs:
        if was != now:
            yield name, _short(was), _short(now)


def _said(option: str, name: str) -> str:
    """The option, and the name in the manifest where that says more."""
    return option if name == option.removeprefix("--").replace("-", "_") else f"{option}: {name}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _document(fields: dict[str, Any]) -> bytes:
    return (json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=2) + "\n").encode()


def _checksum(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def _damaged(path: Path, what: str) -> DamagedManifestError:
    return DamagedManifestError(
        f"{path} is damaged: {what}; restore a copy, or run the extract that made it again: it makes it anew"
    )
