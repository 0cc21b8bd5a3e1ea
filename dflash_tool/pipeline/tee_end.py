"""The end of `--tee STORE`: the store is complete as soon as the first epoch has passed, while the run may go on."""

import math
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from dflash_tool.lifecycle import OpenStore, complete
from dflash_tool.pipeline.extraction_run import Guards, run_extraction
from dflash_tool.pipeline.flow import Flow
from dflash_tool.pipeline.tee import Tee
from dflash_tool.pipeline.train_run import TrainRun
from dflash_tool.planning import plan_rows
from dflash_tool.ranks import Ranks
from dflash_tool.schemas.manifest import RunSummary
from dflash_tool.store.recover import read_index
from dflash_tool.target import TargetModel
from dflash_tool.telemetry import ExtractTelemetry


class WholeTee:
    """Completes the store once all samples have passed. quarantined: rows with NaN or Inf states, as they are found."""

    def __init__(
        self, store: OpenStore, tee: Tee, run: TrainRun, quarantined: Collection[int], flow: Callable[[], Flow | None]
    ) -> None:
        self._store, self._tee, self._run, self._quarantined, self._flow = store, tee, run, quarantined, flow
        self._first_epoch = math.ceil(len(run.train_rows) / run.config.batch_samples)
        self._looked = self._complete = False

    def look(self) -> None:
        """After each step, on every rank: once the first epoch is over, complete the store if nothing is missing."""
        if self._looked or self._run.loop.steps_done < self._first_epoch:
            return
        self._looked = True
        self._tee.commit()
        told = self._run.ranks.everyone("tee", list(self._quarantined), stop=self._run.stop)  # all have committed
        if self._run.leads:
            missing = self._missing()
            lost = np.setdiff1d(missing, [row for rows in told for row in rows])
            if not len(lost):  # otherwise at the end: the targets are at work
                self._finish(missing.tolist())

    def finish(self, targets: dict[str, TargetModel], telemetry: ExtractTelemetry, guards: Guards) -> str:
        """At the end, on rank 0: capture what a kill has lost. Returns what the user should know, or nothing."""
        if self._complete:
            return ""
        store, missing = self._store, self._missing()
        if self._run.loop.steps_done < self._first_epoch:
            root, samples = store.plan.resolved.config.out, store.plan.samples
            return (
                f"{root} lacks {len(missing):,} of {len(samples):,} samples, because the first epoch was not finished: "
                "`dflash extract` with the same settings goes on with it"
            )
        quarantined: list[int] = []
        if len(missing):
            plan = plan_rows(store.plan, missing)
            held = np.ones(len(store.held), np.bool_)
            held[missing] = False
            job = OpenStore(plan=plan, held=held, earlier=store.earlier, finished=False, removed=())
            _, quarantined = run_extraction(job, targets, Ranks(), telemetry, guards)
        self._finish(quarantined)
        return ""

    def _missing(self) -> NDArray[np.int64]:
        """Rows of samples.arrow that are not committed."""
        plan = self._store.plan
        index = read_index(plan.resolved.config.out, plan.manifest.layers)
        return np.flatnonzero(index.find(plan.samples.sample_ids) < 0)

    def _finish(self, quarantined: list[int]) -> None:
        complete(self._store.plan, self._summary(len(self._store.plan.samples) - len(quarantined)), quarantined)
        self._complete = True

    def _summary(self, samples: int) -> RunSummary:
        """What `stats` says of the run that finished a store: of this rank's targets, since this run began."""
        flow = self._flow()
        return RunSummary(
            seconds=self._run.telemetry.snapshot().seconds,
            samples=samples,
            real_tokens=flow.tokens if flow else 0,
            padded_tokens=flow.padded_tokens if flow else 0,
            peak_inflight_bytes=flow.peak if flow else 0,
            inflight_limit_bytes=flow.limit if flow else 0,
            ranks=self._run.ranks.world,
            targets={name: target.tokens for name, target in flow.targets.items()} if flow else {},
            waited=flow.waited if flow else {},
        )
