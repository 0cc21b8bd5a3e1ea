"""A store from the first look to the last word: what lies there, how a run goes on from it, when it is complete.

1. `check_out`      is `--out` a place to write to at all
2. `open_store`     clean up after a run that was killed, drop what is damaged, settle on the samples, plan, count what
                    is held; `join_store` sees the same from another rank
3. `begin`          room on the disk, manifest, settings
4. `complete`       every sample is committed or quarantined: say so in the manifest

Once a shard is committed no setting may differ; before that, changed data or settings are simply prepared again.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from dflash_tool.errors import DflashError, StoreError
from dflash_tool.planning import ExtractionPlan, bucket_edges, make_plan, prepare_samples
from dflash_tool.resolving import Resolved
from dflash_tool.schemas.manifest import Manifest, RunSummary
from dflash_tool.store.checksums import write_checksums
from dflash_tool.store.disk import check_room
from dflash_tool.store.files import TEMP_PREFIX, disk_errors, fsync_path, replace_file
from dflash_tool.store.index import read_attributes
from dflash_tool.store.layout import CHECKSUMS, CONFIG, HEAD, MANIFEST, SAMPLES
from dflash_tool.store.lock import LOCK
from dflash_tool.store.manifest import (
    DamagedManifestError,
    check_same_settings,
    differences,
    read_manifest,
    settings_fingerprint,
    write_manifest,
)
from dflash_tool.store.recover import drop_shards, read_index, recover
from dflash_tool.store.samples import Samples
from dflash_tool.store.scan import scan
from dflash_tool.store.verify import bytes_to_verify, verify
from dflash_tool.telemetry import ExtractTelemetry
from dflash_tool.wording import counted, verb

# Settings that samples.arrow depends on; with these equal it is used as it is.
_PREPARED_BY = {
    "tokenizer", "template", "template_args", "turns", "data", "max_length", "overlength", "mask_token_id",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OpenStore:
    """A store that a run can go on with.

    held: [N] bool, the samples committed already; earlier: the manifest of the run before, if there was one; finished:
    nothing is missing, there is nothing to do; removed: what was cleaned up, in words.
    """

    plan: ExtractionPlan
    held: NDArray[np.bool_]
    earlier: Manifest | None
    finished: bool
    removed: tuple[str, ...]


def check_out(out: Path, option: str = "--out") -> None:
    """StoreError unless `out` is new, empty, or a store (perhaps one that was killed before its manifest).

    option: that gave it.
    """
    with disk_errors(out, "look at"):
        if out.is_symlink() and not out.exists():
            raise StoreError(
                f"{option}: {out} is a link to nothing ({out.readlink()}); make that, or give another folder"
            )
        if not out.exists():
            return
        if not out.is_dir():
            raise StoreError(f"{option}: {out} is a file; give a new folder, or a store to go on with")
        names = {entry.name for entry in out.iterdir() if not entry.name.startswith(TEMP_PREFIX)} - {LOCK}
    if names and not _is_store(out, names):
        raise StoreError(
            f"{option}: {out} holds something else ({', '.join(sorted(names)[:3])}); give a new or empty folder, or a "
            "store to go on with"
        )


def _is_store(out: Path, names: set[str]) -> bool:
    """Whether a folder of these names is one of ours, also where its manifest is lost or damaged."""
    if MANIFEST in names:
        try:
            read_manifest(out)
        except DamagedManifestError:
            return CHECKSUMS in names or bool(scan(out).committed)
        return True
    if names - {SAMPLES, CHECKSUMS, CONFIG, HEAD, "shards", "index"}:
        return False
    try:
        Samples.open(out)
    except StoreError:
        return False
    return True


def open_store(resolved: Resolved, telemetry: ExtractTelemetry) -> OpenStore:
    """Look at the store `--out`, clean it up, and plan what is left to do. The caller holds the store's lock.

    Raises StoreError where settings differ from those of committed shards, with both values side by side.
    """
    root = resolved.config.out
    telemetry.stage("looking at the store")
    earlier = _earlier_manifest(root)
    fixed = bool(scan(root).committed) or (earlier is not None and earlier.complete)
    if earlier is not None and fixed:
        check_same_settings(root, earlier, earlier.model_copy(update=resolved.settings))
        if not _drop_damaged(root, telemetry, rehash=resolved.config.verify):
            earlier = None
    job = _plan_in(root, resolved, telemetry, earlier, fixed=fixed)
    if earlier is None and fixed:
        write_manifest(root, job.manifest)
        _drop_damaged(root, telemetry, rehash=resolved.config.verify, new_samples=True)
    recovered = recover(root, earlier.layers if earlier else resolved.layers)
    held = recovered.index.find(job.samples.sample_ids) >= 0
    if int(held.sum()) != len(recovered.index):
        raise StoreError(f"{root}: its shards hold samples that {SAMPLES} doesn't: run `dflash stats {root} --verify`")
    finished = (
        earlier is not None
        and earlier.complete
        and job.prepared is None
        and int(held.sum()) + len(earlier.quarantined) == len(held)
        and all((root / name).exists() for name in (HEAD, CHECKSUMS, CONFIG))
    )
    return OpenStore(plan=job, held=held, earlier=earlier, finished=finished, removed=recovered.removed)


def _earlier_manifest(root: Path) -> Manifest | None:
    """The manifest of the run before; None where there is none, or one so damaged that it is made again."""
    try:
        return read_manifest(root) if (root / MANIFEST).exists() else None
    except DamagedManifestError:
        return None


def _check_adoption(root: Path, manifest: Manifest) -> None:
    """StoreError if shards whose manifest is lost say that they were made with other settings than these."""
    ours = settings_fingerprint(manifest)
    for name in scan(root).committed:
        theirs = read_attributes(root, name).get("dflash_settings")
        if theirs not in (None, ours):  # None: its document is damaged, and found to be so next
            raise StoreError(
                f"{root} has no readable {MANIFEST}, and its shard {name} was made with other settings than those of "
                "this run; run again with the settings of the store, or choose another --out"
            )


def _plan_in(
    root: Path, resolved: Resolved, telemetry: ExtractTelemetry, earlier: Manifest | None, *, fixed: bool
) -> ExtractionPlan:
    """The plan for a store: with the samples that lie there if they are still right, else prepared (again).

    `fixed`: shards are committed, so nothing may differ: StoreError with the old and the new value.
    """
    now = earlier.model_copy(update=resolved.settings) if earlier else None
    if earlier and now and (root / SAMPLES).exists() and _samples_fit(earlier, now):
        samples = Samples.open(root)
        edges = bucket_edges(resolved.config, samples.lengths.astype(np.int64))
        if fixed:
            check_same_settings(root, earlier, now.model_copy(update={"edges": edges}))
        if edges == earlier.edges:
            return make_plan(resolved, samples, edges, earlier=earlier)
    with disk_errors(root, "prepare the samples in"):
        beside = root / f"{TEMP_PREFIX}{SAMPLES}.d"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            samples, edges, stats = prepare_samples(resolved, beside, telemetry)
            plan = make_plan(resolved, samples, edges, prepared=stats)
            if fixed and earlier is None:
                _check_adoption(root, plan.manifest)
            (beside / SAMPLES).replace(root / SAMPLES)
            fsync_path(root)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return replace(plan, samples=Samples.open(root))


def _samples_fit(earlier: Manifest, now: Manifest) -> bool:
    same_vocabulary = earlier.target.vocab_size == now.target.vocab_size
    return same_vocabulary and not _PREPARED_BY & {difference.name for difference in differences(earlier, now)}


def _drop_damaged(root: Path, telemetry: ExtractTelemetry, *, rehash: bool, new_samples: bool = False) -> bool:
    """Remove what is damaged and can be made again: shards, head, prepared samples. False if the manifest is wrong.

    new_samples: they were prepared just now, so that `checksums.json` may tell of the old ones.
    """
    done, total = 0, bytes_to_verify(root) if rehash else 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        telemetry.stage("verifying the store", done, total)

    damage = list(verify(root, rehash=rehash, progress=progress))
    drop_shards(root, {found.shard for found in damage if found.shard is not None})
    paths = {found.path for found in damage}
    lost_sums = root / CHECKSUMS in paths  # then nothing that it lists can be trusted
    with disk_errors(root, "remove damaged files in"):
        if lost_sums or any(root / HEAD in (path, *path.parents) for path in paths):
            shutil.rmtree(root / HEAD, ignore_errors=True)
        if not new_samples and (lost_sums or root / SAMPLES in paths):
            (root / SAMPLES).unlink(missing_ok=True)
        if lost_sums or root / CONFIG in paths:
            (root / CONFIG).unlink(missing_ok=True)
    return not any(found.kind == "manifest" for found in damage)


def join_store(resolved: Resolved) -> OpenStore:
    """What rank 0 has opened and begun, seen from another rank. StoreError where this rank has other settings."""
    root = resolved.config.out
    manifest = read_manifest(root)
    check_same_settings(root, manifest, manifest.model_copy(update=resolved.settings))
    samples = Samples.open(root)
    plan = make_plan(resolved, samples, manifest.edges, earlier=manifest)
    held = read_index(root, manifest.layers).find(samples.sample_ids) >= 0
    return OpenStore(plan=plan, held=held, earlier=manifest, finished=manifest.complete, removed=())


def begin(store: OpenStore) -> None:
    """Write the manifest and the resolved settings. StoreError, and nothing written, if the disk is too small."""
    plan, root = store.plan, store.plan.resolved.config.out
    lengths = plan.samples.lengths.astype(np.int64)
    left = 1 - int(lengths[store.held].sum()) / int(lengths.sum())
    check_room(root, int((plan.disk.shards + plan.disk.index) * left) + plan.disk.head)
    settings = plan.resolved.config.model_dump(mode="json", exclude_none=True)
    settings |= {name: plan.resolved.settings[name] for name in ("max_length", "batch_tokens", "mask_token_id")}
    settings |= {"layers": list(plan.manifest.layer_ids), "dtype": plan.manifest.target.dtype}
    settings |= {"data": [str(path.absolute()) for path in plan.resolved.config.data], "out": str(root.absolute())}
    if Path(plan.resolved.config.target).is_dir():
        settings["target"] = str(Path(plan.resolved.config.target).absolute())
    if plan.resolved.config.chat_template is not None:
        settings["chat_template"] = str(plan.resolved.config.chat_template.absolute())
    with disk_errors(root, "write"):
        replace_file(root / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
    write_checksums(root, root / CONFIG, *([root / SAMPLES] if plan.prepared else []))
    write_manifest(root, plan.manifest)


def sum_up(runs: Sequence[RunSummary]) -> RunSummary:
    """One summary for all ranks: work is added, seconds and bytes in flight are the largest of any rank."""
    named = [(f"rank {rank} " if len(runs) > 1 else "", run) for rank, run in enumerate(runs)]
    return RunSummary(
        seconds=max(run.seconds for run in runs),
        samples=sum(run.samples for run in runs),
        real_tokens=sum(run.real_tokens for run in runs),
        padded_tokens=sum(run.padded_tokens for run in runs),
        peak_inflight_bytes=max(run.peak_inflight_bytes for run in runs),
        inflight_limit_bytes=max(run.inflight_limit_bytes for run in runs),
        ranks=len(runs),
        targets={prefix + name: tokens for prefix, run in named for name, tokens in run.targets.items()},
        waited={prefix + who: seconds for prefix, run in named for who, seconds in run.waited.items()},
    )


def check_quarantine(plan: ExtractionPlan, quarantined: Sequence[int]) -> None:
    """DflashError if more samples have non-finite states than `--max-bad` allows. Rows of samples.arrow."""
    allowed = plan.resolved.config.max_bad
    if len(quarantined) > allowed * len(plan.samples):
        named = ", ".join(plan.samples.source(row) for row in quarantined[:3])
        raise DflashError(
            f"{counted(len(quarantined), 'sample')} {verb(len(quarantined), 'has', 'have')} NaN or Inf hidden states, "
            f"more than --max-bad allows ({allowed:g} of {len(plan.samples)}); the first: {named}. Try another --dtype "
            "or --store-dtype (float16 overflows at 65504), or look at what these hold"
        )


def complete(plan: ExtractionPlan, run: RunSummary, quarantined: Sequence[int]) -> Manifest:
    """Check that every sample is committed or quarantined (rows of samples.arrow), and say so in the manifest."""
    root, samples = plan.resolved.config.out, plan.samples
    committed = len(read_index(root, plan.manifest.layers))
    if committed + len(quarantined) != len(samples):
        raise StoreError(
            f"{root}: {counted(committed, 'sample')} committed and {len(quarantined):,} quarantined, "
            f"but {len(samples):,} planned: the store was changed while this ran; run the same command again"
        )
    check_quarantine(plan, quarantined)
    ids = tuple(sorted(samples.sample_id(row).hex() for row in quarantined))
    manifest = plan.manifest.model_copy(update={"complete": True, "run": run, "quarantined": ids})
    write_manifest(root, manifest)
    return manifest
