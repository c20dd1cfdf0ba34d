"""Recovery on a worker: the requests of the training loop after a failure, on engine, links and disk.

recovery.abort_step(AbortStep(suspect=2))     ->  Inventory: boxes, records and votes in memory
recovery.report(Report(holdings, 2))          ->  Go(activation, plan)
recovery.install_plan(InstallPlan(go, ...))   ->  buckets whose parameters are not complete
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.disk_work import DISK_S
from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.manifest import check_files, read_manifest
from elaswave_fx.checkpoint.start import checkpoint_folder
from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.rank_state import Decision
from elaswave_fx.control.protocol.types import Activation, Certificate, Stamp, Version
from elaswave_fx.errors import CheckpointError, CommError, DamagedCheckpoint, JobOver
from elaswave_fx.observe.rank_events import Edited, Transferred
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import BoxId
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.worker.checkpoints import restore
from elaswave_fx.worker.worker import Worker, certificate_of, vote_of

LINK_S = 5.0
"""Timeout for links to new members, which opened theirs before they asked to join."""

TRANSFER_S = 60.0
"""Timeout for moving parameters in a transition. A lost peer ends it early."""


def suspect_of(error: BaseException) -> Rank | None:
    """The suspect that an error names, if any."""
    rank = getattr(error, "rank", None)
    return None if rank is None else Rank(rank)


class Recovery:
    """Carries out recovery requests. `result`: the engine's result of its newest committed step."""

    result: _native.StepResult

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._began_s = self._edited_s = 0.0  # start of the current epoch's entry
        self._plan = worker.plan
        self._moved = 0

    # --- Leaving

    def abort_step(self, what: do.AbortStep) -> do.Inventory:
        """End transfers and abandon an unfinished checkpoint."""
        worker = self._worker
        self._drain_transfers()
        if worker.checkpoints is not None:  # A joiner may leave its first epoch before it has entered it.
            worker.checkpoints.abandon()
        held, epoch = worker.engine.native.holdings(), worker.plan.epoch
        certificate = None
        if held.last_committed is not None and held.version > worker.at.committed.version:
            self.result = held.last_committed  # the step was committed before it failed
            certificate = self.certificate()
        flight = Stamp(Version(held.version + 1), epoch)
        votes = tuple(vote_of(flight, rank, payload) for rank, payload in sorted(held.votes.items()))
        return do.Inventory(
            certificate,
            {each.box: each.digest for each in held.boxes},
            tuple(each.box for each in held.boxes if each.recorded),
            votes if held.pending else None,
        )

    def certificate(self) -> Certificate:
        return certificate_of(Stamp(Version(self.result.version), self._worker.plan.epoch), self.result.votes)

    def _drain_transfers(self) -> None:
        """End parameter transfers after a failure between steps, which leaves them in progress; their buckets become
        stale. After a failure within a step there are none."""
        worker = self._worker
        worker.endpoint.abort(f"rank {worker.rank} leaves epoch {worker.plan.epoch}")
        try:
            worker.engine.native.sync(TRANSFER_S)
        except CommError:
            return  # the engine has dropped incomplete data

    def report(self, what: do.Report) -> Decision:
        """Report to the coordinator and wait without a timeout."""
        return self._worker.agent.report_and_wait(what.holdings, what.suspect)

    # --- Entering

    def open_links(self, what: do.OpenLinks) -> None:
        """Open missing links. Raises CommError after `LINK_S`."""
        worker = self._worker
        self._began_s = time.perf_counter()
        self._plan = worker.next_epoch.plan(what.go.plan)
        worker.links.open(what.go.infos, LINK_S, what.anew)

    def verify_replicas(self, what: do.VerifyReplicas) -> set[BoxId]:
        """Return the replicas that are damaged; the engine reads every byte."""
        return {box for box in what.boxes if not self._worker.engine.native.intact(box)}

    def advance_links(self, what: do.AdvanceLinks) -> None:
        """Close links to former members; frames of earlier epochs are dropped from now on."""
        for rank in what.gone:
            self._worker.endpoint.disconnect(rank)
        self._worker.endpoint.advance(int(what.epoch))

    def install_plan(self, what: do.InstallPlan) -> frozenset[int]:
        """Install the epoch's plan. Raises JobOver if the plan ends the job."""
        worker, plan, activation = self._worker, self._plan, what.go.activation
        if plan.terminal_reason:
            self._end_job(plan, activation)
        stale = worker.engine.install(plan, activation.resume.version if what.restart else None)
        worker.begin_epoch(plan)
        return stale

    def _end_job(self, plan: Plan, activation: Activation) -> None:
        """End the job because the remaining ranks cannot continue: write a checkpoint, if this run makes any."""
        worker, failed = self._worker, None
        worker.join_group(plan)
        worker.group.barrier(TRANSFER_S)  # the first rank has removed files of earlier writers
        if worker.checkpoints is not None and not activation.rollback:
            with worker.disk_work("writes the last checkpoint"):
                failed = worker.checkpoints.finish(activation.resume.version)
        raise JobOver(f"{plan.terminal_reason}; {failed}" if failed is not None else plan.terminal_reason)

    def restore(self, what: do.Restore) -> None:
        """Load a checkpoint or the initial state: some box has no replica left."""
        worker = self._worker
        with worker.disk_work("reads a checkpoint, to go back to it"):
            worker.engine.load_initial()
            path = checkpoint_at(worker, what.to.version)
            if path is not None:
                try:
                    check_files(path, read_manifest(path))
                except DamagedCheckpoint as error:
                    raise CheckpointError(f"rollback: {error}") from error
                restore(path, worker.artifact, worker.plan, worker.rank, worker.optimizer, worker.engine.native)
            elif what.to.version != 0:
                raise CheckpointError(f"rollback: rank {worker.rank} finds no checkpoint after {what.to.version} steps")
            worker.group.barrier(DISK_S)  # for the slowest rank

    def gather_parameters(self, what: do.GatherParameters) -> None:
        """Exchange the ranks' missing buckets, then receive and send them."""
        worker = self._worker
        self._edited_s = time.perf_counter()
        if worker.is_first:
            ms = round(1e3 * (self._edited_s - self._began_s), 3)
            worker.context.report_event(Edited(ms=ms), worker.plan.epoch)
        plan, buckets = worker.plan, worker.plan.workload.buckets
        width = max(1, len(buckets))
        wanted = bytearray(len(plan.ranks) * width)  # rank by rank, a flag per bucket
        for index in what.stale:
            wanted[plan.ranks.index(worker.rank) * width + index] = 1
        intervals = [(place * width, (place + 1) * width) for place in range(len(plan.ranks))]
        worker.group.all_gather(torch.frombuffer(wanted, dtype=torch.uint8), intervals, TRANSFER_S)
        takers: list[list[Rank]] = [[] for _ in buckets]
        place = wanted.find(1)
        while place >= 0:  # few; none after a planned reconfiguration
            takers[place % width].append(plan.ranks[place // width])
            place = wanted.find(1, place + 1)
        worker.engine.native.refresh(takers, TRANSFER_S)
        self._moved = sum(bucket.work_bytes * len(ranks) for bucket, ranks in zip(buckets, takers, strict=True))

    def sync_replicas(self, what: do.SyncReplicas) -> frozenset[BoxId]:
        """Start syncing replicas; the transfers overlap with the next steps."""
        worker, native = self._worker, self._worker.engine.native
        native.replicate(list(what.transfers))
        if worker.is_first:
            bytes_each = 4 * (1 + len(worker.optimizer.init(torch.zeros(1))))
            sync_bytes = bytes_each * sum(len(box.span) * len(box.catching_up) for box in worker.plan.boxes)
            ms = round(1e3 * (time.perf_counter() - self._edited_s), 3)
            moved = Transferred(ms=ms, bytes=self._moved, bytes_behind=sync_bytes)
            worker.context.report_event(moved, worker.plan.epoch)
        return frozenset(native.holdings().syncing)


def checkpoint_at(worker: Worker, version: int) -> Path | None:
    """The checkpoint of `version` committed steps that this run made or resumed from."""
    resumed = worker.context.build.data.resume_from
    if resumed is not None and version == worker.context.build.data.first_step:
        return Path(resumed)
    folder = checkpoint_folder(worker.config, worker.context.run_dir)
    return complete(folder).get(version) if folder is not None else None
