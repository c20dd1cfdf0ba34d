"""After a step was left: say what is here, hear what comes next, and go on by the plan of the new epoch.

    report_and_wait(worker, suspect)    holdings -> agent -> Go(activation, plan)
    install_epoch(worker, go)           finish or drop the step in flight, install the plan, gather, start copies

A second failure at any point is the same again: every part of `install_epoch` either has happened on this rank or is
done anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.disk_work import DISK_S
from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.manifest import check_files, read_manifest
from elaswave_fx.checkpoint.start import checkpoint_folder
from elaswave_fx.control.agent import agent
from elaswave_fx.control.agent.agent import Go, Holdings
from elaswave_fx.control.protocol import epoch_start
from elaswave_fx.control.protocol.types import Activation, Certificate, Stamp, Version
from elaswave_fx.errors import (
    Aborted,
    CheckpointError,
    CommError,
    CopyDiffers,
    DamagedCheckpoint,
    Excluded,
    HasLeft,
    JobOver,
)
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.worker.checkpoints import restore
from elaswave_fx.worker.worker import Worker, vote_of

LINK_S = 5.0
"""For links to members that are new, which have opened theirs before they asked to become one."""

TRANSFER_S = 60.0
"""For moving parameters in a transition. A lost peer ends it at once."""

Report = Callable[[_native.StepResult, Certificate], None]
"""Takes the engine's result of a step that was finished after it had been left, and the votes that finished it."""


def suspect_of(error: BaseException) -> Rank | None:
    """Whom an error accuses; None: nobody."""
    rank = getattr(error, "rank", None)
    return None if rank is None else Rank(rank)


def report_and_wait(worker: Worker, suspect: Rank | None) -> Go:
    """Stop, report, and wait for the next epoch.

    Raises Excluded when the others go on without this rank, HasLeft if that is what it was told, JobOver when nobody
    goes on.
    """
    _drain_transfers(worker)
    if worker.checkpoints is not None:  # A rank that joins may leave its first epoch before it has entered it.
        worker.checkpoints.abandon()
    decision = worker.agent.report_and_wait(holdings_of(worker), suspect)
    if isinstance(decision, agent.Excluded):
        raise Excluded(decision.reason)
    if isinstance(decision, agent.Left):
        raise HasLeft(decision.reason)
    if isinstance(decision, agent.Over):
        raise JobOver(decision.reason)
    return decision


def _drain_transfers(worker: Worker) -> None:
    """A failure between steps leaves the engine with parameters under way: they end here, and their buckets are stale.

    After a failure within a step nothing is under way any more.
    """
    worker.endpoint.abort(f"rank {worker.rank} leaves epoch {worker.plan.epoch}")
    try:
        worker.engine.native.sync(TRANSFER_S)
    except CommError:
        return  # the engine has dropped what was not there yet


def holdings_of(worker: Worker) -> Holdings:
    """What a decision may need of this rank: copies, records and votes of the step in flight."""
    held, committed = worker.engine.native.holdings(), worker.committed
    kept = [each for each in held.boxes if worker.started and each.box not in worker.damaged]
    flight = Stamp(Version(committed.version + 1), worker.plan.epoch)
    votes = [vote_of(flight, rank, payload) for rank, payload in sorted(held.votes.items())] if held.pending else None
    digests = {each.box: each.digest for each in kept}
    recorded = [each.box for each in kept if each.recorded]
    return epoch_start.holdings(committed, worker.plan.epoch, digests, recorded, votes)


def install_epoch(worker: Worker, go: Go, report: Report) -> bool:
    """Take over the epoch of `go`; whether the rank has gone back. Raises CommError or CopyDiffers when something else
    fails meanwhile."""
    began = time.perf_counter()
    activation, plan = go.activation, worker.foresight.plan(go.plan)
    was, elsewhere = worker.plan, epoch_start.is_elsewhere(worker.committed, worker.plan.epoch, activation)
    # First, for the others wait for the same links: what comes next takes ranks different times.
    worker.links.open(go.cards, LINK_S, epoch_start.anew(was.ranks, was.epoch, plan.ranks, plan.epoch))
    if not elsewhere:
        _check_promoted(worker, plan)
    _resolve_in_flight_step(worker, activation, report)
    for rank in set(worker.plan.ranks) - set(plan.ranks):
        worker.endpoint.disconnect(rank)
    worker.endpoint.advance(int(plan.epoch))
    if worker.agent.stop_requested:  # before the epoch was entered: the abort that told of it is over by now
        raise Aborted(f"rank {worker.rank}: epoch {plan.epoch} is over already")
    if plan.terminal_reason:
        _end_job(worker, plan, activation)
    boxes = was.boxes, plan.boxes
    # Copies were compared that the epoch before this one had, which need not be the one that this rank was in.
    agree = activation.copies_agree and not epoch_start.has_missed(was.epoch, plan.epoch)
    worker.stale |= epoch_start.unchecked_buckets(worker.rank, *boxes, agree, worker.damaged)
    if elsewhere:
        worker.started = False  # what is here is of no use
        worker.damaged.clear()
    worker.stale |= worker.engine.install(plan, activation.resume.version if elsewhere else None)
    if elsewhere:
        worker.committed = activation.resume
    worker.begin_epoch(plan)
    if activation.rollback:
        with worker.disk_work("reads a checkpoint, to go back to it"):
            _roll_back(worker, activation.resume)
            worker.group.barrier(DISK_S)  # for the slowest of them
    edited = time.perf_counter()
    if worker.is_first:
        worker.context.report_event("edited", plan.epoch, ms=round(1e3 * (edited - began), 3))
    moved = _gather_parameters(worker)
    _start_copies(worker)
    worker.damaged.clear()  # by now dropped, or to be replaced by what is on its way
    worker.started = True
    if worker.is_first:
        ms = round(1e3 * (time.perf_counter() - edited), 3)
        worker.context.report_event("transferred", plan.epoch, ms=ms, bytes=moved, bytes_behind=_bytes_behind(worker))
    return elsewhere


def _resolve_in_flight_step(worker: Worker, activation: Activation, report: Report) -> None:
    """The step in flight: finished where the epoch starts after it, given up otherwise."""
    native = worker.engine.native
    held = native.holdings()
    was = worker.plan.epoch
    certificate = epoch_start.resolve(worker.rank, activation, worker.committed, was, held.pending)
    if certificate is None:
        native.drop()
        return
    result = native.finish({vote.rank: vote.payload for vote in certificate.votes})
    worker.committed = activation.resume
    report(result, certificate)


def _end_job(worker: Worker, plan: Plan, activation: Activation) -> None:
    """The ranks that are left cannot go on: they save what they have, if this run makes checkpoints, and end.

    Raises JobOver.
    """
    worker.join_group(plan)
    worker.group.barrier(TRANSFER_S)  # the first rank has cleared away what earlier writers left
    failed = None
    if worker.checkpoints is not None and not activation.rollback:
        with worker.disk_work("writes the last checkpoint"):
            failed = worker.checkpoints.finish(activation.resume.version)
    raise JobOver(f"{plan.terminal_reason}; {failed}" if failed is not None else plan.terminal_reason)


def _check_promoted(worker: Worker, plan: Plan) -> None:
    """A copy that becomes the truth is read once more, before an update hides that it has changed."""
    boxes = epoch_start.promoted(worker.rank, worker.plan.boxes, plan.boxes)
    found = {box_id for box_id in boxes if not worker.engine.native.intact(box_id)}
    worker.damaged |= found
    if found:
        raise CopyDiffers(f"rank {worker.rank}: copies of boxes {sorted(found)} were damaged in memory")


def _gather_parameters(worker: Worker) -> int:
    """Working copies to every rank that has none that is whole; the bytes that all of them get."""
    native, plan, rank = worker.engine.native, worker.plan, worker.rank
    buckets = worker.artifact.buckets
    worker.stale = {index for index in worker.stale if rank in plan.groups[buckets[index].name]}
    width = max(1, len(buckets))
    wanted = bytearray(len(plan.ranks) * width)  # rank by rank, a flag per bucket
    for index in worker.stale:
        wanted[plan.ranks.index(rank) * width + index] = 1
    intervals = [(place * width, (place + 1) * width) for place in range(len(plan.ranks))]
    worker.group.all_gather(torch.frombuffer(wanted, dtype=torch.uint8), intervals, TRANSFER_S)
    takers: list[list[Rank]] = [[] for _ in buckets]
    place = wanted.find(1)
    while place >= 0:  # few, after a planned stop none
        takers[place % width].append(plan.ranks[place // width])
        place = wanted.find(1, place + 1)
    native.refresh(takers, TRANSFER_S)
    worker.stale.clear()
    return sum(plan.workload.buckets[index].work_bytes * len(ranks) for index, ranks in enumerate(takers) if ranks)


def _start_copies(worker: Worker) -> None:
    """States to new holders, which travel behind the coming steps."""
    native = worker.engine.native
    native.replicate(epoch_start.copies_due(worker.plan.boxes))
    worker.coming = worker.coming.anew(frozenset(native.holdings().catching_up))


def _bytes_behind(worker: Worker) -> int:
    """What all new holders get."""
    bytes_each = 4 * (1 + len(worker.optimizer.init(torch.zeros(1))))
    return bytes_each * sum(len(box.span) * len(box.catching_up) for box in worker.plan.boxes)


# --- No copy is left of something


def _roll_back(worker: Worker, resume: Stamp) -> None:
    """The state of the checkpoint of that version, or the beginning."""
    native = worker.engine.native
    worker.engine.load_initial()
    path = checkpoint_at(worker, resume.version)
    if path is not None:
        try:
            check_files(path, read_manifest(path))
        except DamagedCheckpoint as error:
            raise CheckpointError(f"rollback: {error}") from error
        restore(path, worker.artifact, worker.plan, worker.rank, worker.optimizer, native)
    elif resume.version != 0:
        raise CheckpointError(f"rollback: rank {worker.rank} finds no checkpoint after {resume.version} steps")


def checkpoint_at(worker: Worker, version: int) -> Path | None:
    """The checkpoint of `version` committed steps that this run made or began with."""
    resumed = worker.context.build.data.get("resume_from")
    if resumed is not None and version == worker.context.build.data["first_step"]:
        return Path(resumed)
    folder = checkpoint_folder(worker.config, worker.context.run_dir)
    return complete(folder).get(version) if folder is not None else None
